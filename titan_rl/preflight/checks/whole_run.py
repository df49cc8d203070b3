"""Checks of what concerns the run as a whole: steps, overlap of sampling and training, checkpoints, resuming."""

from collections.abc import Iterator
from dataclasses import replace
from operator import attrgetter
from pathlib import Path

from titan_rl.config.sections import Config
from titan_rl.config.toml import ConfigError, as_toml, load
from titan_rl.preflight.shapes import shape_of
from titan_rl.record.checkpoints import Checkpoints
from titan_rl.wire.model_shape import ModelShape

MOST_SAMPLES = 2**20


def check_run(config: Config) -> Iterator[str]:
    rollout, cold = config.rollout, config.cold_start
    if cold.stop_at and config.eval.size == 0:
        why = "because eval.size = 0 leaves no problems to measure it on"
        yield f"cold_start.stop_at: expected 0, {why}, found {cold.stop_at:g}"
    if config.training.steps == 0 and cold.steps == 0:
        yield "training.steps: expected at least 1, because cold_start.steps is 0 too, found 0"
    if (samples := rollout.groups_per_step * rollout.group_size) > MOST_SAMPLES:
        of = f"at most {MOST_SAMPLES} samples per step (rollout.groups_per_step x rollout.group_size)"
        yield f"rollout.group_size: expected {of}, found {samples}"
    if rollout.window and rollout.lag == 0:
        yield f"rollout.window: expected 0, because rollout.lag = 0 leaves nothing to overtake, found {rollout.window}"
    if rollout.window and config.algorithm.dynamic_sampling:
        why = "because replaced groups would exceed the window"
        yield f"rollout.window: expected 0 with algorithm.dynamic_sampling, {why}, found {rollout.window}"
    yield from _check_in_flight(config)
    yield from _check_streaming(config)
    if config.checkpoint.keep_latest_k == 1:
        yield "checkpoint.keep_latest_k: expected 0 (all) or at least 2, as the newest may be half-written, found 1"


def _check_in_flight(config: Config) -> Iterator[str]:
    """Refuse what cannot be done with unfinished requests at a weight update. Without a lag there are none."""
    how, algorithm = config.weight_sync.in_flight, config.algorithm
    if not config.rollout.lag or how == "swap":
        return
    if config.placement.kind == "colocated":
        because = {"drain": "before their requests finish", "keep": "and free their keys and values"}[how]
        why = f'because engines sleep {because} if placement.kind is "colocated" and rollout.lag > 0'
        yield f'weight_sync.in_flight: expected "swap", {why}, found "{how}"'
    if how == "keep" and algorithm.kind == "rl" and (algorithm.proximal, algorithm.correction) == ("trainer", "none"):
        why = 'because weight_sync.in_flight = "keep" samples from a policy that no version of the weights has'
        yield f'algorithm.correction: expected "token_tis" or another correction, {why}, found "none"'


def _check_streaming(config: Config) -> Iterator[str]:
    """Refuse stream_groups where the update needs all groups of a step at once."""
    a, size = config.algorithm, config.training.stream_groups
    needs = {
        'algorithm.normalize is "batch"': a.normalize == "batch",
        "a step has several updates": a.updates > 1,
        "algorithm.dynamic_sampling replaces groups": a.dynamic_sampling,
        "a critic is trained": a.needs_critic,
        "rollout.window lets groups overtake each other": config.rollout.window > 0,
        'placement.kind is "colocated"': config.placement.kind == "colocated",
    }
    if size and a.kind == "rl" and any(needs.values()):
        why = " and ".join(reason for reason, holds in needs.items() if holds)
        yield f"training.stream_groups: expected 0, because {why}, found {size}"


def check_resume(config: Config, shape: ModelShape | None) -> Iterator[str]:
    """Refuse changes that a resumed run cannot make: the order of its prompts and the model in its checkpoint."""
    folder = Path(config.job.dump_folder)
    if config.job.fresh or not any((folder / config.checkpoint.folder).glob("**/.metadata")):
        return
    try:
        before = load(folder / "config.toml")
        had = shape_of(before.model)
    except (ConfigError, OSError, ValueError):
        return  # written by another version, or its model folder is gone: loading the checkpoint will tell
    kept = ["debug.seed", "task.name"]
    if not config.checkpoint.enable:
        yield f"checkpoint.enable: expected true, {_as_before(folder)}, found false"
    if config.task.name == before.task.name != "jsonl":
        kept.append("eval.size")  # it decides which sums are training examples
    hint = _as_before(folder)
    for key in kept:
        was, found = map(attrgetter(key), (before, config))
        if was != found:
            yield f"{key}: expected {as_toml(was)}, {hint}, found {as_toml(found)}"
    if shape is not None and replace(had, head=shape.head) != shape:
        yield f"[model]: expected the same shape {hint}, found another"
    policy, *others = Checkpoints.of(folder, config).folders
    if others and Checkpoints((policy,)).whole_steps() and not Checkpoints.of(folder, config).whole_steps():
        name = as_toml(config.algorithm.name)
        yield f"algorithm.name: expected an algorithm without a critic, {hint}, found {name}"


def _as_before(folder: Path) -> str:
    return f"as in the run in {folder} (or --job.fresh to start from scratch)"
