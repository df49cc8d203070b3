"""Checks of generator.drafts."""

from collections.abc import Iterator, Sequence

from titan_rl.config.sections import Config
from titan_rl.preflight.refusal import problem
from titan_rl.wire.model_shape import ModelShape

DRAFTED = 4  # most tokens of a draft


def problems(config: Config, shape: ModelShape, device: str) -> Iterator[str]:
    """Check that steps which verify drafts sample what steps without them do."""
    ahead, records = config.generator.async_scheduling is True, config.recorded_columns
    for reason in reasons_against(on_cpu=device == "cpu", ahead=ahead, records=records, shape=shape):
        yield problem(config, "generator.drafts", f'"none", because {reason}')


def warnings(config: Config, shape: ModelShape, device: str) -> list[str]:
    return []


def reasons_against(*, on_cpu: bool, ahead: bool, records: Sequence[str], shape: ModelShape | None) -> Iterator[str]:
    """Yield why an engine may not draft."""
    if not on_cpu:
        yield "drafts are unproven on GPUs, where vLLM's model runner V2 draws by another rule"
    elif ahead:
        yield "generator.async_scheduling launches a step before the drafts of the last one are verified"
    if "kept" in records:
        yield "rollout.top_p, top_k and min_p record one token of a step"
    if "routes" in records:
        yield "algorithm.routing_replay records one token of a step"
    if shape is not None and shape.recurrent_heads:
        yield f"the recurrent state of {shape.family} has read a refused draft"
