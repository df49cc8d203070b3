"""Real generator meshes, a vLLM engine in each Monarch process, against Hugging Face's forward of the same Llama."""

import asyncio
import os
import signal
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

import pytest

from support.generator_meshes import OneTrainer, Running, greedy, requests, started
from support.tiny import tiny_llama
from titan_rl.actors.vllm.engine import SampleId, Withdrawn
from titan_rl.config import sections as c
from titan_rl.train.weight_sync import Slots, WeightSync
from titan_rl.wire.clock import Clock
from titan_rl.wire.errors import DeadlinePassed, RunError
from titan_rl.wire.manifest import Publication
from titan_rl.wire.model_shape import shape_of_folder
from titan_rl.wire.types import Completion, Request, Sampling

LAYOUTS = {"replicas2": (2, 1), "tp2": (1, 2)}


@pytest.fixture(scope="module")
def model() -> Any:
    return tiny_llama(max_position_embeddings=1024)


@pytest.fixture(scope="module", params=LAYOUTS)
def running(request: pytest.FixtureRequest, model: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    """Serving version 0: the weights in the model's folder, for there is no trainer to read any from."""
    replicas, tp = LAYOUTS[request.param]
    with started(model, tmp_path_factory.mktemp("model"), replicas=replicas, tp=tp, longest=256) as running:
        yield running


@pytest.fixture(scope="module")
def stealing(model: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    with started(model, tmp_path_factory.mktemp("model"), replicas=2, tp=1, longest=1024, steal=True) as running:
        yield running


def test_greedy_is_the_argmax(running: Running, model: Any) -> None:
    asked = requests(8, Sampling(16, 0.0), samples=1)
    for request, (completion,) in zip(asked, running.generate(*asked), strict=True):
        assert completion.tokens == greedy(model, request.tokens, completion)
        assert completion.versions == [0] * 16


def test_requests_of_a_tick_enter_together_run_after_run(running: Running) -> None:
    before = running(running.mesh.stats())
    first = running.generate(*requests(64, Sampling(12)))
    after = running(running.mesh.stats())
    assert [len(completions) for completions in first] == [2] * 64
    assert first == running.generate(*requests(64, Sampling(12)))  # to the last bit of the log-probs
    for now, then in zip(after, before, strict=True):
        assert now.steps - then.steps == 12
        assert now.tokens - then.tokens == 64 * 2 * 12 // len(before)


def test_requests_join_and_leave_a_running_batch(running: Running) -> None:
    async def work() -> list[list[Completion]]:
        async def one(i: int) -> list[Completion]:
            await asyncio.sleep(0.01 * (i % 8))
            return await running.mesh.generate(Request(f"r{i}", [1, i], [i], Sampling(8 + i % 40)))

        return await asyncio.gather(*map(one, range(64)))

    assert [len(completion.tokens) for (completion,) in running(work())] == [8 + i % 40 for i in range(64)]


def test_a_pull_amid_sampling_switches_every_rank_at_one_step(running: Running, model: Any) -> None:
    async def work() -> list[list[Completion]]:
        sampling = asyncio.gather(*map(running.mesh.generate, asked))
        await asyncio.sleep(0.05)
        assert (await running.mesh.pull(1)).bytes == 0  # nothing connected, nothing read
        done = await sampling
        await running.mesh.pull(0)
        return done

    asked = requests(16, Sampling(200, 0.0), samples=1)
    for request, (completion,) in zip(asked, running(work()), strict=True):
        switched = completion.versions.index(1)
        assert completion.versions == [0] * switched + [1] * (200 - switched)
        assert 0 < switched < 200
        assert completion.tokens == greedy(model, request.tokens, completion)


def test_who_gives_up_disturbs_nobody(running: Running) -> None:
    async def work() -> list[Completion]:
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(running.mesh.generate(Request("slow", [1], [0], Sampling(200))), 0.05)
        return await running.mesh.generate(Request("next", [1], [0], Sampling(8)))

    (completion,) = running(work())
    assert len(completion.tokens) == 8


def test_a_sample_that_is_withdrawn_goes_on_elsewhere_as_if_nothing_had_happened(running: Running, model: Any) -> None:
    asked = Request("a", [1, 5], [0, 1, 2], Sampling(200, 0.0))
    first, *_, last = [*running.mesh.replicas.values()] * 2

    async def work() -> tuple[list[Completion], list[Completion]]:
        staying = first.put(asked)
        await asyncio.sleep(0.05)
        withdrawn: list[Withdrawn] = await first.head("withdraw", [SampleId("a", 0), SampleId("a", 2)], seconds=5)
        assert [w.sample.nth for w in withdrawn] == [0, 2]
        rest = Request("a~1", asked.tokens, [0, 2], asked.sampling, [w.begun for w in withdrawn])
        return await staying, await last.put(rest)

    (early, whole, late), rest = running(work())
    assert [early.finish, whole.finish, late.finish] == ["abort", "length", "abort"]
    assert 0 < len(early.tokens) == len(late.tokens) < 200
    for completion in (whole, *rest):
        assert completion.tokens == greedy(model, [1, 5], completion)
        assert len(completion.tokens) == len(completion.versions) == 200
        assert completion.logprobs == pytest.approx(whole.logprobs, abs=1e-5)


def test_replicas_hold_equal_weights_and_ranks_their_shares(running: Running) -> None:
    one, other = running(running.mesh.fingerprint())
    for name in one:
        shared = "norm" in name or len(running.mesh.replicas) == 2
        assert (one[name] == other[name]) == shared, name


async def connected(running: Running, model: Any, seconds: int = 60, **sync: Any) -> tuple[OneTrainer, WeightSync]:
    trainer: Any = OneTrainer(model)
    tp = len(running.pids) // len(running.mesh.replicas)
    config = c.Config(
        generator=c.GeneratorSection(tensor_parallel_degree=tp),
        weight_sync=c.WeightSyncSection(block_kb=1, **sync),
        comm=c.CommSection(train_timeout_seconds=seconds),
    )
    weights = WeightSync(trainer, running.mesh, Clock())
    await weights.connect(config, shape_of_folder(str(running.folder), "model"))
    assert weights.transports == "shared memory"
    return trainer, weights


def versions(done: Sequence[Sequence[Completion]]) -> list[set[int]]:
    return [set(completion.versions) for completions in done for completion in completions]


def test_swap_goes_on_with_the_new_weights_and_drain_finishes_on_the_old(running: Running, model: Any) -> None:
    async def work(how: str) -> tuple[list[set[int]], list[set[int]]]:
        _, weights = await connected(running, model, in_flight=how)
        await weights.sync(10)
        early = asyncio.gather(*map(running.mesh.generate, requests(4, Sampling(150, 0.0), samples=1)))
        await asyncio.sleep(0.05)
        syncing, late = asyncio.create_task(weights.sync(11)), []
        while not syncing.done():  # short ones that join: a drain must not wait for them, nor may they straddle it
            late.append(await running.mesh.generate(Request(f"late{len(late)}", [1, 5], [0], Sampling(4))))
        stats = await syncing
        assert 0 < stats.write + stats.verify <= stats.pause < stats.seconds
        return versions(await early), versions(late)

    early, late = running(work("drain"))
    assert early == [{10}] * 4
    assert set(map(frozenset, late)) <= {frozenset({10}), frozenset({11})}
    early, late = running(work("swap"))
    assert early == [{10, 11}] * 4


def test_refused_weights_sample_nothing_until_good_ones_come(running: Running, model: Any) -> None:
    async def work() -> list[Completion]:
        trainer, weights = await connected(running, model)
        await weights.sync(20)
        sampling = asyncio.create_task(running.mesh.generate(Request("across", [1, 5], [0], Sampling(200, 0.0))))
        await asyncio.sleep(0.05)
        bad = await weights.publish(21)
        trainer.corrupt(bad.slot)
        with pytest.raises(RunError, match=r"generator\d\[tp=0\] failed in switch: Refused") as refused:
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
        os.kill(slow, signal.SIGSTOP)
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
        assert all(one[name] != before[name] for name in before), "what was published as 31, not what came after"
        await weights.sync(33)
        assert (await running.mesh.fingerprint())[1] == before

    running(work())


@asynccontextmanager
async def slowed(pid: int) -> AsyncIterator[None]:
    """A process that runs an eighth of the time."""

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
        await asyncio.sleep(0.05)
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


@pytest.mark.parametrize("running", ["replicas2"], indirect=True)
def test_an_error_between_steps_fails_every_call(running: Running) -> None:
    replica, late = running.mesh.replicas[0], Request("late", [1], [0], Sampling(4))

    async def work() -> None:
        waiting = replica.put(Request("open", [1], [0], Sampling(240)))
        await asyncio.sleep(0.05)
        await running.mesh.connect([[]])
        with pytest.raises(RunError, match="failed in switch: RuntimeError") as failure:
            await replica.head("switch", 1, 5, seconds=5)
        assert "expected a completed read() before write()" in failure.value.details
        with pytest.raises(RunError, match="RuntimeError"):
            await waiting
        for verb, arguments in {"submit": [[late]], "take": [], "switch": [2, 5], "watch": []}.items():
            with pytest.raises(RunError, match=rf"generator0\[tp=0\] failed in {verb}: RuntimeError"):
                await replica.head(verb, *arguments, seconds=5)
        for call in (running.mesh.generate(late), running.mesh.pull(2)):
            with pytest.raises(RunError, match="RuntimeError"):
                await call

    running(work())


def test_a_killed_rank_fails_what_waits_on_it_by_name_and_lets_go_of_its_slot(running: Running, model: Any) -> None:
    replica = running.mesh.replicas[len(running.mesh.replicas) - 1]
    name = replica.name

    async def work() -> float:
        lost, tp = running.pids[-1], len(running.pids) // len(running.mesh.replicas)
        if not replica.error:
            await replica.scatter("connect", [[] for _ in range(tp)], c.WeightSyncSection(), seconds=60)
        os.kill(lost, signal.SIGSTOP)
        waiting: list[asyncio.Future[Any]] = [replica.put(request) for request in requests(4, Sampling(240))]
        slots, reading = Slots(), Publication(3, 0, [], 0.0)

        async def read() -> None:
            with slots.reading(reading, name):
                await replica.read(None, 60)

        waiting.append(asyncio.create_task(read()))
        await asyncio.sleep(0.05)
        with pytest.raises(DeadlinePassed, match=f"{name}, which still reads version 3"):
            await slots.free(0, seconds=0.1)
        os.kill(lost, signal.SIGKILL)
        began = time.monotonic()
        await slots.free(0, seconds=20)
        for error in await asyncio.gather(*waiting, return_exceptions=True):
            assert isinstance(error, RunError)
            assert str(error).startswith(f"{name}[tp=")
        with pytest.raises(RunError):
            await running.mesh.generate(Request("later", [1], [0], Sampling(8)))
        return time.monotonic() - began

    assert running(work()) < 5
