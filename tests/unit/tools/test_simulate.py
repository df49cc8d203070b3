"""A simulated run takes the seconds that can be computed by hand, and the run's own code keeps its promises in it."""

import asyncio
import math
from dataclasses import replace
from typing import Any

import pytest

from titan_rl.config import sections as c
from titan_rl.tools.plan.engine_model import EngineModel
from titan_rl.tools.plan.rates import EngineRates, Rates, Spread, SyncRates, TrainerRates, Work
from titan_rl.tools.plan.simulate import ReplicaLoss, Simulation, simulate
from titan_rl.tools.plan.virtual_time import Cores, Stuck, VirtualLoop, in_virtual_time
from titan_rl.wire.errors import DeadlinePassed

PROMPT, ANSWER = 50, 200
WORK = Work(Spread(PROMPT), Spread(ANSWER))
VARIED = Work(Spread(PROMPT, 20), Spread(ANSWER, 150))
STEP, PREFILL, UPDATE, PUBLISH, FETCH, SWITCH = 0.02, 1e-3, 7.0, 0.5, 1.0, 0.25
RATES = Rates(
    EngineRates(step_s=STEP, prefill_s=PREFILL), TrainerRates(update_s=UPDATE), SyncRates(PUBLISH, FETCH, SWITCH)
)
GENERATE = PROMPT * PREFILL + ANSWER * STEP


def config(
    groups: int = 1, size: int = 1, lag: int = 0, window: int = 0, replicas: int = 1, **sections: Any
) -> c.Config:
    rollout = c.RolloutSection(
        groups_per_step=groups,
        group_size=size,
        max_new_tokens=1000,
        max_staleness_steps=lag + window,
        overtake_steps=window,
    )
    generator = c.GeneratorSection(replicas=replicas)
    training = c.TrainingSection(seq_len=2048, local_batch_size=4)
    return c.Config(**{"rollout": rollout, "generator": generator, "training": training, **sections})


def times(run: Simulation, name: str) -> list[float]:
    return [step[f"time/{name}"] for step in run.steps]


def test_a_step_is_its_parts_one_after_the_other() -> None:
    run = simulate(config(), RATES, WORK, steps=3)
    assert times(run, "generate") == pytest.approx([GENERATE] * 3)
    assert times(run, "train") == pytest.approx([UPDATE] * 3)
    assert times(run, "sync") == pytest.approx([PUBLISH + FETCH + SWITCH] * 3)
    assert times(run, "step") == pytest.approx([GENERATE + UPDATE + PUBLISH + FETCH + SWITCH] * 3)
    assert run.seconds_per_step == pytest.approx(run.ends[-1] / 3)
    assert [step["tokens/sampled"] for step in run.steps] == [ANSWER] * 3


def test_a_step_of_an_engine_grows_with_its_context() -> None:
    """Both samples read the prompt, which is computed once, and all that they have sampled."""
    engine = EngineRates(STEP, weights_s=0.001, sequence_s=0.002, context_s=1e-6, prefill_s=PREFILL)
    run = simulate(config(size=2), replace(RATES, engine=engine), WORK, steps=1)
    steps = sum(STEP + 2 * 0.002 + 1e-6 * 2 * (PROMPT + k) for k in range(ANSWER))
    assert times(run, "generate") == pytest.approx([(PROMPT + 1) * PREFILL + steps])
    assert run.prefix_hits == pytest.approx((PROMPT - 1) / (2 * PROMPT))
    run = simulate(config(size=2), replace(RATES, engine=replace(engine, block=32)), WORK, steps=1)
    assert run.prefix_hits == pytest.approx(32 / (2 * PROMPT))


@pytest.mark.parametrize("host", [0.0, 0.004, 0.00405, 0.5])
def test_an_engine_that_schedules_ahead_takes_the_longer_of_host_and_device(host: float) -> None:
    """The device's part of a step grows past the host's in the middle of the answers, or never does."""
    engine = EngineRates(0.0, weights_s=0.004, context_s=1e-6, prefill_s=PREFILL, gap_s=host, ahead=True)
    run = simulate(config(size=2), replace(RATES, engine=engine), WORK, steps=1)
    steps = sum(max(host, 0.004 + 1e-6 * 2 * (PROMPT + k)) for k in range(ANSWER))
    assert times(run, "generate") == pytest.approx([(PROMPT + 1) * PREFILL + steps])


@pytest.mark.parametrize("answer", [100, 1000])
def test_with_a_lag_a_step_takes_as_long_as_the_slower_side(answer: int) -> None:
    """Trainers update and publish; groups are sampled for two steps while one of them is trained and synced."""
    work = replace(WORK, answer=Spread(answer))
    run = simulate(config(lag=1), RATES, work, steps=12)
    around = PROMPT * PREFILL + answer * STEP + UPDATE + PUBLISH + FETCH + 2 * SWITCH
    assert run.seconds_per_step == pytest.approx(max(UPDATE + PUBLISH, around / 2), rel=0.02)


@pytest.mark.parametrize(("lag", "window"), [(0, 0), (1, 0), (1, 2), (4, 0)])
@pytest.mark.parametrize("how", ["swap", "keep", "drain"])
def test_tokens_are_as_old_as_allowed(lag: int, window: int, how: Any) -> None:
    rates = replace(RATES, trainer=TrainerRates(update_s=0.5))
    given = config(4, 2, lag, window, replicas=2, weight_sync=c.WeightSyncSection(in_flight=how))
    run = simulate(given, rates, VARIED, steps=12)
    ages = [step["policy_age/max"] for step in run.steps]
    assert max(ages) <= lag + window
    assert (max(ages) > 0) == (lag > 0)


def test_the_stream_refuses_older_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(EngineModel, "_versioned", lambda self, begin, end: [(0, end - begin)])
    with pytest.raises(RuntimeError, match="step 2: expected version 1 or newer, found 0"):
        simulate(config(), RATES, WORK, steps=3)


def test_a_lost_replica_is_replaced_and_no_group_is_lost() -> None:
    given = config(4, 2, lag=1, replicas=2)
    rates = replace(RATES, engine=replace(RATES.engine, start_s=10.0))
    run, whole = (
        simulate(given, rates, VARIED, steps=6, faults=f) for f in ([ReplicaLoss(1, 1.0), ReplicaLoss(1, 25.0)], [])
    )
    assert [step["tokens/sampled"] for step in run.steps] == [step["tokens/sampled"] for step in whole.steps]
    assert run.resampled > 0
    died, back, *again = run.notes
    assert died == "generator1[tp=0] died: its process was killed by signal 9"
    assert back.startswith("generator1 is back after 1")  # engine.start_s, and the weights
    assert again[0] == died


def test_the_same_seed_gives_the_same_run() -> None:
    given = config(8, 4, lag=2, window=1, replicas=3)
    rates = replace(RATES, judge=Spread(2, 3), engine=replace(RATES.engine, cached_tokens=1500))
    first, again, other = (simulate(given, rates, VARIED, steps=6, seed=seed) for seed in (1, 1, 2))
    assert first == again
    assert first.ends != other.ends
    assert first.preemptions > 0


def test_a_later_turn_reads_what_the_environment_added() -> None:
    work = replace(WORK, turns=Spread(3), observation=Spread(30))
    run = simulate(config(), replace(RATES, environment=Spread(2.0)), work, steps=2)
    read = PROMPT + 2 * 30
    assert times(run, "generate") == pytest.approx([read * PREFILL + 3 * (ANSWER * STEP + 2.0)] * 2)
    assert [step["turns/mean"] for step in run.steps] == [3, 3]


def test_roles_score_while_trainers_wait() -> None:
    """The critic and the reference have their own meshes."""
    algorithm = c.AlgorithmSection(advantage="gae", kl_coef=0.1)
    rates = replace(RATES, trainer=TrainerRates(update_s=UPDATE, score_s=0.01))
    run = simulate(config(4, 2, algorithm=algorithm), rates, WORK, steps=2)
    assert min(times(run, "judge")) > 0
    assert times(run, "step") == pytest.approx([sum(step[f"time/{p}"] for p in PARTS) for step in run.steps])


PARTS = ("generate", "judge", "train", "sync", "wait")


def test_engines_sleep_while_colocated_trainers_work() -> None:
    given = config(2, 2, lag=1, placement=c.PlacementSection(kind="colocated"))
    run = simulate(given, RATES, VARIED, steps=8)
    assert run.engines_idle > UPDATE * 8 / run.ends[-1] - 0.01


def test_busy_parts_share_cores() -> None:
    ends: list[float] = []

    async def body(loop: VirtualLoop) -> None:
        cores = Cores(loop, 2)

        async def part(begin: float, seconds: float) -> None:
            await cores.work(begin)
            await cores.work(seconds, 2)
            ends.append(loop.now)

        await asyncio.gather(part(0.0, 3.0), part(1.0, 1.0))

    in_virtual_time(body)
    assert ends == pytest.approx([3.0, 4.0])


def test_engine_and_trainers_on_the_same_cores_are_half_as_fast() -> None:
    """Each alone would keep the other waiting; together they do as much as one after the other."""
    rates = replace(
        RATES,
        cores=2.0,
        engine=replace(RATES.engine, cores=2.0),
        trainer=replace(RATES.trainer, cores=2.0),
        sync=SyncRates(0.0, 0.0, 0.0),
    )
    run = simulate(config(lag=1), rates, WORK, steps=12)
    assert run.seconds_per_step == pytest.approx(UPDATE + GENERATE, rel=0.02)


def test_deadlines_pass_in_virtual_time() -> None:
    given = config(rollout=c.RolloutSection(groups_per_step=1, group_size=1, max_new_tokens=1000, timeout_seconds=5))
    with pytest.raises(DeadlinePassed, match="did not answer prompt 0 within 5 s"):
        simulate(given, RATES, replace(WORK, answer=Spread(1000)), steps=1)


def test_what_never_happens_is_an_error() -> None:
    async def body(loop: VirtualLoop) -> None:
        await loop.create_future()

    with pytest.raises(Stuck):
        in_virtual_time(body)


def test_a_thousand_replicas() -> None:
    given = config(1000, 2, lag=1, replicas=1000)
    run = simulate(given, RATES, VARIED, steps=2)
    assert len(run.steps) == 2
    assert 0 < run.engines_idle < 1
    assert math.isclose(run.prefix_hits, 0.5, abs_tol=0.05)
