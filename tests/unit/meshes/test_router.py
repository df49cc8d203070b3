"""Where each request goes, and what becomes of it when replicas come and go."""

import asyncio
from collections.abc import Callable, Coroutine
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from support.routed import CONTEXT, NotedReplica, World, begun, stop, tick
from titan_rl.meshes.replica import State
from titan_rl.wire.errors import RequestRefused, RunError
from titan_rl.wire.types import Completion, Request, Sampling

MOST = 8


def on_a_loop(body: Callable[[], Coroutine[Any, Any, None]]) -> Callable[[], None]:
    def test() -> None:
        asyncio.run(asyncio.wait_for(body(), 30))

    test.__name__, test.__doc__ = body.__name__, body.__doc__
    return test


@on_a_loop
async def test_what_a_lost_replica_had_begins_again_with_the_same_seeds() -> None:
    world, request = World(2), Request("a", CONTEXT, [1, 2, 3], Sampling(MOST))
    assert await world.ask(request) == [0]
    first = world.replicas[0]
    assert world.lose(0) == 3
    assert world.replicas[1].sent == [replace(request, id="a~1")]
    world.join(0)
    first.answer("a", *[stop(9)] * 3)  # too late
    await tick()
    assert world.tokens == {1: 24, 0: 0}
    world.replicas[1].answer("a~1", *[stop(7)] * 3)
    assert await world.asked["a"] == [stop(7)] * 3
    assert world.lose(1) == 0


@on_a_loop
async def test_a_retired_replica_gives_back_what_goes_on_elsewhere() -> None:
    world, request = World(2), Request("a", CONTEXT, [1, 2, 3], Sampling(MOST))
    await world.ask(request)
    retired = world.retire(0)
    assert (retired.state, retired.withdrawn, world.tokens) == (State.RETIRING, ["a"], {1: 0})
    came = [stop(7), begun(5), begun()]
    retired.answer("a", *came)
    await tick()
    (sent,) = world.replicas[1].sent
    assert sent == replace(request, id="a~1", begun=came), "finished samples go along"
    assert world.tokens == {1: 7 + 8}, "but cost nothing"
    assert world.lose(0) == 0
    assert world.lose(1) == 2
    assert world.join(2).sent == [replace(sent, id="a~2")], "from the tokens that it came with"
    world.replicas[2].answer("a~2", stop(7), stop(5, 6), stop(8))
    assert await world.asked["a"] == [stop(7), stop(5, 6), stop(8)]


@on_a_loop
async def test_a_retired_replica_may_finish_what_it_has() -> None:
    world = World(2)
    await world.ask(Request("a", CONTEXT, [1, 2], Sampling(MOST)))
    world.retire(0).answer("a", stop(7), stop(8))
    assert await world.asked["a"] == [stop(7), stop(8)]
    assert world.replicas[1].sent == []


@on_a_loop
async def test_with_no_live_replica_everything_waits_and_the_oldest_request_goes_first() -> None:
    world = World(2)
    await world.ask(*(Request(id, CONTEXT, [1, 2], Sampling(MOST)) for id in "abc"))
    world.retire(0)
    assert world.lose(1) == 2
    await world.ask(Request("d", CONTEXT, [1, 2], Sampling(MOST)))
    for id in "ca":
        world.replicas[0].answer(id, begun(5), begun(5))
    await tick()
    world.asked["c"].cancel()
    await tick()
    assert [request.id for request in world.join(7).sent] == ["a~1", "b~1", "d"]


@on_a_loop
async def test_a_caller_that_gives_up_makes_room() -> None:
    world, request = World(1), Request("a", CONTEXT, [1, 2], Sampling(MOST))
    await world.ask(request)
    with pytest.raises(ValueError, match="request a: an unfinished request has this id"):
        await world.router.generate(request)
    world.asked["a"].cancel()
    await tick()
    assert (world.replicas[0].withdrawn, world.tokens) == (["a"], {0: 0})
    world.replicas[0].answer("a", begun(7), begun(7))
    await tick()
    assert len(world.replicas[0].sent) == 1
    assert world.lose(0) == 0


@on_a_loop
async def test_a_refused_request_fails_alone_and_a_failed_mesh_fails_all() -> None:
    world = World(1)
    await world.ask(*(Request(id, CONTEXT, [1], Sampling(MOST)) for id in "ab"))
    world.replicas[0].open.pop("a").set_exception(RequestRefused("too long"))
    with pytest.raises(RequestRefused, match="too long"):
        await world.asked["a"]
    assert world.tokens == {0: MOST}
    world.router.fail(RunError("over"))
    with pytest.raises(RunError, match="over"):
        await world.asked["b"]


@on_a_loop
async def test_a_hint_counts_until_it_proves_too_short() -> None:
    world = World(1)
    for number, (expected, length, tokens) in enumerate([(0, 0, 100), (10, 0, 10), (10, 9, 1), (10, 10, 90)]):
        await world.ask(Request(str(number), CONTEXT, [1], Sampling(100), [begun(*[7] * length)], expected=expected))
        assert world.tokens == {0: tokens}
        world.asked[str(number)].cancel()
        await tick()


comings = st.lists(
    st.tuples(st.sampled_from(["ask", "ask", "answer", "lose", "join", "retire", "forget"]), st.integers(0, 9)),
    max_size=30,
)


@given(st.integers(1, 4), comings)
def test_each_request_is_answered_once_whatever_comes_and_goes(replicas: int, comings: list[tuple[str, int]]) -> None:
    """Sample k of a request with seed s ends as [s] * 3. A retired replica gives back s samples of 1 and 2 tokens."""

    def whole(request: Request) -> list[Completion]:
        for sample in request.begun:
            assert sample.finish == "stop" or len(sample.tokens) < 3
        return [stop(*[seed] * 3) for seed in request.seeds]

    async def body() -> None:
        world, asked = World(replicas), dict[str, Request]()
        forgotten, least = set[str](), min

        def resolve(replica: NotedReplica) -> None:
            id = next(iter(replica.open))
            (request,) = [request for request in replica.sent if request.id == id]
            done = whole(request)
            if replica.state is State.RETIRING and len(request.begun) == 0:
                done = [begun(*c.tokens[: k % 3]) if k % 2 else c for k, c in enumerate(done)]
            replica.answer(id, *done)

        for kind, n in comings:
            here = [replica for replica in world.replicas.values() if replica.state is State.SERVING]
            some = [*world.replicas.values()][n % len(world.replicas)] if world.replicas else None
            if kind == "ask":
                id = f"r{len(asked)}"
                asked[id] = Request(id, CONTEXT, list(range(1, n + 2)), Sampling(MOST))
                before = world.tokens
                (place,) = await world.ask(asked[id])
                assert place == (least(sorted(before), key=lambda i: before[i]) if here else -1)
            elif kind == "answer" and some is not None and some.open:
                resolve(some)
            elif kind == "lose" and some is not None:
                world.lose(some.index)
            elif kind == "retire" and some in here and some is not None:
                world.retire(some.index)
            elif kind == "join":
                world.join(max([-1, *world.replicas]) + 1)
            elif kind == "forget" and (left := [id for id, task in world.asked.items() if not task.done()]):
                forgotten.add(id := left[n % len(left)])
                world.asked[id].cancel()
            await tick()
            held = [world.place(id) for id in asked]
            for replica in [replica for replica in world.replicas.values() if replica.state is State.SERVING]:
                assert (world.tokens[replica.index] > 0) == (replica.index in held)
        world.join(99)
        await tick()
        while busy := [replica for replica in world.replicas.values() if replica.open]:
            resolve(busy[0])
            await tick()
        for id, request in asked.items():
            if id not in forgotten:
                assert world.asked[id].result() == whole(request)
        assert set(world.tokens.values()) == {0}
        assert not world.router._routed

    asyncio.run(asyncio.wait_for(body(), 30))


# -- affinity -------------------------------------------------------------------------------------------------------


def turn(rollout: str, number: int, context: int) -> Request:
    return Request(f"{rollout}:{number}", [1] * context, [1], Sampling(10), affinity=(rollout, "group"))


async def answered(world: World, *ids: str) -> None:
    for id in ids:
        (held,) = [replica for replica in world.replicas.values() if id in replica.open]
        held.answer(id, *[stop(9)] * len(held.sent[-1].seeds))
        await tick()


@on_a_loop
async def test_a_turn_goes_where_the_turn_before_went_though_another_has_less_to_do() -> None:
    world = World(3)
    assert await world.ask(turn("a", 0, 4), turn("b", 0, 4), turn("c", 0, 4)) == [0, 1, 2]
    await answered(world, "b:0", "c:0")
    assert await world.ask(turn("c", 1, 20)) == [2], "rather than 1, which has nothing to do either"
    await answered(world, "c:1")
    assert await world.ask(Request("other", CONTEXT, [1], Sampling(10))) == [1]
    assert await world.ask(turn("b", 1, 20)) == [1], "though 2 has nothing to do"


@on_a_loop
async def test_a_replica_with_too_much_to_do_loses_its_turns_for_good() -> None:
    world = World(2)
    assert await world.ask(turn("a", 0, 4)) == [0]
    await answered(world, "a:0")
    assert await world.ask(Request("busy", CONTEXT, [1] * 3, Sampling(10))) == [0]
    assert await world.ask(turn("a", 1, 29)) == [1], "30 tokens wait there, and reading 29 again costs less"
    await answered(world, "a:1", "busy")
    assert await world.ask(turn("a", 2, 29)) == [1]


@on_a_loop
async def test_a_group_begins_on_one_replica_while_its_prompt_is_worth_it() -> None:
    assert await World(2).ask(*(turn(f"r{k}", 0, 35) for k in range(8))) == [0, 0, 0, 0, 1, 0, 1, 0]
    assert await World(2).ask(*(turn(f"r{k}", 0, 3) for k in range(4))) == [0, 1, 0, 1]


@on_a_loop
async def test_the_turns_of_a_lost_replica_go_on_elsewhere_and_nothing_remembers_it() -> None:
    world = World(2)
    assert await world.ask(turn("b", 0, 40)) == [0]
    await answered(world, "b:0")
    assert await world.ask(turn("a", 0, 40)) == [0]
    assert world.lose(0) == 1
    assert world.place("a:0") == 1
    await answered(world, "a:0~1")
    world.join(0)
    assert await world.ask(Request("other", CONTEXT, [1], Sampling(10))) == [0]
    assert await world.ask(replace(turn("b", 1, 60), affinity=("b",))) == [1], "0 is another now"
    assert await world.ask(turn("a", 1, 60)) == [1], "which took it over"
