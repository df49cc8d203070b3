"""Spans as they are recorded, as they are written, and as a real run leaves them."""

import asyncio
import json
import signal
import time
from collections import defaultdict
from collections.abc import Awaitable, Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from support.running import Run, Runs
from titan_rl.record import timeline as module
from titan_rl.record.timeline import Timeline, timeline
from titan_rl.wire.clock import Clock
from titan_rl.wire.spans import Recorded, Recorder, Span, Stretch, span

Event = dict[str, Any]


def read(path: Path) -> list[Event]:
    """As viewers do: without the closing bracket, and without an event that was torn."""
    text = path.read_text()
    try:
        return json.loads(text)
    except json.JSONDecodeError:
        return json.loads(text[: max(1, text.rfind(",\n"))] + "]")


def tracks(events: list[Event]) -> dict[int, str]:
    return {e["pid"]: e["args"]["name"] for e in events if e["name"] == "process_name"}


def lanes(events: list[Event]) -> dict[tuple[str, str], list[Event]]:
    """The spans of each lane of each track, which must not overlap but within each other."""
    process, found = tracks(events), defaultdict(list)
    thread = {(e["pid"], e["tid"]): e["args"]["name"] for e in events if e["name"] == "thread_name"}
    for event in events:
        if event["ph"] == "X":
            found[process[event["pid"]], thread[event["pid"], event["tid"]]].append(event)
    return found


def overlaps(spans: list[Event]) -> list[tuple[str, str]]:
    """Pairs of which neither lies within the other."""
    found, around = [], []
    for event in sorted(spans, key=lambda e: (e["ts"], -e["dur"])):
        around = [outer for outer in around if outer["ts"] + outer["dur"] > event["ts"]]
        if around and around[-1]["ts"] + around[-1]["dur"] < event["ts"] + event["dur"]:
            found.append((around[-1]["name"], event["name"]))
        around.append(event)
    return found


# -- recording ----------------------------------------------------------------------------------------------------


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


def test_what_was_taken_is_not_taken_again() -> None:
    recorder = Recorder()
    recorder.since(recorder.now(), "group", id=7)
    assert recorder.take().spans[0].id == 7
    assert recorder.take() == Recorded([], 0)


def test_memory_is_bounded_and_the_newest_stay() -> None:
    recorder = Recorder(most=10)
    for step in range(25):
        with recorder("step", step=step):
            pass
    taken = recorder.take()
    assert [s.args["step"] for s in taken.spans] == list(range(15, 25))
    assert taken.dropped == 15
    assert recorder.take() == Recorded([], 0)


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
    stretch.cut()  # of nothing
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


# -- the file -----------------------------------------------------------------------------------------------------


def test_the_file_names_tracks_and_lanes_and_holds_every_span(tmp_path: Path) -> None:
    with Timeline(tmp_path / "timeline.json") as file:
        file.track("controller")
        file.track("trainer[dp=0 tp=0]")
        file.add("generator0[tp=0]", Recorded([Span("read", "weights", 7_000_000, 2_500, {"bytes": 9})]))
        file.add("controller", Recorded([Span("group", "groups", 1_000_000, 5_000_000, {}, 3)], dropped=4))
    events = json.loads((tmp_path / "timeline.json").read_text())
    assert list(tracks(events).values()) == ["controller", "trainer[dp=0 tp=0]", "generator0[tp=0]"]
    order = {e["pid"]: e["args"]["sort_index"] for e in events if e["name"] == "process_sort_index"}
    assert sorted(order, key=order.__getitem__) == list(tracks(events))  # as announced, whoever answers first
    (spans,) = lanes(events).values()
    assert spans == [{"name": "read", "pid": 3, "ts": 7000, "args": {"bytes": 9}, "ph": "X", "dur": 2, "tid": 2}]
    group = {"name": "group", "pid": 1, "cat": "groups", "id": 3, "tid": 1}
    assert events[-2:] == [group | {"ph": "b", "ts": 1000}, group | {"ph": "e", "ts": 6000}]
    assert [e["name"] for e in events if e["ph"] == "i"] == ["4 spans before this were dropped"]


@given(st.lists(st.integers(0, 3000), min_size=2, max_size=40), st.data())
def test_spans_that_nest_do_so_in_the_file(
    tmp_path_factory: pytest.TempPathFactory, ticks: list[int], data: st.DataObject
) -> None:
    """Cut to the microsecond, whatever their nanoseconds are."""
    spans: list[Span] = []

    def within(times: list[int]) -> None:
        if len(times) >= 2:
            spans.append(Span(f"{len(spans)}", "main", times[0], times[-1] - times[0], {}))
            cut = data.draw(st.integers(1, len(times) - 1))
            within(times[1:cut])
            within(times[cut:-1])

    within(sorted(ticks))
    path = tmp_path_factory.mktemp("nests") / "timeline.json"
    with Timeline(path) as file:
        file.add("controller", Recorded(spans[::-1]))
    (found,) = lanes(read(path)).values()
    assert len(found) == len(spans)
    assert not overlaps(found)
    assert [e["ts"] for e in found] == sorted(e["ts"] for e in found)


def test_a_file_that_ends_anywhere_opens_with_all_but_its_last_event(tmp_path: Path) -> None:
    path = tmp_path / "timeline.json"
    recorder = Recorder()
    with Timeline(path) as file:
        for step in range(3):
            with recorder("step", step=step, text='a "quoted",\n line ]'):
                recorder.since(recorder.now(), "group", id=step)
            file.add("controller", recorder.take())
    text, whole = path.read_bytes(), read(path)
    for end in range(1, len(text)):
        path.write_bytes(text[:end])
        found = read(path)
        assert found == whole[: len(found)]
        assert len(found) >= text[:end].count(b"\n") - 2


def test_what_lies_there_is_kept(tmp_path: Path) -> None:
    path = tmp_path / "timeline.json"
    for name in ("first", "second", "third"):
        with Timeline(path) as file:
            file.add(name, Recorded([]))
    names = [list(tracks(read(tmp_path / n)).values()) for n in ("timeline.1.json", "timeline.2.json", path.name)]
    assert names == [["first"], ["second"], ["third"]]


def test_a_large_file_is_followed_by_another_that_has_all_names(tmp_path: Path) -> None:
    path = tmp_path / "timeline.json"
    with Timeline(path, largest=3000) as file:
        file.track("controller")
        for step in range(100):
            file.add("trainer", Recorded([Span("step", "main", step * 1000, 1000, {"step": step})]))
    files = sorted(tmp_path.iterdir(), key=lambda p: p.stat().st_mtime_ns)
    assert len(files) > 2
    assert max(p.stat().st_size for p in files) < 3500
    steps = []
    for events in map(read, files):
        assert list(tracks(events).values()) == ["controller", "trainer"]
        steps += [e["args"]["step"] for spans in lanes(events).values() for e in spans]
    assert sorted(steps) == list(range(100))


# -- collecting ---------------------------------------------------------------------------------------------------


class Mesh:
    """Ranks that answer with a span, fail, or never answer."""

    def __init__(self, *ranks: str) -> None:
        self.ranks, self.asked = ranks, 0

    def spans(self) -> Mapping[str, Awaitable[Recorded]]:
        self.asked += 1
        return {rank: self._answer(rank) for rank in self.ranks}

    async def _answer(self, rank: str) -> Recorded:
        if rank == "dead":
            raise RuntimeError("it died")
        if rank == "hangs":
            await asyncio.Event().wait()
        return Recorded([Span("step", "main", time.time_ns(), 1000, {})])


def test_spans_are_collected_while_a_run_lasts_and_when_it_ends(tmp_path: Path) -> None:
    path, recorder, meshes = tmp_path / "timeline.json", Recorder(), (Mesh("trainer"), Mesh("dead", "generator0"))

    async def run() -> None:
        async with timeline(path, meshes, print, every=0.01, controller=recorder):
            deadline = time.monotonic() + 10
            while len(lanes(read(path)) if path.exists() and path.read_text() else ()) < 2:
                assert time.monotonic() < deadline
                await asyncio.sleep(0.01)
            with recorder("the last"):
                pass

    asyncio.run(run())
    found = lanes(json.loads(path.read_text()))
    assert found.keys() == {("controller", "main"), ("trainer", "main"), ("generator0", "main")}
    assert len(found["trainer", "main"]) == meshes[0].asked == meshes[1].asked
    assert [e["name"] for e in found["controller", "main"]] == ["the last"]


def test_a_rank_that_never_answers_does_not_keep_a_run_from_ending(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "LAST_SECONDS", 0.05)
    path = tmp_path / "timeline.json"

    async def run() -> None:
        async with timeline(path, [Mesh("hangs", "trainer")], print, every=0.01, controller=Recorder()):
            await asyncio.sleep(0.05)

    asyncio.run(asyncio.wait_for(run(), 5))
    assert ("trainer", "main") in lanes(json.loads(path.read_text()))


def test_nobody_is_asked_after_a_failure_but_the_controller_tells(tmp_path: Path) -> None:
    path, recorder, mesh = tmp_path / "timeline.json", Recorder(), Mesh("trainer")

    async def run() -> None:
        async with timeline(path, [mesh], print, every=60, controller=recorder):
            await asyncio.sleep(0.01)
            with recorder("train"):
                raise RuntimeError("the run's")

    with pytest.raises(RuntimeError, match="the run's"):
        asyncio.run(run())
    assert mesh.asked == 0
    assert [e["name"] for e in lanes(json.loads(path.read_text()))["controller", "main"]] == ["train"]


def test_a_file_that_cannot_be_written_is_told_and_is_no_failure(tmp_path: Path) -> None:
    notes: list[str] = []

    async def run() -> None:
        async with timeline(tmp_path / "missing" / "timeline.json", [Mesh("trainer")], notes.append):
            await asyncio.sleep(0.01)

    asyncio.run(run())
    assert len(notes) == 1
    assert "missing" in notes[0]


# -- a real run ---------------------------------------------------------------------------------------------------

EXPECTED = {
    ("controller", "main"): {"step", "generate", "judge", "train", "sync", "eval", "save"},
    ("controller", "publish"): {"publish"},
    ("controller", "pull"): {"pull"},
    ("trainer[dp=0 tp=0]", "main"): {"step", "forward", "backward", "reduce", "optimizer", "scores", "publish", "save"},
    ("generator0[tp=0]", "main"): {"sampling", "switch", "write", "verify"},
    ("generator0[tp=0]", "weights"): {"read"},
}


@pytest.fixture(scope="module")
def run(runs: Runs, tmp_path_factory: pytest.TempPathFactory) -> Run:
    return runs.finish(tmp_path_factory.mktemp("timeline") / "run")


def test_a_run_shows_who_did_what(run: Run) -> None:
    found = lanes(json.loads((run.folder / "timeline.json").read_text()))
    for lane, names in EXPECTED.items():
        assert {e["name"] for e in found[lane]} == names
    assert {e["name"] for e in found["trainer[dp=1 tp=0]", "main"]} == EXPECTED["trainer[dp=0 tp=0]", "main"]
    assert all(not overlaps(spans) for spans in found.values())


def test_a_run_s_spans_add_up_to_its_metrics(run: Run) -> None:
    found = lanes(read(run.folder / "timeline.json"))
    metrics = [json.loads(line) for line in (run.folder / "metrics.jsonl").read_text().splitlines()]
    for before, line in pairwise(metrics):
        for part in ("generate", "judge", "train", "sync", "eval", "save") if line["kind"] == "rl" else ():
            ends = [(e["ts"] + e["dur"], e) for e in found["controller", "main"] if e["name"] == part]
            seconds = sum(e["dur"] for end, e in ends if before["time"] < end / 1e6 <= line["time"]) / 1e6
            assert seconds == pytest.approx(line.get(f"time/{part}", 0.0), abs=0.05)


def test_a_group_is_followed_from_its_admission_to_the_step_that_takes_it(run: Run) -> None:
    events = [e for e in read(run.folder / "timeline.json") if e.get("cat") == "groups"]
    groups: defaultdict[int, dict[tuple[str, str], Event]] = defaultdict(dict)
    for event in events:
        groups[event["id"]][event["name"], event["ph"]] = event
    took = {r["prompt_id"]: r["step"] for r in run.lines("rollouts.jsonl")}
    assert {id: group["group", "b"]["args"]["step"] for id, group in groups.items()} == took
    life = [("group", "b"), ("sample", "b"), ("sample", "e"), ("judge", "b"), ("judge", "e"), ("group", "e")]
    for group in groups.values():
        times = [group[point]["ts"] for point in life]
        assert times == sorted(times)


def test_sampling_has_all_tokens_and_a_trainer_s_step_all_its_parts(run: Run) -> None:
    found = lanes(read(run.folder / "timeline.json"))
    sampled = sum(len(rollout["versions"]) for rollout in run.lines("rollouts.jsonl"))
    sampling = [e for e in found["generator0[tp=0]", "main"] if e["name"] == "sampling"]
    assert sum(e["args"]["tokens"] for e in sampling) > sampled  # evaluations too
    steps = [e for e in found["trainer[dp=0 tp=0]", "main"] if e["name"] == "step"]
    assert [e["args"]["step"] for e in steps] == [*range(1, 9), *range(1, 5)]  # the cold start's, then RL's
    for step in steps:
        inside = [
            e
            for e in found["trainer[dp=0 tp=0]", "main"]
            if step["ts"] <= e["ts"] and e["ts"] + e["dur"] <= step["ts"] + step["dur"] and e is not step
        ]
        assert [e["name"] for e in inside if e["name"] not in ("forward", "backward")] == ["reduce", "optimizer"]
        assert sum(e["dur"] for e in inside) > 0.5 * step["dur"]


def test_a_killed_run_leaves_a_file_that_opens_beside_the_one_before(run: Run, runs: Runs) -> None:
    before, path = (run.folder / "timeline.json").read_bytes(), run.folder / "timeline.json"
    again = runs.start(run.folder, training__steps=100_000, algorithm__max_dead_steps=0)
    again.wait_for_step(6)
    deadline = time.monotonic() + 60
    while ("generator0[tp=0]", "main") not in lanes(read(path)):
        assert time.monotonic() < deadline
        time.sleep(0.1)
    again.process.send_signal(signal.SIGKILL)
    again.finish()
    assert (run.folder / "timeline.1.json").read_bytes() == before
    assert not path.read_text().rstrip().endswith("]")
    assert {e["name"] for e in lanes(read(path))["generator0[tp=0]", "main"]} >= {"sampling", "switch"}
