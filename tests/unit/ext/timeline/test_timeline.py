"""Spans as they are collected and written."""

import asyncio
import json
import time
from collections.abc import Awaitable, Mapping
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from support.traces import lanes, overlaps, read, tracks
from titan_rl.ext.timeline import timeline as module
from titan_rl.ext.timeline.timeline import Clocks, Timeline, timeline
from titan_rl.wire.spans import Recorded, Recorder, Span


def test_the_file_names_tracks_and_lanes_and_holds_every_span(tmp_path: Path) -> None:
    with Timeline(tmp_path / "timeline.json") as file:
        file.track("controller")
        file.track("trainer[dp=0 tp=0]")
        file.add("generator0[tp=0]", Recorded([Span("read", "weights", 7_000_000, 2_500, {"bytes": 9})]))
        file.add("controller", Recorded([Span("group", "groups", 1_000_000, 5_000_000, {}, 3)], dropped=4))
    events = json.loads((tmp_path / "timeline.json").read_text())
    assert list(tracks(events).values()) == ["controller", "trainer[dp=0 tp=0]", "generator0[tp=0]"]
    order = {e["pid"]: e["args"]["sort_index"] for e in events if e["name"] == "process_sort_index"}
    assert sorted(order, key=order.__getitem__) == list(tracks(events))  # as announced, not in the order of the answers
    (spans,) = lanes(events).values()
    assert spans == [{"name": "read", "pid": 3, "ts": 7000, "args": {"bytes": 9}, "ph": "X", "dur": 2, "tid": 2}]
    group = {"name": "group", "pid": 1, "cat": "groups", "id": 3, "tid": 1}
    assert events[-2:] == [group | {"ph": "b", "ts": 1000}, group | {"ph": "e", "ts": 6000}]
    assert [e["name"] for e in events if e["ph"] == "i"] == ["4 spans before this were dropped"]


@given(st.lists(st.integers(0, 3000), min_size=2, max_size=40), st.data())
def test_spans_that_nest_do_so_in_the_file(
    tmp_path_factory: pytest.TempPathFactory, ticks: list[int], data: st.DataObject
) -> None:
    """Cut to the microsecond, for any nanoseconds."""
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


def test_many_rollouts_are_thinned_out_whole_and_counted(tmp_path: Path) -> None:
    path, rollouts = tmp_path / "timeline.json", 4000
    with Timeline(path, detail=20_000) as file:
        for id in range(rollouts):
            begin = id * 1000
            turns = [Span("turn", "rollouts", begin, 100, {}, id), Span("turn", "rollouts", begin + 200, 100, {}, id)]
            file.add("controller", Recorded([*turns, Span("rollout", "rollouts", begin, 400, {}, id)]))
            file.add("trainer", Recorded([Span("step", "main", begin, 900, {"step": id})]))
    events = read(path)
    steps = [event for event in events if event["name"] == "step"]
    assert len(steps) == rollouts  # spans without an id stay
    shown = [event["id"] for event in events if event["ph"] == "b" and event["name"] == "rollout"]
    turns = [event["id"] for event in events if event["ph"] == "b" and event["name"] == "turn"]
    assert sorted(turns) == sorted(shown * 2)
    assert max(shown) > 0.9 * rollouts  # also of the last ones
    notes = [event for event in events if event["ph"] == "i"]
    assert [note["name"] for note in notes[:2]] == [
        "from here on, 1 in 2 prompts and rollouts is shown",
        "from here on, 1 in 4 prompts and rollouts is shown",
    ]
    left_out = sum(note["args"].get("left out: rollout", 0) for note in notes)
    assert left_out == rollouts - len(shown)
    assert 0 < len(shown) < 800
    assert notes[-1]["args"]["left out: turn"] == 2 * notes[-1]["args"]["left out: rollout"]


def test_the_first_file_and_the_last_ones_stay(tmp_path: Path) -> None:
    path = tmp_path / "timeline.json"
    with Timeline(path, largest=3000, all_files=12_000) as file:
        for step in range(300):
            file.add("trainer", Recorded([Span("step", "main", step * 1000, 1000, {"step": step})]))
    files = sorted(tmp_path.iterdir(), key=lambda p: p.stat().st_mtime_ns)
    assert sum(p.stat().st_size for p in files) < 12_000 + 2 * 3500
    assert files[0].name == "timeline.1.json"
    assert files[-1].name == "timeline.json"
    steps = [[e["args"]["step"] for e in read(p) if e["name"] == "step"] for p in files]
    assert steps[0][0] == 0
    assert steps[-1][-1] == 299
    last = [step for file in steps[1:] for step in file]
    assert last == list(range(last[0], 300))
    note = next(event["name"] for event in read(path) if event["ph"] == "i")
    assert note.startswith("removed to make room: timeline.")
    with Timeline(path):  # as another process does
        pass
    assert not (tmp_path / "timeline.2.json").exists()


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


async def test_spans_are_collected_while_a_run_lasts_and_when_it_ends(tmp_path: Path) -> None:
    path, recorder, meshes = tmp_path / "timeline.json", Recorder(), (Mesh("trainer"), Mesh("dead", "generator0"))

    async with timeline(path, meshes, print, every=0.01, controller=recorder):
        deadline = time.monotonic() + 60
        while len(lanes(read(path)) if path.exists() and path.read_text() else ()) < 2:
            assert time.monotonic() < deadline
            await asyncio.sleep(0.01)
        with recorder("the last"):
            pass
    found = lanes(json.loads(path.read_text()))
    assert found.keys() == {("controller", "main"), ("trainer", "main"), ("generator0", "main")}
    assert len(found["trainer", "main"]) == meshes[0].asked == meshes[1].asked
    assert [e["name"] for e in found["controller", "main"]] == ["the last"]


async def test_many_ranks_are_asked_rarely_and_the_controllers_spans_are_taken_all_the_same(tmp_path: Path) -> None:
    path, recorder = tmp_path / "timeline.json", Recorder(most=4)
    mesh = Mesh(*(f"generator{i}" for i in range(10_000)))

    async with timeline(path, [mesh], print, every=0.01, controller=recorder):
        for number in range(12):
            with recorder("step", number=number):
                pass
            deadline = time.monotonic() + 60
            while recorder._spans:
                assert time.monotonic() < deadline
                await asyncio.sleep(0.01)
        assert mesh.asked == 1
    found = lanes(json.loads(path.read_text()))
    assert [e["args"]["number"] for e in found["controller", "main"]] == [*range(12)]
    assert mesh.asked == 2


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


async def test_a_file_that_cannot_be_written_is_told_and_is_no_failure(tmp_path: Path) -> None:
    notes: list[str] = []

    async with timeline(tmp_path / "missing" / "timeline.json", [Mesh("trainer")], notes.append):
        await asyncio.sleep(0.01)
    assert len(notes) == 1
    assert "missing" in notes[0]


def test_a_clock_that_is_wrong_is_corrected_and_said_once() -> None:
    """An answer arrives within 2 us of its question. The clocks of two ranks are an hour ahead; a third is right."""
    notes: list[str] = []
    clocks, hour = Clocks(lambda: 0, notes.append), 3600 * 10**9

    def begins(rank: str, ahead: int, asked: int, begun: int) -> int:
        taken = Recorded([Span("step", "main", begun + ahead, 10, {})], now=asked + 500 + ahead)
        return clocks.corrected(rank, taken, asked, asked + 2000).spans[0].begin

    assert begins("trainer[dp=0 tp=0]", 0, 10_000, 9_000) == 9_000
    assert begins("trainer[dp=1 tp=0]", hour, 10_000, 9_000) == 9_500, "wrong by less than the answer took"
    assert begins("trainer[dp=1 tp=0]", hour, 20_000, 19_000) == 19_500, "as before: nothing moves"
    assert begins("generator0[tp=0]", hour, 10_000, 9_000) == 9_500
    assert notes == [
        "the clock of trainer[dp=1 tp=0]'s host is 3,600.0 s ahead of this one's; the timeline has this one's time"
    ]
    assert begins("generator0[tp=0]", 0, 10_000, 9_000) == 9_000, "on another host now"
    assert begins("generator0[tp=0]", -hour, 10_000, 9_000) == 9_500
    assert "3,600.0 s behind this one's" in notes[-1]
