"""Replicas that are killed, hang or fail while others sample: real engines in real processes."""

import asyncio
import os
import signal
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import psutil
import pytest

from support.generator_meshes import OneTrainer, Running, greedy, requests, started
from support.tiny import tiny_llama
from tests.support.signals import stop
from titan_rl.config import sections as c
from titan_rl.config.auto import on_device
from titan_rl.meshes import deaths
from titan_rl.meshes.replica import GeneratorPolicy
from titan_rl.record.incidents import Incidents
from titan_rl.train.weight_sync import WeightSync
from titan_rl.wire.errors import RunError
from titan_rl.wire.model_shape import shape_of_folder
from titan_rl.wire.spans import Clock
from titan_rl.wire.types import Completion, Sampling

HANG_SECONDS = 8.0  # starting an engine takes both cores of a small machine for seconds
SOON = 60.0  # milliseconds, and what a loaded machine makes of them; no deadline of the mesh ends a wait instead
FAULT = c.FaultSection(hang_seconds=HANG_SECONDS, max_restarts=20)


@dataclass
class Tended:
    """A mesh whose lost replicas are replaced, and the incidents that were recorded."""

    running: Running
    incidents: Incidents
    trainer: OneTrainer
    weights: WeightSync

    @property
    def mesh(self) -> Any:
        return self.running.mesh

    def __call__(self, work: Any) -> Any:
        return self.running(work)

    async def healed(self, *, after: int = -1) -> None:
        """Wait until more than `after` incidents are known, and each has its outcome."""
        while len(self.incidents.all) <= after or any(not incident.outcome for incident in self.incidents.all):
            await asyncio.sleep(0.05)


@pytest.fixture(scope="module")
def model() -> Any:
    return tiny_llama(max_position_embeddings=1024)


@pytest.fixture(scope="module", params=["two replicas", "tp2"])
def tended(request: pytest.FixtureRequest, model: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Tended]:
    replicas, tp = (1, 2) if request.param == "tp2" else (2, 1)
    with tending(model, tmp_path_factory, FAULT, replicas, tp) as tended:
        yield tended


def tending(
    model: Any,
    folders: pytest.TempPathFactory,
    fault: c.FaultSection,
    replicas: int,
    tp: int = 1,
) -> Any:
    from contextlib import contextmanager

    @contextmanager
    def whole() -> Iterator[Tended]:
        folder = folders.mktemp("model")
        incidents = Incidents(folder, fault, print)
        policy = GeneratorPolicy(hang_seconds=fault.hang_seconds, incidents=incidents, min_replicas=fault.min_replicas)
        with started(model, folder, replicas=replicas, tp=tp, longest=1024, policy=policy) as running:

            async def connect() -> tuple[Any, WeightSync]:
                trainer: Any = OneTrainer(model)
                config = on_device(
                    c.Config(
                        generator=c.GeneratorSection(tensor_parallel_degree=tp),
                        weight_sync=c.WeightSyncSection(block_kb=1),
                    ),
                    "cpu",
                )
                weights = WeightSync(trainer, running.mesh, Clock())
                await weights.connect(config, shape_of_folder(str(folder), "model"))
                await weights.sync(1)
                return trainer, weights

            yield Tended(running, incidents, *running(connect()))

    return whole()


async def sampled(tended: Tended, n: int, length: int, harm: Callable[[], None]) -> list[list[Completion]]:
    """Sample greedily, and call `harm` meanwhile."""
    asked = requests(n, Sampling(length, 0.0))
    sampling = asyncio.gather(*map(tended.mesh.generate, asked))
    await asyncio.sleep(0.1)
    harm()
    return await sampling


def all_are_whole(model: Any, n: int, length: int, done: list[list[Completion]]) -> None:
    for request, completions in zip(requests(n, Sampling(length, 0.0)), done, strict=True):
        assert len(completions) == len(request.seeds)
        for completion in completions:
            assert len(completion.tokens) == length
            assert completion.tokens == greedy(model, request.tokens, completion)


def test_beyond_its_budget_the_mesh_goes_on_with_fewer_and_then_ends_by_name(
    model: Any, tmp_path_factory: pytest.TempPathFactory
) -> None:
    fault = c.FaultSection(max_restarts=0)
    with tending(model, tmp_path_factory, fault, replicas=2) as tended:

        async def work() -> None:
            pids = deaths.alive()
            os.kill(pids["generator1[tp=0]"], signal.SIGKILL)
            await tended.mesh.generate(requests(1, Sampling(64))[0])
            while not tended.incidents.all:  # on a busy machine the request may be done before the death is known
                await asyncio.sleep(0.05)
            await tended.healed()
            assert list(tended.mesh.replicas) == [0]
            assert tended.incidents.all[-1].outcome == "given up"
            waiting = asyncio.create_task(tended.mesh.generate(requests(1, Sampling(900))[0]))
            await asyncio.sleep(0.1)
            os.kill(pids["generator0[tp=0]"], signal.SIGKILL)
            with pytest.raises(RunError, match=r"^generator0\[tp=0\] died: its process"):
                await waiting
            with pytest.raises(RunError, match="generator0"):
                await tended.weights.sync(5)

        tended(work())


def test_a_killed_replica_is_replaced_and_nothing_that_it_had_is_lost(tended: Tended, model: Any) -> None:
    last = max(tended.mesh.replicas)
    others = [rank for replica in tended.mesh.replicas.values() if replica.index != last for rank in replica.ranks]
    stay = {rank: deaths.alive()[rank] for rank in others}

    async def work() -> tuple[list[list[Completion]], float]:
        killed = 0.0

        def kill() -> None:
            nonlocal killed
            killed = time.time()
            os.kill(deaths.alive()[tended.mesh.replicas[last].ranks[-1]], signal.SIGKILL)

        return await sampled(tended, 8, 300, kill), killed

    done, killed = tended(work())
    all_are_whole(model, 8, 300, done)
    incident = tended.incidents.all[-1]
    assert incident.role == f"generator{last}"
    assert "died: its process" in incident.reason
    assert incident.time - killed < SOON, "the kernel reports it"
    tended(tended.healed())
    assert incident.outcome == "back"
    assert last in tended.mesh.replicas
    assert {rank: deaths.alive()[rank] for rank in others} == stay, "the others never stopped"


@pytest.mark.parametrize("tended", ["tp2"], indirect=True, scope="module")
def test_a_rank_whose_death_is_known_late_is_still_the_reason(tended: Tended, model: Any) -> None:
    """Its peer's collective breaks first, if it has a peer."""

    async def work() -> list[list[Completion]]:
        def kill() -> None:
            pid = deaths.alive()[tended.mesh.replicas[max(tended.mesh.replicas)].ranks[-1]]
            reporter = psutil.Process(pid).ppid()  # its fork server or, if it started cold, its launcher
            os.kill(reporter, signal.SIGSTOP)
            os.kill(pid, signal.SIGKILL)
            asyncio.get_running_loop().call_later(0.2, os.kill, reporter, signal.SIGCONT)

        return await sampled(tended, 8, 300, kill)

    all_are_whole(model, 8, 300, tended(work()))
    assert "died: its process was killed by signal 9" in tended.incidents.all[-1].reason
    tended(tended.healed())


def test_who_comes_back_holds_the_weights_that_the_others_hold(tended: Tended) -> None:
    async def work() -> list[dict[str, str]]:
        tended.trainer.scale = 1.5
        await tended.weights.sync(2)
        last = tended.mesh.replicas[max(tended.mesh.replicas)]
        before = (await tended.mesh.fingerprint())[-len(last.ranks) :]
        count = len(tended.incidents.all)
        os.kill(deaths.alive()[last.ranks[0]], signal.SIGKILL)
        await tended.healed(after=count)
        after = await tended.mesh.fingerprint()
        assert after[-len(last.ranks) :] == before
        (completion,) = await tended.mesh.generate(requests(1, Sampling(4), samples=1)[0])
        assert set(completion.versions) == {2}
        tended.trainer.scale = 1.0
        await tended.weights.sync(1)
        return after

    assert tended(work())


def test_a_replica_that_stands_still_is_replaced_within_its_deadline(tended: Tended, model: Any) -> None:
    async def work() -> tuple[list[list[Completion]], float]:
        first = tended.mesh.replicas[min(tended.mesh.replicas)]
        stopped = 0.0

        def stop() -> None:
            nonlocal stopped
            stopped = time.time()
            os.kill(deaths.alive()[first.ranks[-1]], signal.SIGSTOP)

        done = await sampled(tended, 6, 300, stop)
        await tended.healed()
        return done, stopped

    count = len(tended.incidents.all)
    done, stopped = tended(work())
    all_are_whole(model, 6, 300, done)
    (incident,) = tended.incidents.all[count:]
    assert "did not answer within" in incident.reason
    assert incident.time - stopped < 2 * HANG_SECONDS + SOON


@pytest.mark.parametrize("tended", ["two replicas"], indirect=True, scope="module")
def test_a_replica_that_fails_is_replaced(tended: Tended, model: Any) -> None:
    async def work() -> list[list[Completion]]:
        first = tended.mesh.replicas[min(tended.mesh.replicas)]
        failing: list[asyncio.Task[Any]] = []

        def fail() -> None:  # a switch to weights that were never fetched
            failing.append(asyncio.create_task(first.head("switch", 9, 5, seconds=5)))

        done = await sampled(tended, 6, 200, fail)
        await asyncio.gather(*failing, return_exceptions=True)
        await tended.healed()
        return done

    done = tended(work())
    all_are_whole(model, 6, 200, done)
    assert "RuntimeError" in tended.incidents.all[-1].reason


@pytest.mark.parametrize("tended", ["two replicas"], indirect=True)
def test_a_replica_that_dies_in_a_pull_is_not_waited_for(tended: Tended) -> None:
    async def work() -> float:
        first = tended.mesh.replicas[min(tended.mesh.replicas)]
        pid = deaths.alive()[first.ranks[0]]
        stop(pid)
        pulling = asyncio.create_task(tended.weights.sync(3))
        await asyncio.sleep(0.2)
        os.kill(pid, signal.SIGKILL)
        began = time.monotonic()
        await pulling
        took = time.monotonic() - began
        (completion,) = await tended.mesh.generate(requests(1, Sampling(4), samples=1)[0])
        assert set(completion.versions) == {3}
        await tended.healed()
        await tended.weights.sync(4)  # both slots are free again
        await tended.weights.sync(1)
        return took

    assert tended(work()) < SOON


def test_weights_that_are_damaged_after_they_were_packed_are_packed_again(tended: Tended) -> None:
    async def work() -> tuple[int, set[int]]:
        count = len(tended.incidents.all)
        await tended.weights.sync(5)
        before = await tended.mesh.fingerprint()
        bad = await tended.weights.publish(6)
        tended.trainer.corrupt(bad.slot)
        assert (await tended.weights.pull(bad)).refused == ()
        assert await tended.mesh.fingerprint() == before
        (completion,) = await tended.mesh.generate(requests(1, Sampling(4), samples=1)[0])
        await tended.weights.sync(1)
        return len(tended.incidents.all) - count, set(completion.versions)

    assert tended(work()) == (0, {6})


@pytest.mark.parametrize("tended", ["two replicas"], indirect=True)
def test_the_mesh_grows_and_shrinks_while_it_samples_and_no_token_is_lost(tended: Tended, model: Any) -> None:
    async def work() -> tuple[list[list[Completion]], int]:
        asked = requests(8, Sampling(600, 0.0))
        sampling = asyncio.gather(*map(tended.mesh.generate, asked))
        before = sum(stats.tokens for stats in await tended.mesh.stats())
        await asyncio.sleep(0.1)
        assert await tended.mesh.scale(1) == 1
        done = await sampling
        (left,) = await tended.mesh.stats()
        assert await tended.mesh.scale(3) == 3
        assert len(await tended.mesh.fingerprint()) == 3
        assert await tended.mesh.scale(2) == 2
        assert before + left.tokens  # counts since start-up
        return done, len(tended.incidents.all)

    count = len(tended.incidents.all)
    done, answered = tended(work())
    all_are_whole(model, 8, 600, done)
    assert answered == count, "nothing was lost"
