"""Real generator meshes that are given weights while they sample: swapped, drained, refused, read slowly."""

import asyncio
import os
import signal
from collections.abc import Iterator
from typing import Any

import pytest

from support.generator_meshes import Running, begun, connected, greedy, requests, started, versions
from support.tiny import tiny_llama
from tests.support.signals import stop
from titan_rl.wire.errors import DeadlinePassed, RunError
from titan_rl.wire.types import Completion, Request, Sampling

LAYOUTS = {"replicas2": (2, 1, False), "tp2": (1, 2, False), "tp2_asynchronous": (1, 2, True)}


@pytest.fixture(scope="module")
def model() -> Any:
    return tiny_llama(max_position_embeddings=1024)


@pytest.fixture(scope="module", params=LAYOUTS)
def running(request: pytest.FixtureRequest, model: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    """A mesh that serves version 0: the weights in the model's folder, because there is no trainer to read from."""
    replicas, tp, asynchronous = LAYOUTS[request.param]
    room: Any = {"replicas": replicas, "tp": tp, "longest": 256, "asynchronous": asynchronous}
    with started(model, tmp_path_factory.mktemp("model"), **room) as running:
        yield running


def test_swap_and_keep_go_on_with_the_new_weights_and_drain_finishes_on_the_old(running: Running, model: Any) -> None:
    async def work(how: str) -> tuple[list[set[int]], list[set[int]]]:
        _, weights = await connected(running, model, in_flight=how)
        await weights.sync(10)
        early = asyncio.gather(*map(running.mesh.generate, requests(4, Sampling(150, 0.0), samples=1)))
        await begun(running.mesh)
        syncing, late = asyncio.create_task(weights.sync(11)), []
        while not syncing.done():  # short ones that join: a drain must not wait for them, nor may they straddle it
            late.append(await running.mesh.generate(Request(f"late{len(late)}", [1, 5], [0], Sampling(4))))
        stats = await syncing
        assert 0 < stats.write <= stats.pause < stats.seconds  # each of the replica for which it was longest
        assert 0 < stats.verify < stats.seconds
        return versions(await early), versions(late)

    early, late = running(work("drain"))
    assert early == [{10}] * 4
    assert set(map(frozenset, late)) <= {frozenset({10}), frozenset({11})}
    for how in ("swap", "keep"):
        early, late = running(work(how))
        assert early == [{10, 11}] * 4


def test_refused_weights_sample_nothing_until_good_ones_come(running: Running, model: Any) -> None:
    async def work() -> list[Completion]:
        trainer, weights = await connected(running, model)
        await weights.sync(20)
        sampling = asyncio.create_task(running.mesh.generate(Request("across", [1, 5], [0], Sampling(200, 0.0))))
        await begun(running.mesh)
        bad = await weights.publish(21)
        trainer.corrupt(bad.slot)
        with pytest.raises(RunError, match=r"generator\d\[tp=0\] failed in switch: WeightsRefused") as refused:
            await weights.pull(bad)
        assert "trainer rank 0 -> generator rank" in refused.value.details
        assert "version 21: expected checksum" in refused.value.details
        await asyncio.sleep(0.5)
        assert not sampling.done()
        await weights.sync(22)
        return await sampling

    (completion,) = running(work())
    assert set(completion.versions) == {20, 22}
    assert completion.tokens == greedy(model, [1, 5], completion)


@pytest.mark.parametrize("running", ["replicas2"], indirect=True)
def test_a_publisher_two_versions_ahead_waits_for_a_slow_reader(running: Running, model: Any) -> None:
    async def work() -> None:
        trainer, weights = await connected(running, model, seconds=5, verify="off")
        await weights.sync(30)
        before = (await running.mesh.fingerprint())[0]
        slow, trainer.scale = running.pids[1], 1.5
        first = await weights.publish(31)
        stop(slow)
        try:
            pulling = asyncio.create_task(weights.pull(first))
            await asyncio.sleep(0.2)
            trainer.scale = 1.0
            await weights.publish(32)
            with pytest.raises(
                DeadlinePassed, match=r"^weights.publish waits on .*generator1, which still reads version 31$"
            ):
                await weights.publish(33)
            assert not pulling.done()
        finally:
            os.kill(slow, signal.SIGCONT)
        await pulling
        one, other = await running.mesh.fingerprint()
        assert one == other
        assert all(one[name] != before[name] for name in before), "the weights published as 31, not later ones"
        await weights.sync(33)
        assert (await running.mesh.fingerprint())[1] == before

    running(work())
