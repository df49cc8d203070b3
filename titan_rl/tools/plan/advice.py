"""Says what another lag, split or batch would change in a finished run, by the rates that it measured."""

import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from statistics import fmean
from typing import Any

from titan_rl.config.changes import changed
from titan_rl.config.sections import Config
from titan_rl.tools.inspect.recorded_run import NoRun
from titan_rl.tools.plan.measured import rates_of, resolved_of, steps_of
from titan_rl.tools.plan.rates import Rates, Work, threads_of
from titan_rl.tools.plan.simulate import Simulation, simulate
from titan_rl.wire.errors import RunError
from titan_rl.wire.program import DONE, USAGE

STEPS = 8  # without a lag; with one, its first and last steps are more


def advise(run: str) -> int:
    try:
        folder = Path(run)
        config, rates, work = rates_of(folder)
        lines = steps_of(folder)
    except (NoRun, OSError) as error:
        print(f"titan_rl plan: --from: expected a run's folder with its steps, {error}", file=sys.stderr)
        return USAGE
    print("\n".join(advice(config, rates, work, [line["time/step"] for line in lines])))
    return DONE


def advice(config: Config, rates: Rates, work: Work, measured: list[float]) -> Iterator[str]:
    """Yield a line for each change: its simulated seconds, and what then waits."""
    e, t, s = rates.engine, rates.trainer, rates.sync
    yield f"measured: {fmean(measured):.3g} s a step, mean of {len(measured)}"
    yield f"  engine    {1e3 * e.step_s:.3g} ms a decode step, {1e6 * e.sequence_s:.3g} us a token, {e.cores:g} cores"
    yield f"            {1e6 * e.prefill_s:.3g} us a read token"
    yield f"  trainer   {1e6 * t.place_s:.3g} us a place, {t.update_s:.3g} s an update, {t.cores:g} cores a rank"
    yield f"  sync      {s.publish_s:.3g} s publish, {s.fetch_s:.3g} s fetch, {s.switch_s:.3g} s switch"
    yield f"  rewards   {rates.judge.mean:.3g} s a group; {rates.step_s:.3g} s of a step in the controller"
    yield f"  answers   {work.answer.mean:.4g} +- {work.answer.deviation:.3g} tokens, prompts {work.prompt.mean:.4g}"
    yield ""
    yield f"{'simulated':<44}{'s a step':>10}{'tokens/s':>10}{'trainer idle':>14}{'engines idle':>14}{'age':>6}"
    tokens, found, bounds = work.answer.mean * work.turns.mean, dict[str, float](), dict[str, str]()
    unknown = False
    for name, keys in changes(config).items():
        other = changed(config, keys)
        if t.cores and threads_of(other) != threads_of(config):
            name, unknown = f"{name} *", True
        try:
            run = simulated(other, rates, work, STEPS * (1 + other.rollout.max_staleness_steps))
        except RunError as error:
            yield f"{name:<44}{error}"
            continue
        samples = other.rollout.groups_per_step * other.rollout.group_size
        found[name] = run.seconds_per_step / samples
        bounds[name] = "trainers" if run.trainers_idle < run.engines_idle else "engines"
        age = fmean(step["policy_age/mean"] for step in run.steps)
        numbers = f"{run.seconds_per_step:>10.3g}{samples * tokens / run.seconds_per_step:>10,.0f}"
        yield f"{name:<44}{numbers}{run.trainers_idle:>14.0%}{run.engines_idle:>14.0%}{age:>6.2f}"
    if unknown:
        yield "* has other threads per process, whose rates this run does not tell: as if its own ones shared the cores"
    first, best = next(iter(found)), min(found, key=lambda name: found[name])
    gain = found[first] / found[best]
    yield ""
    yield f"bound by the {bounds[first]}; fastest: {best}, {gain:.2f} times the tokens a second"
    decoding = {"decode steps": e.step_s, "tokens": e.sequence_s * config.generator.max_num_seqs}
    training = {"updates": t.update_s, "places": t.place_s * config.training.seq_len}
    terms = decoding if bounds[best] == "engines" else training
    yield f"then bound by the {bounds[best]}, by their {max(terms, key=lambda term: terms[term])}"


def changes(config: Config) -> dict[str, Mapping[str, Any]]:
    """Return what to try, the run as it was first."""
    r, g = config.rollout, config.generator
    tried: dict[str, Mapping[str, Any]] = {"as it was": {}}
    apart = config.placement.kind == "disaggregated"
    for lag in (0, 1, 2, 4) if apart else ():
        if lag != r.max_staleness_steps and lag >= r.overtake_steps:
            tried[f"rollout.max_staleness_steps = {lag}"] = {"rollout.max_staleness_steps": lag}
    groups = r.groups_per_step
    if apart and groups >= 8 and not config.training.stream_groups:
        tried[f"training.stream_groups = {groups // 4}"] = {"training.stream_groups": groups // 4}
    for replicas in (g.replicas // 2, g.replicas * 2) if apart else ():
        if replicas:
            tried[f"generator.replicas = {replicas}"] = {"generator.replicas": replicas}
    for number in (groups // 2, groups * 2):
        if number and not config.training.stream_groups:
            tried[f"rollout.groups_per_step = {number}"] = {"rollout.groups_per_step": number}
    return tried


def simulated(config: Config, rates: Rates, work: Work, steps: int) -> Simulation:
    """Simulate the first steps of a config on the machine that had these rates."""
    return simulate(config, rates, work, steps=steps, resolved=resolved_of(config, bool(rates.trainer.cores)))
