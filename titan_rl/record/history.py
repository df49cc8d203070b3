"""Audits a run folder: replays the ledger, holds it to the bounds that were in force, and compares the other files.

Whatever is in the files, the result is a list of findings.
"""

from collections.abc import Iterator, Mapping
from itertools import pairwise
from pathlib import Path

from titan_rl.config.sections import Config
from titan_rl.config.toml import ConfigError, load
from titan_rl.record.comparisons import config_problems, disk_problems, metric_problems, rollout_problems
from titan_rl.record.ledger import NAME, bounds_of
from titan_rl.record.replay import History, Start


def audit(folder: Path) -> tuple[list[str], str]:
    """Return all problems of a run, and one line about what was checked."""
    try:
        history = History.of(folder)
    except OSError as error:
        return [f"{NAME}: {error.strerror or error}"], ""
    problems = history.problems
    if not history.starts:
        problems.append(f"{NAME}: expected the start of a run, found {'nothing' if not history.lives else 'none'}")
    config = None
    try:
        config = load(folder / "config.toml")
    except (ConfigError, OSError, ValueError) as error:
        problems.append(f"config.toml: {error}")
    checks = [bound_problems(history, config), rollout_problems(folder, history), metric_problems(folder, history)]
    if config is not None:
        checks += [config_problems(folder, history, config), disk_problems(folder, history, config)]
    for check in checks:
        try:
            problems += check
        except OSError as error:
            problems.append(f"{Path(error.filename or folder).name}: {error.strerror or error}")
    trained = sum(life.trained is not None for life in history.lives.values())
    dropped = sum(bool(life.dropped) for life in history.lives.values())
    unfinished = sum(not life.undone and not life.final for life in history.lives.values())
    again = sum(life.attempts - 1 for life in history.lives.values())
    unbound = sum(start.bounds is None for start in history.starts)
    return problems, (
        f"{len(history.lives)} prompts: {trained} trained on in {len(history.steps)} steps, {dropped} dropped, "
        f"{unfinished} unfinished, {again} admitted again by {history.begun - 1} restarts"
        + f"; {unbound} starts of an earlier version, without digests, checksums and bounds"
        * bool(unbound)
    )


def bound_problems(history: History, config: Config | None) -> Iterator[str]:
    """Hold the ledger to the bounds that were in force, which config.toml has where an old ledger has none."""
    for check in (_outcomes, _steps, _staleness):
        yield from check(history, config)
    for start in history.starts:
        if start.digests and start.bounds is None:
            yield f"{NAME}: the start after step {start.step} has no bounds, though its samples have digests"


def _outcomes(history: History, config: Config | None) -> Iterator[str]:
    """Check that no prompt is lost: all that the source gave are trained on or dropped, once the run is finished."""
    bounds = _in_force(history.start, history, config)
    if bounds is None or history.last < bounds["training.steps"]:
        return
    for id, life in history.lives.items():
        if not life.final and not life.undone:
            yield f"prompt {id} was neither trained on nor dropped, and the run is finished"


def _steps(history: History, config: Config | None) -> Iterator[str]:
    """Check that steps are complete and follow the source's order."""
    for step, trained in history.steps.items():
        if (bounds := _in_force(trained.start, history, config)) is None:
            continue
        expected = bounds["rollout.groups_per_step"]
        if len(trained.prompts) != expected:
            yield f"step {step} trained on {len(trained.prompts)} prompts, expected {expected}"
        if step > bounds["training.steps"]:
            yield f"step {step} was trained, though training.steps is {bounds['training.steps']}"
    for start in history.starts:
        bounds = _in_force(start, history, config)
        order = [id for trained in history.steps.values() if trained.start is start for id in trained.prompts]
        late = [b for a, b in pairwise(order) if b < a]
        if late and bounds is not None and bounds["rollout.window"] == 0:
            yield f"prompt {late[0]} was trained on after a later one, though rollout.window is 0"


def _staleness(history: History, config: Config | None) -> Iterator[str]:
    """Check that prompts respect the bounds under which they live."""
    for id, life in history.lives.items():
        if life.undone or (bounds := _in_force(life.start, history, config)) is None:
            continue
        lag, window, size = (bounds[f"rollout.{key}"] for key in ("lag", "window", "group_size"))
        if life.turn - 1 - life.admitted > lag:
            yield f"prompt {id} was admitted after step {life.admitted} for step {life.turn}, rollout.lag is {lag}"
        if lag == window == 0 and life.versions and life.versions[0] != life.sampled_after:
            yield f"prompt {id} was sampled from version {life.versions[0]} after version {life.sampled_after}"
        if life.dropped == "flat" and not bounds["algorithm.dynamic_sampling"]:
            yield f"prompt {id} is dropped as flat, though algorithm.dynamic_sampling is off"
        if life.trained is None:
            continue
        if len(life.tokens) != size:
            yield f"prompt {id} has {len(life.tokens)} samples, expected {size}"
        if life.trained > life.turn + window:
            yield f"prompt {id} was trained on at step {life.trained}, its turn was step {life.turn}"
        if life.versions and (age := life.trained - 1 - life.versions[0]) > lag + window:
            yield f"prompt {id} was {age} steps old at step {life.trained}, the bound is {lag + window}"


def _in_force(start: Start, history: History, config: Config | None) -> Mapping[str, int] | None:
    """Return the bounds of a start. A ledger of an earlier version has none: config.toml has those of its last start,
    and earlier ones are not known."""
    if start.bounds is None and start is history.start and config is not None:
        return bounds_of(config)
    return start.bounds
