"""Whole runs whose rollouts lag behind: bounds, corrections, resuming, placement, memory."""

import asyncio
import signal
from collections import Counter
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from support.running import Run, Runs
from support.slow_cases import slow_except
from titan_rl.tools.inspect.audit_rules import audit
from titan_rl.train.weight_sync import WeightSync
from titan_rl.wire.reports import SyncStats
from titan_rl.wire.spans import Clock

DENSE: dict[str, Any] = {"task__reward": "dense_reward:digits", "task__eval_reward": "exact", "optimizer__lr": 3e-3}
LAGGING: dict[str, Any] = {"cold_start__steps": 0, "eval__interval": 0, "checkpoint__interval": 100, **DENSE}


def rollouts(run: Run) -> list[dict[str, Any]]:
    return run.lines("rollouts.jsonl")


def ages(run: Run) -> Counter[int]:
    return Counter(line["step"] - 1 - version for line in rollouts(run) for version in line["versions"])


def trained_prompts(run: Run, steps: int, groups: int = 4, size: int = 4) -> list[int]:
    """Return the prompts that were trained on, after checking that each is a whole group of one step."""
    found = Counter((line["step"], line["prompt_id"]) for line in rollouts(run))
    assert set(found.values()) == {size}
    assert Counter(step for step, _ in found) == dict.fromkeys(range(1, steps + 1), groups)
    return [prompt for _, prompt in found]


@pytest.fixture(scope="module")
def lagging(runs: Runs, tmp_path_factory: pytest.TempPathFactory) -> Run:
    """A run of long answers that never stop early, four at a time: the generator always has work, on any CPU, so
    a sync happens in the middle of answers."""
    return runs.finish(
        tmp_path_factory.mktemp("lagging") / "run",
        rollout__max_staleness_steps=2,
        rollout__max_new_tokens=48,
        generator__max_num_seqs=4,
        training__steps=12,
        **LAGGING,
    )


@pytest.fixture(scope="module")
def apart(runs: Runs, tmp_path_factory: pytest.TempPathFactory) -> Run:
    """A run without a lag, on separate meshes."""
    return runs.finish(tmp_path_factory.mktemp("apart") / "run", **LAGGING, training__steps=4)


def test_every_token_is_within_the_bound_and_the_lag_is_used(lagging: Run) -> None:
    assert {0, 1} <= set(ages(lagging)) <= {0, 1, 2}
    assert trained_prompts(lagging, 12) == list(range(48))  # oldest first
    assert audit(lagging.folder)[0] == []
    for line in lagging.lines("metrics.jsonl"):
        assert line["policy_age/max"] <= 2
        assert sum(line["policy_age/histogram"]) == line["tokens/sampled"]
        assert line["inflight/groups"] <= 12


def test_a_rollout_may_span_versions_and_they_only_rise(lagging: Run) -> None:
    spans = [line["versions"] for line in rollouts(lagging)]
    assert all(versions == sorted(versions) for versions in spans)
    assert any(len(set(versions)) > 1 for versions in spans)


def test_versions_stay_within_the_bound_where_engines_launch_steps_ahead(runs: Runs, tmp_path: Path) -> None:
    """And the trainers find what the engines sampled: the first step's tokens are of the weights that it trains."""
    run = runs.finish(
        tmp_path / "run",
        generator__async_scheduling=True,
        rollout__max_staleness_steps=1,
        rollout__max_new_tokens=24,
        generator__max_num_seqs=4,
        training__steps=6,
        **LAGGING,
    )
    assert {0, 1} == set(ages(run))
    assert trained_prompts(run, 6) == list(range(24))
    assert audit(run.folder)[0] == []
    first = run.lines("metrics.jsonl")[0]
    assert first["ratio/min"] == pytest.approx(1, abs=1e-4)
    assert first["ratio/max"] == pytest.approx(1, abs=1e-4)


def test_a_stale_token_has_its_ratio_by_default(lagging: Run) -> None:
    """And it is 1 only while nothing is stale."""
    first, *_, last = lagging.lines("metrics.jsonl")
    for bound in ("ratio/min", "ratio/max"):
        assert first[bound] == pytest.approx(1, abs=1e-4)
    assert last["ratio/min"] < 0.99 < 1.01 < last["ratio/max"]
    assert last["off_policy/ess"] == pytest.approx(1, abs=1e-12), "nothing else weighs it"


def test_a_run_that_keeps_keys_and_values_recomputes_none(runs: Runs, lagging: Run, tmp_path: Path) -> None:
    """Requests in flight continue with the new weights; bound and ledger hold as with "swap". This run has a correction
    instead of the ratio, which is 1 only while nothing is stale."""
    kept = runs.finish(
        tmp_path / "run",
        rollout__max_staleness_steps=1,
        rollout__max_new_tokens=48,
        generator__max_num_seqs=4,
        training__steps=6,
        weight_sync__in_flight="keep",
        algorithm__proximal="trainer",
        algorithm__correction="token_tis",
        **LAGGING,
    )
    spans = [line["versions"] for line in rollouts(kept)]
    assert all(versions == sorted(versions) for versions in spans)
    assert any(len(set(versions)) > 1 for versions in spans)
    assert {0, 1} == set(ages(kept))
    assert trained_prompts(kept, 6) == list(range(24))
    assert audit(kept.folder)[0] == []
    lines = kept.lines("metrics.jsonl")
    assert sum(line["engine/recomputed_tokens"] for line in lines) == 0
    assert sum(line["engine/recomputed_tokens"] for line in lagging.lines("metrics.jsonl")) > 0
    first, *_, last = lines
    assert first["off_policy/ess"] == pytest.approx(1, abs=1e-4)
    assert last["off_policy/weight_min"] < 1 < last["off_policy/weight_max"] <= 2
    assert last["off_policy/ess"] < 0.9999


def test_generators_sample_and_take_weights_while_trainers_step(lagging: Run) -> None:
    lines = lagging.lines("metrics.jsonl")[2:]
    assert any(line["sync/hidden"] > 0 for line in lines)
    assert any(line["overlap"] > 0 for line in lines)
    assert all(0 <= line[f"bubble/{mesh}"] <= 1 for line in lines for mesh in ("trainer", "generator"))


def test_a_lagging_run_that_is_stopped_trains_every_prompt_once(runs: Runs, tmp_path: Path) -> None:
    keys: dict[str, Any] = {
        **LAGGING,
        "rollout__max_staleness_steps": 3,
        "rollout__overtake_steps": 1,
        "training__steps": 40,
    }
    run = runs.start(tmp_path / "run", **keys)
    run.wait_for_step(6)
    run.process.send_signal(signal.SIGINT)
    out = run.finish(timeout=120)
    assert run.code == 130, out
    stopped = max(line["step"] for line in run.lines("metrics.jsonl"))
    assert stopped < 40
    resumed = runs.finish(run.folder, **keys)
    assert sorted(trained_prompts(resumed, 40)) == list(range(160))
    assert audit(resumed.folder)[0] == []
    assert max(ages(resumed)) <= 3


@pytest.mark.parametrize("aggregation", slow_except(["token_mean", "sequence_mean"], 0))
def test_a_streamed_update_is_the_same_one(runs: Runs, apart: Run, tmp_path: Path, aggregation: str) -> None:
    """Groups are trained on as they finish; the denominators follow when all are known. Two runs agree to the last bit,
    and with the whole update up to the order of its sums."""
    keys: dict[str, Any] = {**LAGGING, "training__steps": 4, "algorithm__aggregation": aggregation}
    whole = apart if aggregation == "token_mean" else runs.finish(tmp_path / "whole", **keys)
    assert f'aggregation = "{aggregation}"' in (whole.folder / "config.toml").read_text()
    times = 2 if whole is apart else 1
    streamed = [runs.finish(tmp_path / f"streamed{n}", training__stream_groups=3, **keys) for n in range(times)]
    for name in ("loss", "grad_norm", "reward/mean", "tokens/trained", "ratio/mean", "advantage/max"):
        first, *again = ([line[name] for line in run.lines("metrics.jsonl")] for run in streamed)
        assert again == [first] * (times - 1)
        assert first == pytest.approx([line[name] for line in whole.lines("metrics.jsonl")], rel=1e-3, abs=1e-6), name


def test_colocated_meshes_train_as_disaggregated_ones(runs: Runs, apart: Run, tmp_path: Path) -> None:
    """Without a lag, to the last bit; with a lag they take turns, too."""
    keys: dict[str, Any] = {**LAGGING, "training__steps": 4}
    together = runs.finish(tmp_path / "together", placement__kind="colocated", **keys)
    for name in ("loss", "grad_norm", "reward/mean", "entropy"):
        assert [line[name] for line in together.lines("metrics.jsonl")] == [
            line[name] for line in apart.lines("metrics.jsonl")
        ]
    partial = runs.finish(
        tmp_path / "partial",
        placement__kind="colocated",
        rollout__max_staleness_steps=1,
        rollout__max_new_tokens=48,
        **keys,
    )
    assert set(ages(partial)) <= {0, 1}
    assert all(line["sync/hidden"] == 0 for line in partial.lines("metrics.jsonl"))


def test_memory_is_steady_over_steps(runs: Runs, tmp_path: Path) -> None:
    run = runs.start(
        tmp_path / "run",
        rollout__max_staleness_steps=2,
        training__steps=10_000,
        **{**LAGGING, "checkpoint__interval": 10_000},
    )

    def resident() -> dict[str, float]:
        pids = {"controller": run.process.pid, **run.workers()}
        return {name: _resident_mb(pid) for name, pid in pids.items()}

    measured = list[dict[str, float]]()
    for step in (40, 75, 110, 145):
        run.wait_for_step(step)
        measured.append(resident())
    run.process.send_signal(signal.SIGINT)
    run.finish(timeout=120)
    assert all(each.keys() == measured[0].keys() for each in measured)
    # A leak grows in all parts. An allocator that maps another arena grows in some of them.
    grown = {name: min(b[name] - a[name] for a, b in pairwise(measured)) for name in measured[0]}
    assert {name: megabytes for name, megabytes in grown.items() if megabytes > 6} == {}


def _resident_mb(pid: int) -> float:
    status = Path(f"/proc/{pid}/status").read_text()
    return int(status.split("VmRSS:")[1].split()[0]) / 1024


def test_a_sync_that_fails_beside_the_loop_ends_what_waits_for_it() -> None:
    """The generators sample nothing after that: a wait for rollouts would never end."""

    class Failing(WeightSync):
        async def publish(self, version: int) -> Any:
            return version

        async def pull(self, publication: Any) -> Any:
            await asyncio.sleep(0.05)
            raise ValueError("refused")

    async def body() -> None:
        no_mesh: Any = None
        weights = Failing(no_mesh, no_mesh, Clock())
        weights._last = SyncStats(0, 0, 0, 0, 0, 0)
        await weights.begin_sync(1)
        with pytest.raises(ValueError, match="refused"):
            await weights.or_sync_error(asyncio.sleep(60))
        with pytest.raises(ValueError, match="refused"):  # nor is it forgotten
            await weights.settle()

    asyncio.run(asyncio.wait_for(body(), 30))
