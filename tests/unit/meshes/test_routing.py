"""Routing call by call: where each part of a request goes, and what becomes of it."""

from dataclasses import replace

import pytest

from support.routing_world import CONTEXT
from titan_rl.actors.vllm.engine import EngineReport, SampleId, Withdrawn
from titan_rl.meshes.routing import Load, Move, Routing, Sent
from titan_rl.meshes.stealing import SILENT_SECONDS
from titan_rl.wire.types import Completion, Request, Sampling


def stop(*tokens: int) -> Completion:
    return Completion([*tokens], [0.0] * len(tokens), [0] * len(tokens), "stop")


def begun(*tokens: int) -> Completion:
    return replace(stop(*tokens), finish="abort")


def test_what_a_lost_replica_had_not_answered_begins_anew_as_one_part() -> None:
    routing, request = Routing(2), Request("a", CONTEXT, [1, 2, 3], Sampling(8))
    routing.add(request)
    assert routing.send(0.0) == [Sent(0, request, "a")]
    assert routing.lose(0) == 3
    assert routing.live == [1]
    assert routing.send(0.0) == [Sent(1, replace(request, id="a~1"), "a")]
    routing.join(0, 1.0)
    assert routing.done(0, "a", [stop(9)] * 3) is None, "of its former life"
    assert routing.loads() == {0: Load(0, 0, 0, 0), 1: Load(1, 24, 0, 0)}
    assert routing.done(1, "a~1", [stop(7)] * 3) == [stop(7)] * 3
    assert routing.lose(1) == routing.lose(1) == 0


def test_what_was_answered_before_a_loss_stays_and_what_had_moved_keeps_the_tokens_that_it_came_with() -> None:
    routing = Routing(2, slots=4)
    routing.add(Request("a", CONTEXT, [1, 2, 3], Sampling(8)))
    routing.send(0.0)
    withdrawn = [Withdrawn(SampleId("a", i), begun(*range(i))) for i in (2, 1)]
    routing.moved(Move(1, 0, [sample for sample, _ in withdrawn], 0.0), withdrawn)
    assert routing.send(0.0) == [Sent(1, Request("a~1", CONTEXT, [2, 3], Sampling(8), [begun(0), begun(0, 1)]), "a")]
    assert routing.done(0, "a", [stop(7), begun(0), begun(0, 1)]) is None
    routing.report(
        1, EngineReport(9, 9.0, 9, 9, {"a~1": {1: 6}}), 0.0
    )  # it ended one, and tells when it ends the other
    assert routing.lose(1) == 2
    assert routing.send(0.0) == [Sent(0, Request("a~2", CONTEXT, [2, 3], Sampling(8), [begun(0), begun(0, 1)]), "a")]
    assert routing.done(0, "a~2", [stop(8), stop(9)]) == [stop(7), stop(8), stop(9)]


@pytest.mark.parametrize("lost", [0, 1])
def test_a_move_ends_with_the_loss_of_either_of_its_replicas(lost: int) -> None:
    routing = Routing(3, slots=8)
    for replica in range(3):
        for steps in (1, 2):
            routing.report(replica, EngineReport(steps, 0.01 * steps, 100 * steps), 0.0)
    for id in "abc":
        routing.add(Request(id, CONTEXT, [1] * 8, Sampling(100)))
    routing.send(0.0)
    for replica, id in ((1, "b"), (2, "c")):
        routing.done(replica, id, [stop(7)] * 8)
    routing.report(0, EngineReport(12, 1.02, 280, 80, {"a": dict.fromkeys(range(8), 10)}), 0.0)
    (first,) = routing.steal(0.0)
    assert (first.thief, first.victim) == (1, 0)
    assert routing.steal(0.0) == [], "it is asked already"
    routing.moved(first, [])
    (first,) = routing.steal(0.0)  # it has answered, and may be asked again
    routing.lose(lost)
    moves = routing.send(0.0), routing.steal(0.0)
    withdrawn = [Withdrawn(sample, begun(7)) for sample in first.samples]
    routing.moved(first, withdrawn)
    if lost == 0:
        assert [(sent.replica, sent.request.id) for sent in moves[0]] == [(1, "a~1")]
        assert routing.send(0.0) == [], "what a lost replica gives up begins anew already"
    else:
        assert [(move.thief, move.victim) for move in moves[1]] == [(2, 0)]
        assert [sent.replica for sent in routing.send(0.0)] == [0], "live, and the first of those with nothing to do"


def test_a_retired_replica_takes_nothing_and_is_heard_until_it_is_lost() -> None:
    routing, request = Routing(2), Request("a", CONTEXT, [1, 2, 3], Sampling(8))
    routing.add(request)
    routing.send(0.0)
    asked = routing.retire(0)
    assert asked == [SampleId("a", 0), SampleId("a", 1), SampleId("a", 2)]
    assert (routing.live, list(routing.loads())) == ([1], [1])
    with pytest.raises(ValueError, match="replica 0: expected a new or a lost one to join, found it here"):
        routing.join(0, 0.0)
    routing.moved(Move(None, 0, asked, 0.0), [Withdrawn(asked[1], begun(5))])
    assert routing.send(0.0) == [Sent(1, Request("a~1", CONTEXT, [2], Sampling(8), [begun(5)]), "a")]
    assert routing.done(1, "a~1", [stop(5, 6)]) is None
    assert routing.done(0, "a", [stop(7), begun(5), stop(8)]) == [stop(7), stop(5, 6), stop(8)]
    assert routing.loads() == {1: Load(0, 0, 0, 0)}, "nobody has stolen"
    assert routing.lose(0) == 0
    assert routing.retire(0) == []


def test_with_no_live_replica_everything_waits_and_the_oldest_request_goes_first() -> None:
    routing = Routing(2)
    for id in "abc":
        routing.add(Request(id, CONTEXT, [1, 2], Sampling(8)))
    routing.send(0.0)
    asked = routing.retire(0)
    assert routing.lose(1) == 2
    routing.moved(Move(None, 0, asked, 0.0), [Withdrawn(sample, begun(5)) for sample in reversed(asked)])
    routing.add(Request("d", CONTEXT, [1, 2], Sampling(8)))
    assert routing.forget("c") == {}, "it is nowhere"
    assert routing.send(0.0) == []
    assert routing.steal(0.0) == []
    assert routing.loads() == {}
    routing.join(7, 0.0)
    assert [(sent.replica, sent.request.id) for sent in routing.send(0.0)] == [(7, "a~1"), (7, "b~1"), (7, "d")]


def test_whoever_has_joined_is_awake() -> None:
    routing = Routing(1, slots=4)
    routing.report(0, EngineReport(), 100.0)
    routing.join(1, 101.0)
    for id in "ab":
        routing.add(Request(id, CONTEXT, [1], Sampling(8)))
    assert [(sent.replica, sent.request.id) for sent in routing.send(101.0)] == [(0, "a"), (1, "b")]


def test_with_slots_the_longest_expected_wait_least() -> None:
    routing = Routing(2, slots=4)
    for id, expected in (("short", 5), ("long", 50), ("longer", 60), ("unknown", 0)):
        routing.add(Request(id, CONTEXT, [1, 2, 3], Sampling(100), expected=expected))
    assert [(sent.request.id, sent.replica) for sent in routing.send(0.0)] == [("unknown", 0), ("longer", 1)]
    assert routing.loads() == {0: Load(1, 300, 0, 0), 1: Load(1, 180, 0, 0)}
    assert routing.done(1, "longer", [stop(7)] * 3)
    assert [(sent.request.id, sent.replica) for sent in routing.send(0.0)] == [("long", 1)]


def test_nothing_new_goes_to_a_replica_that_has_fallen_silent() -> None:
    routing = Routing(2, slots=4)
    for replica, at in ((0, 10.0), (1, 10.0 + SILENT_SECONDS)):
        routing.report(replica, EngineReport(), at)
    routing.add(Request("a", CONTEXT, [1], Sampling(8)))
    assert [sent.replica for sent in routing.send(10.0 + SILENT_SECONDS)] == [1]
    routing.resume(12.0 + SILENT_SECONDS)
    routing.add(Request("b", CONTEXT, [1], Sampling(8)))
    assert [sent.replica for sent in routing.send(12.0 + SILENT_SECONDS)] == [0]


def test_a_hint_that_proves_too_short_is_forgotten() -> None:
    routing = Routing(1, slots=4)
    routing.add(Request("a", CONTEXT, [1], Sampling(100), expected=10))
    routing.send(0.0)
    outstanding = []
    for length in (0, 4, 9, 10, 40):
        routing.report(0, EngineReport(lengths={"a": {0: length}}), 0.0)
        outstanding.append(routing.loads()[0].outstanding)
    assert outstanding == [10, 6, 1, 90, 60]


def test_what_nobody_waits_for_is_ignored() -> None:
    routing = Routing(2, slots=4)
    request = Request("a", CONTEXT, [1, 2], Sampling(8))
    routing.add(request)
    with pytest.raises(ValueError, match="request a: its id is that of an unfinished request"):
        routing.add(request)
    routing.send(0.0)
    assert routing.forget("a") == {0: [SampleId("a", 0), SampleId("a", 1)]}
    routing.moved(Move(1, 0, [SampleId("a", 1)], 0.0), [Withdrawn(SampleId("a", 1), begun(7))])
    assert routing.send(0.0) == []
    assert routing.done(0, "a", [begun(7)] * 2) is None
    assert routing.loads() == dict.fromkeys((0, 1), Load(0, 0, 0, 0))
    routing.add(request)
    assert [sent.replica for sent in routing.send(0.0)] == [0]


def test_a_withdrawn_sample_may_be_heard_of_before_or_after_its_finished_siblings() -> None:
    for first in ("done", "moved"):
        routing = Routing(2, slots=4)
        routing.add(Request("a", CONTEXT, [1, 2], Sampling(8)))
        routing.send(0.0)
        for what in ("done", "moved") if first == "done" else ("moved", "done"):
            if what == "done":
                assert routing.done(0, "a", [stop(7, 8), begun(9)]) is None
            else:
                routing.moved(Move(1, 0, [SampleId("a", 1)], 0.0), [Withdrawn(SampleId("a", 1), begun(9))])
        ((replica, part, whole),) = routing.send(0.0)
        assert (replica, part, whole) == (1, Request("a~1", CONTEXT, [2], Sampling(8), [begun(9)]), "a")
        assert routing.done(1, "a~1", [stop(7, 8)]) == [stop(7, 8)] * 2
        assert routing.loads() == {0: Load(0, 0, 0, 0), 1: Load(0, 0, 0, 1)}


# -- affinity -------------------------------------------------------------------------------------------------------


def turn(rollout: str, number: int, context: int) -> Request:
    return Request(f"{rollout}:{number}", [1] * context, [1], Sampling(10), affinity=(rollout, "group"))


def sent_to(routing: Routing, *requests: Request) -> list[int]:
    for request in requests:
        routing.add(request)
    return [sent.replica for sent in routing.send(0.0)]


@pytest.mark.parametrize("slots", [None, 8])
def test_a_turn_goes_where_the_turn_before_went_though_another_has_less_to_do(slots: int | None) -> None:
    routing = Routing(3, slots)
    assert sent_to(routing, turn("a", 0, 4), turn("b", 0, 4), turn("c", 0, 4)) == [0, 1, 2]
    assert routing.done(1, "b:0", [stop(9)]) is not None
    assert routing.done(2, "c:0", [stop(9)]) is not None
    assert sent_to(routing, turn("c", 1, 20)) == [2], "rather than 1, which has nothing to do either"
    assert routing.done(2, "c:1", [stop(9)]) is not None
    assert sent_to(routing, Request("other", CONTEXT, [1], Sampling(10))) == [1]
    assert sent_to(routing, turn("b", 1, 20)) == [1], "though 2 has nothing to do"


def test_a_replica_with_too_much_to_do_loses_its_turns_for_good() -> None:
    routing = Routing(2)
    assert sent_to(routing, turn("a", 0, 4)) == [0]
    assert routing.done(0, "a:0", [stop(9)]) is not None
    assert sent_to(routing, Request("busy", CONTEXT, [1] * 3, Sampling(10))) == [0]
    assert sent_to(routing, turn("a", 1, 29)) == [1], "30 tokens wait there, and reading 29 again costs less"
    assert routing.done(1, "a:1", [stop(9)]) is not None
    assert routing.done(0, "busy", [stop(9)] * 3) is not None
    assert sent_to(routing, turn("a", 2, 29)) == [1]


def test_a_group_begins_on_one_replica_while_its_prompt_is_worth_it() -> None:
    assert sent_to(Routing(2), *(turn(f"r{k}", 0, 35) for k in range(8))) == [0, 0, 0, 0, 1, 0, 1, 0]
    assert sent_to(Routing(2), *(turn(f"r{k}", 0, 3) for k in range(4))) == [0, 1, 0, 1]


def test_the_turns_of_a_lost_replica_go_on_elsewhere_and_nothing_remembers_it() -> None:
    routing = Routing(2)
    assert sent_to(routing, turn("b", 0, 40)) == [0]
    assert routing.done(0, "b:0", [stop(9)]) is not None
    assert sent_to(routing, turn("a", 0, 40)) == [0]
    assert routing.lose(0) == 1
    assert [sent.replica for sent in routing.send(0.0)] == [1]
    assert routing.done(1, "a:0~1", [stop(9)]) is not None
    routing.join(0, 0.0)
    assert sent_to(routing, Request("other", CONTEXT, [1], Sampling(10))) == [0]
    assert sent_to(routing, replace(turn("b", 1, 60), affinity=("b",))) == [1], "0 is another now"
    assert sent_to(routing, turn("a", 1, 60)) == [1], "which took it over"
