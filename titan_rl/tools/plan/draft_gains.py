"""Estimates how much faster drafts make sampling (generator.drafts), by the plan's own model of a decode step.

A step that verifies drafts reads its weights, and the keys and values of its sequences, once, and samples several
tokens of a sequence. But it multiplies all drafted tokens, also refused ones. So drafts pay where a step waits for
memory, and cost where it waits for products: with many sequences at once. To find drafts is taken to cost nothing. No
speed-up was measured on a GPU, where drafts are refused today.
"""

from collections.abc import Iterable, Mapping
from dataclasses import replace
from math import ceil
from pathlib import Path
from typing import Any, NamedTuple

from titan_rl.config.auto import on_device
from titan_rl.config.sections import Config
from titan_rl.preflight.shapes import shape_of
from titan_rl.record.lines import is_number
from titan_rl.tools.inspect.recorded_run import NoRun, RecordedRun
from titan_rl.tools.plan.facts import read_facts
from titan_rl.tools.plan.rates import EngineRates, Spread, Work, threads_of
from titan_rl.tools.plan.roofline import Roofline

AT_ONCE = (8, 64, 256)  # sequences of an engine
COUNTS = ("engine/drafted_tokens", "engine/accepted_tokens", "tokens/sampled")


class Drafted(NamedTuple):
    """Drafted tokens of a sequence in a decode step, as means."""

    tokens: float
    accepted: float


def speed_up(rates: EngineRates, n: int, context: float, drafted: Drafted) -> float:
    """Return how many times as fast n sequences of this mean context are sampled with drafts. Drafts allow no step to
    be scheduled ahead."""
    held = n * context
    plain = rates.device_s(n, held) + rates.waited_s(n, held)
    waited = replace(rates, ahead=False).waited_s(n, held)
    return float((1 + drafted.accepted) * plain / (rates.device_s(n * (1 + drafted.tokens), held) + waited))


def drafted_in(lines: Iterable[Mapping[str, Any]]) -> Drafted | None:
    """Return the drafts of a run's steps; None if they have none. A sequence's step samples one token and the accepted
    ones. Steps with an evaluation are left out, whose tokens are in the drafts' counts alone."""
    counted = [line for line in lines if all(is_number(line.get(key)) for key in COUNTS)]
    counted = [line for line in counted if "eval/score" not in line]
    drafted, accepted, sampled = (sum(line[key] for line in counted) for key in COUNTS)
    steps = sampled - accepted
    return Drafted(drafted / steps, accepted / steps) if drafted and steps > 0 else None


def read_drafted(text: str) -> Drafted:
    """Return the drafts of a run's folder, or of a share of accepted tokens. Raise ValueError if it is neither."""
    expected = f"expected a share from 0 to 1, or a run's folder with {COUNTS[0]} in a step without an evaluation"
    try:
        share = float(text)
    except ValueError:
        try:
            found = drafted_in(RecordedRun.read(Path(text)).steps)
        except (NoRun, OSError) as error:
            raise ValueError(f"{expected}, {error}") from None
        if found is None:
            raise ValueError(f"{expected}, found none in {text!r}") from None
        return found
    if not 0 <= share <= 1:
        raise ValueError(f"{expected}, found {text}")
    from titan_rl.ext.drafts.checks import DRAFTED  # plans without drafts need no such extension

    return Drafted(DRAFTED, DRAFTED * share)


def described(line: Roofline, drafted: Drafted) -> str:
    """Describe the speed-ups of a plan's engines."""
    work, rates = line.work, line.rates.engine
    context = work.prompt.mean + line.read + work.turns.mean * work.answer.mean / 2
    first, *others = (f"{speed_up(rates, n, context, drafted):.2f}" for n in AT_ONCE)
    more = "".join(f", {gain} with {n}" for gain, n in zip(others, AT_ONCE[1:], strict=True))
    guessed = f"{drafted.accepted:.2f} of {drafted.tokens:.2f} drafted tokens accepted in a sequence's decode step"
    limit = "an estimate" if line.on_cpu else "an estimate that no GPU has measured: generator.drafts is refused there"
    return f"{guessed}: an engine samples {first} times as fast with {AT_ONCE[0]} sequences at once{more}; {limit}"


def speed_up_on_cpu(config: Config, drafted: Drafted, answer: float) -> float | None:
    """Return the speed-up of a run on a CPU whose answers have this mean length; None if its model's folder is gone. Of
    its prompts nothing is known: a step takes little longer for them."""
    try:
        shape = shape_of(config.model)
    except (ValueError, OSError):
        return None
    config, facts = on_device(config, "cpu"), read_facts()
    core, cores = facts.gpus["CPU"], threads_of(config)[0]
    gpu = replace(core, flops=core.flops * cores, hbm=core.hbm * cores)
    line = Roofline(config, shape, gpu, facts, Work(Spread(1.0), Spread(answer)))
    samples = ceil(config.rollout.groups_per_step * config.rollout.group_size / config.generator.replicas)
    return speed_up(line.decode, min(samples, config.generator.max_num_seqs), answer / 2, drafted)
