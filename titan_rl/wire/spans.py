"""What a process did when: spans, recorded where the work is, in about a microsecond each, and kept until asked for.

    with span("forward", tokens=96): ...            one stretch of work
    with span("sample", lane="group", id=7): ...    one of many under way at a time, told apart by their id
    span.take()                                     what was recorded since it was taken before

A lane is one thread of execution: its spans nest. Whoever works beside it, in another asyncio task, names another lane,
or gives its spans an id. Spans are seen from the host: a GPU goes on with what was launched in an earlier one.
"""

import time
from collections import deque
from collections.abc import Callable, Mapping
from typing import NamedTuple

Value = int | float | str

MOST = 16384  # spans that wait to be taken: some MB, and minutes of any rank's work
LONGEST_STRETCH = 250_000_000  # ns


class Span(NamedTuple):
    name: str
    lane: str
    begin: int  # ns since 1970
    nanoseconds: int
    args: Mapping[str, Value]
    id: int | None = None
    """Spans that have one may overlap others in their lane; those of one id nest."""

    @property
    def end(self) -> int:
        return self.begin + self.nanoseconds


class Recorded(NamedTuple):
    """What a process recorded since it was asked before, in the order in which it ended."""

    spans: list[Span]
    dropped: int = 0  # older ones, which nobody took in time


class Recorder:
    """The newest spans of one process. To be used from one thread: its event loop's."""

    def __init__(self, most: int = MOST) -> None:
        self._spans: deque[Span] = deque(maxlen=most)
        self._recorded = 0
        # One reading of the wall clock: what sets it later would let spans that nest overlap.
        self._epoch = time.time_ns() - time.perf_counter_ns()

    def __call__(self, name: str, /, *, lane: str = "main", id: int | None = None, **args: Value) -> "Open":
        return Open(self, name, lane, id, args)

    def now(self) -> int:
        """ns since 1970."""
        return self._epoch + time.perf_counter_ns()

    def since(self, begin: int, name: str, /, *, lane: str = "main", id: int | None = None, **args: Value) -> None:
        """A span from `begin`, which `now` once said, to now."""
        self.add(Span(name, lane, begin, self.now() - begin, args, id))

    def parts(self, begin: int, /, **seconds: float) -> None:
        """Spans one after the other from `begin` on."""
        for name, part in seconds.items():
            self.add(Span(name, "main", begin, round(part * 1e9), {}))
            begin = self._spans[-1].end

    def add(self, span: Span) -> None:
        self._spans.append(span)
        self._recorded += 1

    def take(self) -> Recorded:
        taken = Recorded(list(self._spans), self._recorded - len(self._spans))
        self._spans.clear()
        self._recorded = 0
        return taken


class Open:
    """A span under way. It is recorded when it ends, however it ends."""

    __slots__ = ("_args", "_began", "_id", "_lane", "_name", "_recorder")

    def __init__(self, recorder: Recorder, name: str, lane: str, id: int | None, args: dict[str, Value]) -> None:
        self._recorder, self._name, self._lane, self._id, self._args = recorder, name, lane, id, args

    def __enter__(self) -> None:
        self._began = self._recorder.now()

    def __exit__(self, *_: object) -> None:
        nanoseconds = self._recorder.now() - self._began
        self._recorder.add(Span(self._name, self._lane, self._began, nanoseconds, self._args, self._id))


class Stretch:
    """Turns too short and too many for a span each: as one, from the first turn to the last before a cut, or before it
    has become as long as `longest`. `counts` go up with the turns; a span has what was added while it lasted."""

    def __init__(
        self, recorder: Recorder, name: str, counts: Callable[[], dict[str, int]], *, longest: int = LONGEST_STRETCH
    ) -> None:
        self._recorder, self._name, self._counts, self._longest = recorder, name, counts, longest
        self._began: int | None = None
        self._ended = 0
        self._before: dict[str, int] = {}

    def __enter__(self) -> None:
        if self._began is None:
            self._before, self._began = self._counts(), self._recorder.now()

    def __exit__(self, *_: object) -> None:
        assert self._began is not None
        self._ended = self._recorder.now()
        if self._ended - self._began >= self._longest:
            self.cut()

    def cut(self) -> None:
        """Something else comes next, or nothing."""
        if self._began is not None:
            args = {name: count - self._before[name] for name, count in self._counts().items()}
            self._recorder.add(Span(self._name, "main", self._began, self._ended - self._began, args))
            self._began = None


span = Recorder()
"""This process's recorder."""
