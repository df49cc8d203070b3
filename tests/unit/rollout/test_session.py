"""Whatever a driver does with its contexts, each sampled token is trained exactly once, after what its engine read."""

import asyncio
import random
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from support.turn_drivers import EOS, PROMPT, SAMPLING, TOOL, Answering, player
from titan_rl.rollout.player import Play
from titan_rl.rollout.session import Images, RolloutSession, SessionLimits
from titan_rl.wire.seeds import sample_seed, turn_seed
from titan_rl.wire.sessions import ContextOverflow, Outcome, Session, SessionOver, TokensSpent, TurnsSpent
from titan_rl.wire.types import Completion, ImagePlace, Rollout


class Wandering:
    """Continues, branches, asks again, edits and compacts at random; sometimes two turns at once."""

    def __init__(self, seed: int, moves: Sequence[str]) -> None:
        self.draw, self.moves = random.Random(seed), moves

    async def drive(self, session: Session) -> Outcome:
        contexts = [list(session.prompt.tokens)]

        async def ask(context: list[int]) -> None:
            completion = await session.sample(context)
            after = [*context, *completion.tokens]
            if completion.finish == "length" and self.draw.random() < 0.5:
                after.append(EOS)  # closed for it, untrained
            contexts.append(after + [TOOL] * self.draw.randrange(3))

        for move in self.moves:
            context = self.draw.choice(contexts)
            if move == "continue":
                contexts.remove(context)
                await ask(context)
                contexts = contexts or [list(session.prompt.tokens)]
            elif move == "branch":
                await ask(context)
            elif move == "edit":
                contexts.append([*context[:-1], TOOL + 1])
                await ask(contexts[-1])
            elif move == "compact":
                contexts.append([1, *context[-2:]])
                await ask(contexts[-1])
            else:
                await asyncio.gather(ask(context), ask(context), ask(self.draw.choice(contexts)))
        return Outcome(reward=1.0)


MOVES = st.lists(st.sampled_from(["continue", "branch", "edit", "compact", "at once"]), min_size=1, max_size=14)


def played(seed: int, moves: Sequence[str]) -> tuple[Rollout, Answering]:
    engine = Answering()
    rollout = asyncio.run(
        player(Wandering(seed, moves), engine).play(Play(id="p", prompt=PROMPT, sampling=SAMPLING, seed=seed))
    )
    return rollout, engine


@settings(deadline=None, max_examples=300)
@given(seed=st.integers(0, 2**20), moves=MOVES)
def test_every_sampled_token_is_trained_once_after_what_was_read(seed: int, moves: Sequence[str]) -> None:
    rollout, engine = played(seed, moves)
    assert rollout.status == "completed", rollout.error
    assert sum(sum(branch.mask) for branch in rollout.branches) == sum(len(said) for _, said in engine.said)
    unclaimed = list(engine.said)
    for branch in rollout.branches:
        begin = 0
        for turn in branch.turns:
            begin += len(turn.context)
            said = branch.tokens[:begin], turn.completion.tokens
            begin += len(turn.completion.tokens)
            unclaimed.remove(said)  # raises if no engine read and sampled just that
            assert branch.tokens[begin - len(said[1]) : begin] == said[1]
        assert len(branch.tokens) == len(branch.mask) == len(branch.logprobs) == begin
    assert not unclaimed
    assert [turn.index for turn in rollout.turns] == list(range(len(engine.said)))
    assert played(seed, moves)[0] == rollout, "the same seed gives the same rollout"


def test_a_context_that_extends_a_branch_continues_it_and_its_turn_is_only_what_is_new() -> None:
    async def body() -> tuple[Rollout, list[str]]:
        said: list[str] = []

        class Fork:
            async def drive(self, session: Session) -> Outcome:
                first = [*PROMPT.tokens, *(await session.sample(PROMPT.tokens)).tokens]
                await session.sample([*first, TOOL])
                await session.sample([*first, TOOL, TOOL])  # from the inside of the branch
                again = await session.sample(PROMPT.tokens)  # asked again
                await session.sample([*PROMPT.tokens, *again.tokens, TOOL])  # which continues that answer
                return Outcome(turn_rewards=[1.0, 2.0, 3.0, 4.0])  # the last turn has none

        engine = Answering(vocabulary=40)
        return await player(Fork(), engine, warn=said.append).play(Play(id="p", prompt=PROMPT, sampling=SAMPLING)), said

    rollout, said = asyncio.run(body())
    first, *others = rollout.branches
    assert [turn.context for turn in first.turns] == [PROMPT.tokens, [TOOL]]
    begun = [*PROMPT.tokens, *first.turns[0].completion.tokens]
    assert [branch.turns[0].context for branch in others] == [[*begun, TOOL, TOOL], PROMPT.tokens]
    assert [[turn.reward for turn in branch.turns] for branch in rollout.branches] == [[1.0, 2.0], [3.0], [4.0, 0.0]]
    (message,) = said  # though two branches began
    assert message.startswith(f"p: a branch begins with turn 2, because only {len(begun) + 1} of its {len(begun) + 2}")


def test_a_turn_that_was_cut_off_continues_with_an_end_that_is_not_trained_on() -> None:
    async def ask(turn: int, context: list[int], most: int, seat: str, images: Images) -> Completion:
        return Completion([10, 11], [-0.5] * 2, [0] * 2, "length" if turn == 0 else "stop")

    async def body() -> list[int]:
        session = RolloutSession("p", PROMPT, 0, ask, limits=SessionLimits())
        await session.sample(PROMPT.tokens)
        await session.sample([*PROMPT.tokens, 10, 11, EOS, TOOL])
        (branch,) = session.branches()
        assert branch.tokens == [*PROMPT.tokens, 10, 11, EOS, TOOL, 10, 11]
        return branch.mask

    assert asyncio.run(body()) == [0, 0, 0, 1, 1, 0, 0, 1, 1]


def test_of_several_branches_the_longest_continues() -> None:
    """The second answer to a prompt begins with the first one, so what extends it extends both."""
    answers = [[10], [10, 11], [12]]

    async def ask(turn: int, context: list[int], most: int, seat: str, images: Images) -> Completion:
        said = answers[turn]
        return Completion(said, [-0.5] * len(said), [0] * len(said), "stop")

    async def body() -> list[list[list[int]]]:
        session = RolloutSession("p", PROMPT, 0, ask, limits=SessionLimits())
        for context in ([*PROMPT.tokens], [*PROMPT.tokens], [*PROMPT.tokens, 10, 11, TOOL]):
            await session.sample(context)
        return [[turn.context for turn in branch.turns] for branch in session.branches()]

    assert asyncio.run(body()) == [[PROMPT.tokens], [PROMPT.tokens, [TOOL]]]


def test_a_context_of_equal_tokens_and_another_image_begins_a_branch() -> None:
    """Each branch has the images of its contexts, in the turns in which they came."""
    first, second, later = ImagePlace("a" * 64, 1), ImagePlace("b" * 64, 1), ImagePlace("c" * 64, 3)
    asked = list[Images]()

    async def ask(turn: int, context: list[int], most: int, seat: str, images: Images) -> Completion:
        asked.append(images)
        return Completion([10], [-0.5], [0], "stop")

    async def body() -> list[list[Images]]:
        session = RolloutSession("p", PROMPT, 0, ask, limits=SessionLimits())
        await session.sample([1, TOOL], images=[first])
        await session.sample([1, TOOL, 10, TOOL], images=[second, later])
        await session.sample([1, TOOL, 10, TOOL], images=[first, later])
        return [[turn.images for turn in branch.turns] for branch in session.branches()]

    assert asyncio.run(body()) == [[(first,), (later,)], [(second, later)]]
    assert asked == [(first,), (second, later), (first, later)]


@pytest.mark.parametrize(
    ("limits", "error", "turns"),
    [
        (SessionLimits(context=12), ContextOverflow, None),
        (SessionLimits(tokens=10), TokensSpent, None),
        (SessionLimits(turns=2), TurnsSpent, 2),
    ],
)
def test_a_limit_lowers_the_last_turns_and_then_ends_the_rollout_by_name(
    limits: SessionLimits, error: type[Exception], turns: int | None
) -> None:
    raised: list[Exception] = []

    class Endless:
        async def drive(self, session: Session) -> Outcome:
            tokens = list(session.prompt.tokens)
            while True:
                try:
                    tokens += (await session.sample(tokens, max_new_tokens=4)).tokens
                except Exception as reached:
                    raised.append(reached)
                    raise

    engine = Answering()
    rollout = asyncio.run(player(Endless(), engine, limits=limits).play(Play(id="p", prompt=PROMPT, sampling=SAMPLING)))
    assert [type(each) for each in raised] == [error]
    assert rollout.status == error.status  # type: ignore[attr-defined]
    assert rollout.truncated == (error is not TurnsSpent or rollout.finish != "stop")
    assert turns is None or len(engine.requests) == turns
    assert all(request.sampling.max_new_tokens <= 4 for request in engine.requests)
    for request, (_, said) in zip(engine.requests, engine.said, strict=True):
        assert len(request.tokens) + len(said) <= limits.context
    assert rollout.sampled <= limits.tokens


def test_nothing_is_kept_of_a_turn_that_is_answered_after_the_end() -> None:
    async def body() -> None:
        may_answer = asyncio.Event()

        async def ask(turn: int, context: list[int], most: int, seat: str, images: Images) -> Completion:
            await may_answer.wait()
            return Completion([10], [-0.5], [0], "stop")

        session = RolloutSession("p", PROMPT, 0, ask, limits=SessionLimits())
        asking = asyncio.create_task(session.sample(PROMPT.tokens))
        await asyncio.sleep(0)
        session.end()
        may_answer.set()
        with pytest.raises(SessionOver):
            await asking
        with pytest.raises(SessionOver):
            await session.sample(PROMPT.tokens)
        assert session.branches() == []

    asyncio.run(body())


def test_every_turn_has_its_own_seed_and_the_first_has_that_of_a_single_answer() -> None:
    assert turn_seed(7, 3, 1, 0) == sample_seed(7, 3, 1)
    seeds = {turn_seed(7, prompt, sample, turn) for prompt in range(9) for sample in range(9) for turn in range(9)}
    assert len(seeds) == 9**3
