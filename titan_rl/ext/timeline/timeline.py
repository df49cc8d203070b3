"""timeline.json: the spans of all processes of a run, to be opened at ui.perfetto.dev or chrome://tracing.

    ranks ── spans, every few seconds ──> controller ── one event per line ──> timeline.json

It is a JSON array in Chrome's trace format, written while the run lasts. Viewers do not need the closing bracket, so
the file of a killed run opens too. Each controller process starts a new file, because days may pass between two of
them: the first becomes timeline.1.json, the second timeline.2.json. No file is ever reopened.

The files are bounded. Spans with an id (prompts, rollouts and their turns) are most of a run's spans: each time that
they have taken `DETAIL` bytes of a file, half of the ids are left out from then on, whole ids at a time. An event names
the share that stays and counts the other spans. A large file is followed by another; the oldest but the first are
removed once all have `ALL_FILES` bytes.
"""

import asyncio
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator, Sequence
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

from titan_rl.record.lines import SelfClosing, encode
from titan_rl.record.sinks import HasSpans
from titan_rl.wire.spans import Recorded, Recorder, Span, span

CONTROLLER = "controller"
EVERY_SECONDS = 2.0
SECONDS_PER_RANK = 0.1  # a rank's answer costs the controller 1 ms: asking takes at most 1 % of its time
LAST_SECONDS = 5.0  # for the last spans: a finished run does not wait longer for its timeline
SAID_SECONDS = 1.0  # between the clocks of two hosts
LARGEST = 32 << 20  # bytes of a file, about 250,000 spans: viewers open it at once
ALL_FILES = 128 << 20  # bytes of a folder's timelines, and one file more
DETAIL = 2 << 20  # bytes of spans with an id until half of the ids are left out
SPREAD, RANGE = 0x9E3779B1, 1 << 32  # multiplied by it, ids that follow each other are evenly spread over the range

Event = dict[str, Any]


@asynccontextmanager
async def timeline(
    path: Path,
    meshes: Sequence[HasSpans],
    note: Callable[[str], None],
    *,
    every: float = EVERY_SECONDS,
    controller: Recorder = span,
) -> AsyncIterator[None]:
    """Collect spans while the body runs, and once more if it ends without an error. Many ranks are asked rarely, so
    that this costs little; the controller's own spans, which grow with their number, are taken `every` few seconds.

    The timeline never fails the run: a rank that fails to answer is left out, and an error in writing the file is
    passed to `note`.
    """
    over = asyncio.Event()

    async def collect() -> None:
        try:
            clocks = Clocks(controller.now, note)
            with Timeline(path) as file:
                file.track(CONTROLLER)  # before the ranks: tracks are shown in this order
                try:
                    due = time.monotonic()  # when the ranks are asked next
                    while not over.is_set():
                        with suppress(TimeoutError):
                            await asyncio.wait_for(over.wait(), every)
                        if over.is_set() or time.monotonic() >= due:
                            ranks = await _ask(meshes, file, clocks)
                            due = time.monotonic() + ranks * SECONDS_PER_RANK
                        file.add(CONTROLLER, controller.take())
                finally:
                    file.add(CONTROLLER, controller.take())
        except OSError as error:
            note(f"the timeline ends here: {error}")

    collecting = asyncio.create_task(collect())
    try:
        yield
        over.set()
        await asyncio.wait({collecting}, timeout=LAST_SECONDS)
    finally:  # the ranks of a failed run are not asked: some of them are gone, others hang
        collecting.cancel()
        await asyncio.wait({collecting}, timeout=LAST_SECONDS)


class Clocks:
    """Gives spans of other hosts the time of this one, whose clock may be set otherwise.

    A rank's clock is right if it shows a time between the question for its spans and its answer. Otherwise it is
    corrected to the middle of the two, as long as the corrected time lies between them."""

    def __init__(self, now: Callable[[], int], note: Callable[[str], None]) -> None:
        self.now, self._note = now, note
        self._ahead: dict[str, int] = {}  # ns, by rank
        self._said: set[int] = set()  # seconds

    def corrected(self, rank: str, recorded: Recorded, asked: int, answered: int) -> Recorded:
        ahead = self._ahead.get(rank, 0)
        if recorded.now and not asked <= recorded.now - ahead <= answered:
            right = asked <= recorded.now <= answered
            ahead = self._ahead[rank] = 0 if right else recorded.now - (asked + answered) // 2
            self._say(rank, ahead / 1e9)
        if not ahead:
            return recorded
        return recorded._replace(spans=[each._replace(begin=each.begin - ahead) for each in recorded.spans])

    def _say(self, rank: str, seconds: float) -> None:
        if abs(seconds) >= SAID_SECONDS and round(seconds) not in self._said:
            self._said.add(round(seconds))
            off = f"{abs(seconds):,.1f} s {'ahead of' if seconds > 0 else 'behind'}"
            self._note(f"the clock of {rank}'s host is {off} this one's; the timeline has this one's time")


async def _ask(meshes: Sequence[HasSpans], file: "Timeline", clocks: Clocks) -> int:
    """Ask all ranks for their spans, and return the number of ranks."""

    async def one(name: str, answer: Awaitable[Recorded]) -> None:
        try:
            taken = await answer
        except Exception:  # reported where the run itself calls that rank
            return
        file.add(name, clocks.corrected(name, taken, began, clocks.now()))

    began = clocks.now()
    asked = {name: answer for mesh in meshes for name, answer in mesh.spans().items()}
    for name in asked:
        file.track(name)
    await asyncio.gather(*(one(name, answer) for name, answer in asked.items()))
    return len(asked)


class Timeline(SelfClosing):
    """Writes the file. Viewers call a track a process and a lane a thread."""

    def __init__(self, path: Path, *, largest: int = LARGEST, detail: int = DETAIL, all_files: int = ALL_FILES) -> None:
        self._path = path
        self._largest, self._detail, self._all_files = largest, detail, all_files
        self._pids: dict[str, int] = {}
        self._tids: dict[tuple[str, str], int] = {}
        self._lanes: Counter[str] = Counter()  # by track
        self._one_in = 1  # the share of ids that is written is 1 in this
        self._left_out: Counter[str] = Counter()  # spans by name, since an event counted them
        self._latest = 0  # microseconds: the end of the last span
        self._open()

    def track(self, name: str) -> None:
        """Announce a track. Viewers show tracks in the order in which they are announced."""
        if name not in self._pids:
            self._pids[name] = len(self._pids) + 1
            self._write(self._names_of_track(name))

    def add(self, track: str, taken: Recorded) -> None:
        self.track(track)
        for lane in dict.fromkeys(["main", *(each.lane for each in taken.spans if each.id is None)]):
            if (track, lane) not in self._tids:
                self._lanes[track] += 1
                self._tids[track, lane] = self._lanes[track]
                self._write(self._names_of_lane(track, lane))
        spans = sorted(taken.spans, key=lambda each: (each.begin, -each.nanoseconds))
        if taken.dropped:
            lost = {"ph": "i", "s": "p", "name": f"{taken.dropped} spans before this were dropped", "tid": 1}
            self._write([lost | {"pid": self._pids[track], "ts": spans[0].begin // 1000}])
        whole = [each for each in spans if each.id is None or each.id * SPREAD % RANGE < RANGE // self._one_in]
        self._left_out.update(Counter(each.name for each in spans) - Counter(each.name for each in whole))
        self._latest = max([self._latest, *(each.end // 1000 for each in spans)])
        events = [event for each in whole for event in self._events(track, each)]
        self._write(sorted((event for event in events if event["ph"] == "X"), key=lambda event: event["ts"]))
        before = self._size
        self._write(sorted((event for event in events if event["ph"] != "X"), key=lambda event: event["ts"]))
        self._detailed += self._size - before
        while self._detailed > self._detail:
            self._detailed -= self._detail
            self._one_in *= 2
            self._count(f"from here on, 1 in {self._one_in} prompts and rollouts is shown")
        if self._size > self._largest:
            self.close()
            self._open()

    def _count(self, name: str) -> None:
        """Write an event that counts the spans that were left out since the last such event."""
        event = {"ph": "i", "s": "g", "name": name, "pid": 1, "tid": 1, "ts": self._latest}
        self._write([event | {"args": {f"left out: {name}": n for name, n in sorted(self._left_out.items())}}])
        self._left_out.clear()

    def close(self) -> None:
        if self._left_out:
            self._count("spans of prompts and rollouts were left out")
        self._file.write(b"\n]\n")
        self._file.close()

    def _open(self) -> None:
        self._detailed = 0  # bytes
        removed = self._make_room()
        self._file = self._path.open("wb")
        self._size = self._file.write(b"[")
        for name in self._pids:
            self._write(self._names_of_track(name))
        for track, lane in self._tids:
            self._write(self._names_of_lane(track, lane))
        if removed:
            name = f"removed to make room: {', '.join(removed)}"
            self._write([{"ph": "i", "s": "g", "name": name, "pid": 1, "tid": 1, "ts": self._latest}])

    def _make_room(self) -> list[str]:
        """Rename the file that lies there, and remove the oldest ones but the first. Return the removed names."""
        stem, suffix = self._path.stem, self._path.suffix
        numbers = (path.name[len(stem) + 1 : -len(suffix)] for path in self._path.parent.glob(f"{stem}.*{suffix}"))
        earlier = sorted(int(number) for number in numbers if number.isdigit())
        if self._path.exists():
            earlier.append(max(earlier, default=0) + 1)
            self._path.rename(self._path.with_suffix(f".{earlier[-1]}{suffix}"))
        files = [self._path.with_suffix(f".{number}{suffix}") for number in earlier]
        sizes = [path.stat().st_size for path in files]
        removed = list[str]()
        while len(files) > 2 and sum(sizes) > self._all_files:
            oldest = files.pop(1)
            del sizes[1]
            oldest.unlink()
            removed.append(oldest.name)
        return removed

    def _write(self, events: Iterable[Event]) -> None:
        for event in events:
            self._size += self._file.write((b"\n" if self._size == 1 else b",\n") + encode(event))
        self._file.flush()

    def _events(self, track: str, each: Span) -> Iterator[Event]:
        # Both ends are rounded down to the microsecond, which keeps their order: nested spans stay nested.
        begin, end = each.begin // 1000, each.end // 1000
        event: Event = {"name": each.name, "pid": self._pids[track], "ts": begin}
        if each.args:
            event["args"] = each.args
        if each.id is None:
            yield event | {"ph": "X", "dur": end - begin, "tid": self._tids[track, each.lane]}
        else:
            event |= {"cat": each.lane, "id": each.id, "tid": 1}
            yield event | {"ph": "b"}
            yield event | {"ph": "e", "ts": end}

    def _names_of_track(self, name: str) -> Iterator[Event]:
        pid = self._pids[name]
        yield {"ph": "M", "name": "process_name", "pid": pid, "args": {"name": name}}
        yield {"ph": "M", "name": "process_sort_index", "pid": pid, "args": {"sort_index": pid}}

    def _names_of_lane(self, track: str, lane: str) -> Iterator[Event]:
        at = {"ph": "M", "pid": self._pids[track], "tid": self._tids[track, lane]}
        yield at | {"name": "thread_name", "args": {"name": lane}}
        yield at | {"name": "thread_sort_index", "args": {"sort_index": at["tid"]}}
