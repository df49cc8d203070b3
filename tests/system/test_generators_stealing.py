"""Two real replicas that take over each other's samples."""

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

import pytest

from support.generator_meshes import Running, begun, connected, requests, started, versions
from support.tiny import tiny_llama
from titan_rl.meshes.healing import GeneratorPolicy
from titan_rl.wire.errors import RunError
from titan_rl.wire.types import Completion, Request, Sampling

POLICY = GeneratorPolicy(steals=True)


@pytest.fixture(scope="module")
def model() -> Any:
    return tiny_llama(max_position_embeddings=1024)


@pytest.fixture(scope="module")
def stealing(model: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    with started(model, tmp_path_factory.mktemp("model"), replicas=2, tp=1, longest=1024, policy=POLICY) as running:
        yield running


@asynccontextmanager
async def slowed(pid: int) -> AsyncIterator[None]:
    """Let a process run an eighth of the time."""

    async def bursts() -> None:
        while True:
            os.kill(pid, signal.SIGSTOP)
            await asyncio.sleep(0.35)
            os.kill(pid, signal.SIGCONT)
            await asyncio.sleep(0.05)

    slowing = asyncio.create_task(bursts())
    try:
        yield
    finally:
        slowing.cancel()
        os.kill(pid, signal.SIGCONT)


def logprob_gap(model: Any, context: Sequence[int], completion: Completion) -> float:
    import torch

    with torch.no_grad():
        logits = model(torch.tensor([[*context, *completion.tokens]])).logits[0, len(context) - 1 : -1]
    expected = logits.log_softmax(-1).gather(1, torch.tensor(completion.tokens)[:, None])[:, 0]
    return (expected - torch.tensor(completion.logprobs)).abs().max().item()


def test_a_slow_replica_is_relieved_and_its_groups_are_complete_and_in_order(stealing: Running, model: Any) -> None:
    asked = [Request(f"r{i}", [1, 4 + i], list(range(8 * i, 8 * i + 8)), Sampling(900)) for i in range(4)]
    undisturbed = stealing.generate(*asked)
    before = stealing.mesh.loads()

    async def work() -> list[list[Completion]]:
        async with slowed(stealing.pids[0]):
            return await asyncio.gather(*map(stealing.mesh.generate, asked))

    done = stealing(work())
    slow, quick = stealing.mesh.loads().values()
    assert quick.stolen - before[1].stolen >= 8
    assert slow.sampled - before[0].sampled + quick.sampled - before[1].sampled == 4 * 8 * 900, "none twice"
    assert slow.sampled - before[0].sampled < quick.sampled - before[1].sampled
    assert slow[:2] == quick[:2] == (0, 0)
    for request, completions, others in zip(asked, done, undisturbed, strict=True):
        for completion, other in zip(completions, others, strict=True):
            assert len(completion.tokens) == len(completion.logprobs) == len(completion.versions) == 900
            assert completion.tokens[:3] == other.tokens[:3]
            assert logprob_gap(model, request.tokens, completion) < 1e-4


def test_what_moves_keeps_to_the_weights_that_a_drain_finishes_on(stealing: Running, model: Any) -> None:
    async def work() -> list[list[Completion]]:
        _, weights = await connected(stealing, model, in_flight="drain")
        await weights.sync(40)
        asked = [Request(f"r{i}", [1, 4 + i], list(range(8)), Sampling(600)) for i in range(4)]
        sampling, before = asyncio.gather(*map(stealing.mesh.generate, asked)), stealing.mesh.loads()[0].stolen
        async with slowed(stealing.pids[1]):
            while stealing.mesh.loads()[0].stolen == before:
                await asyncio.sleep(0.001)
            await weights.sync(41)  # overtakes what moves, unless it waits for that
        return await sampling

    assert versions(stealing(work())) == [{40}] * 4 * 8


def test_a_replica_that_dies_before_it_could_be_relieved_fails_what_it_held(stealing: Running) -> None:
    async def work() -> None:
        waiting = [
            asyncio.create_task(stealing.mesh.generate(request)) for request in requests(2, Sampling(600), samples=8)
        ]
        await begun(stealing.mesh)
        os.kill(stealing.pids[0], signal.SIGSTOP)
        relieved, _ = await asyncio.gather(waiting[1], asyncio.sleep(3))
        assert len(relieved) == 8
        os.kill(stealing.pids[0], signal.SIGKILL)
        with pytest.raises(RunError, match=r"^generator0\[tp=0\] died"):
            await waiting[0]
        for call in (stealing.mesh.generate(requests(1, Sampling(4))[0]), stealing.mesh.pull(50)):
            with pytest.raises(RunError, match="generator0"):
                await call

    stealing(work())
