"""Spans as they are recorded."""

import time
from itertools import pairwise

import pytest

from titan_rl.wire.spans import Clock, Recorder, Stretch, span


def test_a_span_says_what_when_how_long_and_where() -> None:
    recorder = Recorder()
    began = time.time_ns()
    with recorder("pull", lane="weights", version=3):
        time.sleep(0.01)
    ((name, lane, begin, nanoseconds, args, id), dropped) = (*recorder.take().spans, 0)
    assert (name, lane, args, id, dropped) == ("pull", "weights", {"version": 3}, None, 0)
    assert abs(begin - began) < 5e9
    assert 10e6 <= nanoseconds < 5e9


def test_a_span_whose_work_fails_is_recorded() -> None:
    recorder = Recorder()
    with pytest.raises(ZeroDivisionError), recorder("step"):
        _ = 1 / 0
    assert [s.name for s in recorder.take().spans] == ["step"]


def test_memory_is_bounded_and_the_newest_stay() -> None:
    recorder = Recorder(most=10)
    for step in range(25):
        with recorder("step", step=step):
            pass
    taken = recorder.take()
    assert [s.args["step"] for s in taken.spans] == list(range(15, 25))
    assert taken.dropped == 15
    assert recorder.take()[:2] == ([], 0)


def test_parts_follow_one_another() -> None:
    recorder = Recorder()
    recorder.parts(1000, write=2e-6, verify=1e-6)
    assert [(s.name, s.begin, s.end) for s in recorder.take().spans] == [("write", 1000, 3000), ("verify", 3000, 4000)]


def test_turns_become_one_span_up_to_the_last_of_them() -> None:
    recorder, tokens = Recorder(), {"tokens": 5}
    stretch = Stretch(recorder, "sampling", lambda: dict(tokens))
    for _ in range(3):
        with stretch:
            tokens["tokens"] += 2
    ended = recorder.now()
    time.sleep(0.02)  # idle
    stretch.cut()
    stretch.cut()  # records nothing
    (only,) = recorder.take().spans
    assert (only.name, only.args) == ("sampling", {"tokens": 6})
    assert only.end <= ended


def test_a_long_stretch_is_cut() -> None:
    recorder, turns = Recorder(), {"turns": 0}
    stretch = Stretch(recorder, "sampling", lambda: dict(turns), longest=5_000_000)
    for _ in range(8):
        with stretch:
            turns["turns"] += 1
            time.sleep(0.002)
    stretch.cut()
    spans = recorder.take().spans
    assert 2 <= len(spans) <= 8
    assert sum(s.args["turns"] for s in spans if isinstance(s.args["turns"], int)) == 8
    assert all(first.end <= second.begin for first, second in pairwise(spans))


def test_what_a_clock_is_charged_with_is_a_span() -> None:
    span.take()
    with Clock()("generate"):
        pass
    assert [s.name for s in span.take().spans] == ["generate"]
