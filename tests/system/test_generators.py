"""Real generator meshes, a vLLM engine in each Monarch process, against Hugging Face's forward of the same Llama."""

import asyncio
import os
import signal
import time
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from support.generator_meshes import Running, begun, greedy, requests, started
from support.tiny import tiny_llama
from tests.support.signals import stop
from titan_rl.actors.vllm.engine import EngineSettings
from titan_rl.config import sections as c
from titan_rl.rollout.player import Play, Player
from titan_rl.rollout.session import SessionLimits
from titan_rl.train.weight_sync import Slots
from titan_rl.wire.errors import DeadlinePassed, RunError
from titan_rl.wire.manifest import Publication
from titan_rl.wire.sessions import Outcome, Session
from titan_rl.wire.types import Completion, Prompt, Request, Rollout, Sampling

LAYOUTS = {"replicas2": (2, 1), "tp2": (1, 2)}


@pytest.fixture(scope="module")
def model() -> Any:
    return tiny_llama(max_position_embeddings=1024)


@pytest.fixture(scope="module", params=LAYOUTS)
def running(request: pytest.FixtureRequest, model: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    """A mesh that serves version 0: the weights in the model's folder, because there is no trainer to read from."""
    replicas, tp = LAYOUTS[request.param]
    with started(model, tmp_path_factory.mktemp("model"), replicas=replicas, tp=tp, longest=256) as running:
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
        await begun(running.mesh)
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
        await begun(running.mesh)
        first.withdraw("a")
        early = await staying
        return early, await last.put(replace(asked, id="a~1", begun=early))

    early, whole = running(work())
    assert {(sample.finish, len(sample.tokens)) for sample in early} == {("abort", len(early[0].tokens))}
    assert 0 < len(early[0].tokens) < 200
    for completion in whole:
        assert completion.tokens == greedy(model, [1, 5], completion)
        assert len(completion.tokens) == len(completion.versions) == 200
        assert completion.logprobs == pytest.approx(whole[0].logprobs, abs=1e-5)


def test_replicas_hold_equal_weights_and_ranks_their_shares(running: Running) -> None:
    one, other = running(running.mesh.fingerprint())
    for name in one:
        shared = "norm" in name or len(running.mesh.replicas) == 2
        assert (one[name] == other[name]) == shared, name


class FourTurns:
    """Samples 12 tokens and reads 20 more, four times."""

    async def drive(self, session: Session) -> Outcome:
        tokens = list(session.prompt.tokens)
        for turn in range(4):
            tokens += (await session.sample(tokens)).tokens
            tokens += [3 + turn] * 20
        return Outcome(reward=1.0)


def test_later_turns_find_what_their_rollout_has_read_and_draw_what_they_would_draw_without(running: Running) -> None:
    """Nearly all whole blocks of a turn's context are in the prefix cache of the replica that it goes to. Asked for
    again, each turn is the same: it depends on its context and its seed only."""
    player = Player(FourTurns(), running.mesh, lambda tokens: "", limits=SessionLimits(context=256))
    prompts = [Prompt(i, "", [1, *(4 + (i * 7 + k) % 60 for k in range(70))], "") for i in range(16)]
    plays = [Play(id=f"turns-{p.id}", prompt=p, sampling=Sampling(12), seed=5) for p in prompts]

    async def play() -> list[Rollout]:
        return await asyncio.gather(*map(player.play, plays))

    before = running(running.mesh.stats())
    rollouts = running(play())
    after = running(running.mesh.stats())
    asked, possible, block = [], 0, EngineSettings(model_dir="").block_size
    for rollout, p in zip(rollouts, plays, strict=True):
        (branch,) = rollout.branches
        assert (rollout.status, len(branch.turns), branch.mask.count(1)) == ("completed", 4, 48)
        begin = 0
        for turn in branch.turns:
            possible += max(begin - 1, 0) // block * block  # a sampled token is computed when the next one is
            read = branch.tokens[: begin + len(turn.context)]
            asked.append(Request(f"{p.id}-{turn.index}", read, [p.turn_seed(turn.index)], Sampling(12)))
            begin = len(read) + 12
    cached = sum(now.cached_tokens - then.cached_tokens for now, then in zip(after, before, strict=True))
    assert cached >= 0.9 * possible
    said = [turn.completion.tokens for rollout in rollouts for turn in rollout.turns]
    assert [completion.tokens for (completion,) in running.generate(*asked)] == said


@pytest.mark.parametrize("running", ["replicas2"], indirect=True)
def test_an_error_between_steps_fails_every_call(running: Running) -> None:
    replica, late = running.mesh.replicas[0], Request("late", [1], [0], Sampling(4))

    async def work() -> None:
        waiting = replica.put(Request("open", [1], [0], Sampling(240)))
        await asyncio.sleep(0.05)
        await running.mesh.connect([[]])
        with pytest.raises(RunError, match="failed in switch: RuntimeError") as failure:
            await replica.head("switch", 1, 5, seconds=5)
        assert "expected a completed fetch_weights() before write_weights()" in failure.value.details
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
            await replica.scatter("connect", [([], c.WeightSyncSection())] * tp, seconds=60)
        stop(lost)
        waiting: list[asyncio.Future[Any]] = [replica.put(request) for request in requests(4, Sampling(240))]
        slots, reading = Slots(), Publication(3, 0, [], 0.0)

        async def read() -> None:
            with slots.reading(reading, name):
                await replica.fetch_weights(None, 60)

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

    assert running(work()) < 15, "what waits ends with the process, before any deadline: free() has 20 s"
