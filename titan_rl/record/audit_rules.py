"""The rules that a run's folder is audited by. Each is a function: its docstring is the claim, and it yields what
contradicts that in the history (run_history.py).

config.toml, rollouts.jsonl, metrics.jsonl, summary.json and the checkpoints are written by other code than the ledger
is. Whatever is in the files, the result is a list of findings.
"""

import json
import math
import statistics
import zlib
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

from titan_rl.record.checkpoints import Checkpoints
from titan_rl.record.ledger import NAME, bounds_of, digest, read_checksum
from titan_rl.record.lines import fields, invalid, objects
from titan_rl.record.run_history import METRIC, METRICS, ROLLOUTS, SUMMARY, History, Life
from titan_rl.wire.checkpoint_sums import FOLDER

ROLLOUT = fields(
    "step prompt_id group sample",
    "tokens mask versions",
    kind=lambda value: value == "rl",
    reward=lambda value: value is None or type(value) in (int, float),
    logprobs=lambda value: isinstance(value, list),
)
TURN = fields("turn branch read sampled")


def audit(folder: Path) -> tuple[list[str], str]:
    """Return all problems of a run, and one line about what was checked."""
    try:
        history = History.of(folder)
    except OSError as error:
        return [f"{NAME}: {error.strerror or error}"], ""
    problems = list[str]()
    for rule in RULES:
        try:
            problems += rule(history)
        except OSError as error:
            problems.append(f"{Path(error.filename or folder).name}: {error.strerror or error}")
    lives = history.lives.values()
    unbound = sum(start.bounds is None for start in history.starts)
    return problems, (
        f"{len(lives)} prompts: {sum(life.trained is not None for life in lives)} trained on in {len(history.steps)} "
        f"steps, {sum(bool(life.dropped) for life in lives)} dropped, "
        f"{sum(not life.undone and not life.final for life in lives)} unfinished, "
        f"{sum(life.attempts - 1 for life in lives)} admitted again by {len(history.starts) - 1} restarts"
        + f"; {unbound} starts of an earlier version, without digests, checksums and bounds"
        * bool(unbound)
    )


def events_follow(history: History) -> Iterator[str]:
    """Each event of the ledger is whole, valid and possible after those before it. The first is a start."""
    yield from history.problems
    if not history.starts:
        yield f"{NAME}: expected the start of a run, found {'nothing' if not history.lives else 'none'}"


def config_valid(history: History) -> Iterator[str]:
    """config.toml is one that a run can have."""
    if history.unread:
        yield f"config.toml: {history.unread}"


def nothing_lost(history: History) -> Iterator[str]:
    """Once the run is finished, all prompts that the source gave are trained on or dropped."""
    bounds = history.bounds(history.start)
    finished = bounds is not None and history.last >= bounds["training.steps"]
    for id, life in history.lives.items() if finished else ():
        if not life.final and not life.undone:
            yield f"prompt {id} was neither trained on nor dropped, and the run is finished"


def steps_whole(history: History) -> Iterator[str]:
    """Steps have all their prompts, and no more of them are done than training.steps."""
    for step, trained in history.steps.items():
        if (bounds := history.bounds(trained.start)) is None:
            continue
        if len(trained.prompts) != (expected := bounds["rollout.groups_per_step"]):
            yield f"step {step} trained on {len(trained.prompts)} prompts, expected {expected}"
        if step > bounds["training.steps"]:
            yield f"step {step} was trained, though training.steps is {bounds['training.steps']}"


def steps_in_order(history: History) -> Iterator[str]:
    """Without rollout.overtake_steps, prompts are trained on in the source's order."""
    for start in history.starts:
        bounds = history.bounds(start)
        order = [id for trained in history.steps.values() if trained.start is start for id in trained.prompts]
        late = [b for a, b in pairwise(order) if b < a]
        if late and bounds is not None and bounds["rollout.overtake_steps"] == 0:
            yield f"prompt {late[0]} was trained on after a later one, though rollout.overtake_steps is 0"


def nothing_stale(history: History) -> Iterator[str]:
    """No prompt was admitted earlier, sampled by an older version or trained on later than its bounds allow."""
    for id, life in history.lives.items():
        if life.undone or (bounds := history.bounds(life.start)) is None:
            continue
        oldest, overtake, size = (
            bounds[f"rollout.{key}"] for key in ("max_staleness_steps", "overtake_steps", "group_size")
        )
        if life.turn - 1 - life.admitted > oldest - overtake:
            ahead = f"rollout.max_staleness_steps - overtake_steps is {oldest - overtake}"
            yield f"prompt {id} was admitted after step {life.admitted} for step {life.turn}, {ahead}"
        if oldest == 0 and life.versions and life.versions[0] != life.sampled_after:
            yield f"prompt {id} was sampled from version {life.versions[0]} after version {life.sampled_after}"
        if life.dropped == "flat" and not bounds["algorithm.dynamic_sampling"]:
            yield f"prompt {id} is dropped as flat, though algorithm.dynamic_sampling is off"
        if life.trained is None:
            continue
        if len(life.tokens) != size:
            yield f"prompt {id} has {len(life.tokens)} samples, expected {size}"
        if life.trained > life.turn + overtake:
            yield f"prompt {id} was trained on at step {life.trained}, its turn was step {life.turn}"
        if life.versions and (age := life.trained - 1 - life.versions[0]) > oldest:
            yield f"prompt {id} was {age} steps old at step {life.trained}, the bound is {oldest}"


def digests_have_bounds(history: History) -> Iterator[str]:
    """A start whose samples have digests has bounds too: both came with the same version of the ledger."""
    for start in history.starts:
        if start.digests and start.bounds is None:
            yield f"{NAME}: the start after step {start.step} has no bounds, though its samples have digests"


def rollouts_agree(history: History) -> Iterator[str]:
    """rollouts.jsonl has each sample that was trained on once, with the ledger's tokens, versions, turns and reward."""
    seen, checksums = defaultdict[tuple[int, int], list[int]](list), defaultdict[int, int](int)
    unknown: set[tuple[int, int]] = set()
    prompts: dict[tuple[int, int], tuple[Any, ...]] = {}  # what the samples of a prompt have in common
    step = 0
    for at, line, found in objects(history.folder / ROLLOUTS, ROLLOUT):
        if isinstance(found, str):
            yield found
            continue
        key = found["step"], found["prompt_id"]
        checksums[key[0]] = zlib.crc32(line, checksums[key[0]])
        if key[0] < step:
            yield f"{at}: step {key[0]} follows step {step}"
        step = key[0]
        life, trained = history.lives.get(key[1]), history.steps.get(key[0])
        if life is None or life.trained != key[0] or trained is None:
            if key not in unknown:
                unknown.add(key)
                yield f"{ROLLOUTS} has prompt {key[1]} at step {key[0]}, the ledger does not"
            continue
        sample = found["sample"]
        if sample in seen[key]:
            yield f"{at}: sample {sample} of prompt {key[1]} at step {key[0]} is there twice"
        seen[key].append(sample)
        if (common := _common(found)) != prompts.setdefault(key, common):
            yield f"{at}: sample {sample} of prompt {key[1]} has another prompt than the samples before it"
        for wrong in _sample_problems(found, life, trained.prompts):
            yield f"{at}: prompt {key[1]}, sample {sample} at step {key[0]}: {wrong}"
    for id, life in history.lives.items():
        if life.trained is None or not history.written(life.trained):
            continue
        samples = seen.get((life.trained, id), [])
        if not samples:
            yield f"the ledger has prompt {id} at step {life.trained}, {ROLLOUTS} does not"
        elif set(samples) != set(range(len(life.tokens))):
            yield (
                f"{ROLLOUTS}: prompt {id} at step {life.trained} has the samples {sorted(samples)}, "
                f"expected 0 to {len(life.tokens) - 1}"
            )
    yield from _checksum_problems(history, ROLLOUTS, 1, checksums)


def _common(found: Mapping[str, Any]) -> tuple[Any, ...]:
    """Return the prompt of a rollout: the tokens before the first sampled one, and the texts. An environment may let
    each rollout of a prompt begin with other tokens."""
    if "turns" in found:
        return found.get("prompt"), found.get("answer"), found["group"]
    context = found["mask"].index(1) if 1 in found["mask"] else len(found["mask"])
    return found.get("prompt"), found.get("answer"), tuple(found["tokens"][:context]), found["group"]


def _sample_problems(found: Mapping[str, Any], life: Life, prompts: Sequence[int]) -> Iterator[str]:
    tokens, mask, versions, sample = found["tokens"], found["mask"], found["versions"], found["sample"]
    if not len(tokens) == len(mask) == len(found["logprobs"]):
        yield f"{len(tokens)} tokens, {len(mask)} entries in its mask, {len(found['logprobs'])} log-probs"
    own = [token for token, sampled in zip(tokens, mask, strict=False) if sampled]
    if len(versions) != len(own):
        yield f"{len(own)} sampled tokens have {len(versions)} versions"
    if "turns" not in found and versions != sorted(versions):
        yield f"its versions fall: {versions[:8]}"
    if prompts[found["group"] : found["group"] + 1] != [found["prompt_id"]]:
        yield f"it is in group {found['group']}, the step's prompts are {prompts}"
    if sample >= len(life.tokens):
        yield f"the ledger has {len(life.tokens)} samples"
        return
    if len(own) != life.tokens[sample]:
        yield f"{len(own)} sampled tokens, {life.tokens[sample]} in the ledger"
    oldest, *_, newest = (*life.versions, *life.versions) or (math.inf, -math.inf)
    if outside := [version for version in versions if not oldest <= version <= newest]:
        yield f"sampled from version {outside[0]}, from {list(life.versions)} in the ledger"
    elif life.digests is not None and digest(own, versions) != life.digests[sample]:
        yield "its tokens or versions are not those that the ledger has the digest of"
    yield from _turn_problems(found, life)
    if life.statuses and found.get("status", "completed") != life.statuses[sample]:
        yield f"it ended as {found.get('status', 'completed')}, as {life.statuses[sample]} in the ledger"
    if sample < len(life.rewards) and found["reward"] != life.rewards[sample]:
        yield f"reward {found['reward']}, {life.rewards[sample]} in the ledger"


def _turn_problems(found: Mapping[str, Any], life: Life) -> Iterator[str]:
    """Compare each turn with the engine's answer in the ledger: the mask has exactly the sampled tokens, what was read
    before them is what the engine read, and no turn is missing or there twice."""
    tokens, mask, versions, recorded = found["tokens"], found["mask"], found["versions"], life.turns_of(found["sample"])
    if not recorded and "turns" not in found:
        return
    read = mask.index(1) if 1 in mask else 0
    one = {"turn": min(recorded, default=0), "branch": 0, "read": read, "sampled": sum(mask)}
    turns = found.get("turns", [one])
    if not isinstance(turns, list) or any(not isinstance(turn, dict) or invalid(turn, TURN) for turn in turns):
        yield f"expected valid turns, found {str(turns)[:80]}"
        return
    if len({turn["turn"] for turn in turns}) < len(turns) or {turn["turn"] for turn in turns} != recorded.keys():
        yield f"it has the turns {sorted(turn['turn'] for turn in turns)}, the ledger {sorted(recorded)}"
        return
    at = own = begin = 0
    for before, turn in zip([None, *turns], turns, strict=False):
        if before is None or turn["branch"] != before["branch"]:
            begin = at
        answered, middle, end = recorded[turn["turn"]], at + turn["read"], at + turn["read"] + turn["sampled"]
        what = f"turn {turn['turn']}"
        if any(mask[at:middle]) or not all(mask[middle:end]):
            yield f"the mask of {what} is not on exactly the sampled tokens"
        if [middle - begin, read_checksum(tokens[begin:middle])] != list(answered.read):
            yield f"what was read before {what} is not what the engine read"
        sampled, of = tokens[middle:end], versions[own : own + turn["sampled"]]
        if (turn["sampled"], digest(sampled, of)) != (answered.tokens, answered.digest):
            yield f"the tokens or versions of {what} are not those that the engine sampled"
        if of != sorted(of):
            yield f"the versions of {what} fall: {of[:8]}"
        at, own = end, own + turn["sampled"]
    if at != len(tokens):
        yield f"its turns have {at} of {len(tokens)} tokens"


def metrics_agree(history: History) -> Iterator[str]:
    """metrics.jsonl has each step once, with the numbers that follow from the ledger."""
    step, checksums = 0, dict[int, int]()
    for at, line, found in objects(history.folder / METRICS, METRIC):
        if isinstance(found, str):
            yield found
        elif found["kind"] == "rl":
            if found["step"] != step + 1:
                yield f"{at}: step {found['step']} follows step {step}"
            step = found["step"]
            checksums[step] = zlib.crc32(line)
            if step not in history.steps:
                yield f"{at}: step {step}, which the ledger has not trained"
                continue
            for key, expected in _expected_metrics(history, step).items():
                value = found.get(key, expected)
                if type(value) not in (int, float) or not math.isclose(value, expected, rel_tol=1e-6, abs_tol=1e-9):
                    yield f"{at}: {key} of step {step} is {value}, {expected:g} by the ledger"
    for step in history.steps:
        if step not in checksums and history.written(step):
            yield f"{METRICS}: step {step} is missing, which the ledger has"
    yield from _checksum_problems(history, METRICS, 0, checksums)


def _expected_metrics(history: History, step: int) -> dict[str, float]:
    trained = history.steps[step]
    lives = [history.lives[id] for id in trained.prompts if id in history.lives]
    dropped = [history.lives[id] for id in trained.dropped]
    rewards = [reward for life in lives for reward in life.rewards if reward is not None]
    tokens = [count for life in lives for count in life.tokens]
    failed = sum(life.dropped.startswith("failed") for life in dropped)
    wasted = sum(sum(life.tokens) for life in dropped)
    expected: dict[str, float] = {
        "dropped/groups": len(dropped) - failed,
        "dropped/failed": failed,
        "dropped/tokens": wasted,
        "tokens/sampled": sum(tokens) + wasted,
    }
    if any(life.statuses for life in lives):
        turns = [len(life.turns_of(sample)) for life in lives for sample in range(len(life.tokens))]
        statuses = [status for life in lives for status in life.statuses]
        expected |= {f"stop/{status}": statuses.count(status) / len(statuses) for status in statuses}
        expected |= {"turns/mean": statistics.fmean(turns), "turns/max": max(turns)}
    if None in (given := [reward for life in lives for reward in life.rewards]) or any(life.statuses for life in lives):
        expected["rollouts/failed"] = given.count(None)
    if rewards and tokens:
        expected |= {
            "reward/mean": statistics.fmean(rewards),
            "reward/std": statistics.pstdev(rewards),
            "completions/mean_length": statistics.fmean(tokens),
            "completions/max_length": max(tokens),
            "policy_age/max": max([step - 1 - life.versions[0] for life in lives if life.versions], default=0),
        }
    return expected


def _checksum_problems(history: History, name: str, which: int, checksums: Mapping[int, int]) -> Iterator[str]:
    for step, trained in history.steps.items():
        if trained.logged is None:
            if trained.start.bounds is not None and history.written(step) and which == 0:
                yield f"the ledger has no checksums of the lines of step {step}"
        elif step in checksums and checksums[step] != trained.logged[which]:
            yield f"{name}: the lines of step {step} are not those that the run wrote: their checksum differs"


def config_in_force(history: History) -> Iterator[str]:
    """config.toml is the file that the run wrote, with the bounds that the ledger has."""
    start = history.start
    if history.config is None or start.bounds is None or history.cut < math.inf:
        return
    for key, value in bounds_of(history.config).items():
        if value != start.bounds[key]:
            yield f"config.toml: {key} is {value}, {start.bounds[key]} was in force by the ledger"
    if start.config is not None and zlib.crc32((history.folder / "config.toml").read_bytes()) != start.config:
        yield "config.toml: it is not the file that the run wrote: its checksum differs"


def checkpoints_saved(history: History) -> Iterator[str]:
    """The ledger has saved each checkpoint that is whole, and each step that was due. Old ones may be gone."""
    if history.config is None:
        return
    for step in Checkpoints.of(history.folder, history.config).whole_steps():
        if step not in history.saved:
            yield f"{FOLDER}/step-{step} is whole, but the ledger never saved step {step}"
    for step, trained in history.steps.items():
        interval = (history.bounds(trained.start) or {}).get("checkpoint.interval", 0)
        if interval and step % interval == 0 and step < history.last and not trained.saved:
            yield f"step {step} was due to be saved, with checkpoint.interval {interval}, and the ledger has no save"


def summary_agrees(history: History) -> Iterator[str]:
    """summary.json has no more steps than the ledger."""
    if history.config is None or not (history.folder / SUMMARY).exists():
        return
    try:
        steps = json.loads((history.folder / SUMMARY).read_bytes())["steps"]
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        yield f"{SUMMARY}: {type(error).__name__}: {error}"
    else:
        if type(steps) is not int or steps > history.reached:
            yield f"{SUMMARY}: {steps} steps, the ledger has {history.reached}"


Rule = Callable[[History], Iterator[str]]
BOUND_RULES: tuple[Rule, ...] = (nothing_lost, steps_whole, steps_in_order, nothing_stale, digests_have_bounds)
FILE_RULES = (rollouts_agree, metrics_agree, config_in_force, checkpoints_saved, summary_agrees)
RULES = (events_follow, config_valid, *BOUND_RULES, *FILE_RULES)
