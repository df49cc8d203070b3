"""Record the work of a process as spans, which are stored until they are taken.

    with span("forward", tokens=96): ...            one stretch of work
    with span("sample", lane="group", id=7): ...    one of many concurrent stretches, each with an id
    span.take()                                     the spans since the last take

A lane is one thread of execution: its spans nest. Concurrent asyncio tasks use another lane, or give their spans an id.
Spans are measured on the host: a GPU may still run kernels launched in an earlier span. `span.ranges` shows a profiler
the same stretches of work, beside the kernels that they launched.
"""

import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import NamedTuple

Value = int | float | str

MAX_SPANS = 16384  # stored until taken: a few MB, and minutes of any rank's work
MAX_STRETCH_NS = 250_000_000


class Span(NamedTuple):
    name: str
    lane: str
    begin: int  # ns since 1970
    nanoseconds: int
    args: Mapping[str, Value]
    id: int | None = None
    """Spans with an id may overlap others in their lane; spans with the same id nest."""

    @property
    def end(self) -> int:
        return self.begin + self.nanoseconds


class Recorded(NamedTuple):
    """Spans recorded since the last take, in the order in which they ended."""

    spans: list[Span]
    dropped: int = 0  # older spans that were not taken in time
    now: int = 0  # when they were taken, by the spans' clock; 0: unknown


class Recorder:
    """The newest spans of one process. Use it from one thread only, the event loop's."""

    def __init__(self, most: int = MAX_SPANS) -> None:
        self._spans: deque[Span] = deque(maxlen=most)
        self._recorded = 0
        # Read the wall clock once: if it were set later, nested spans could overlap.
        self._epoch = time.time_ns() - time.perf_counter_ns()
        self.ranges: Callable[[str], AbstractContextManager[object]] | None = None
        """A profiler's ranges, which nest: spans of other lanes and spans with an id have none."""

    def __call__(self, name: str, /, *, lane: str = "main", id: int | None = None, **args: Value) -> "Open":
        return Open(self, name, lane, id, args)

    def now(self) -> int:
        """Return ns since 1970."""
        return self._epoch + time.perf_counter_ns()

    def since(self, begin: int, name: str, /, *, lane: str = "main", id: int | None = None, **args: Value) -> None:
        """Record a span from `begin`, an earlier result of `now`, until now."""
        self.add(Span(name, lane, begin, self.now() - begin, args, id))

    def parts(self, begin: int, /, **seconds: float) -> None:
        """Record spans one after the other, starting at `begin`."""
        for name, part in seconds.items():
            self.add(Span(name, "main", begin, round(part * 1e9), {}))
            begin = self._spans[-1].end

    def add(self, span: Span) -> None:
        self._spans.append(span)
        self._recorded += 1

    def take(self) -> Recorded:
        taken = Recorded(list(self._spans), self._recorded - len(self._spans), self.now())
        self._spans.clear()
        self._recorded = 0
        return taken


class Open:
    """A running span. It is recorded when it ends, also by an exception."""

    __slots__ = ("_args", "_began", "_id", "_lane", "_name", "_range", "_recorder")

    def __init__(self, recorder: Recorder, name: str, lane: str, id: int | None, args: dict[str, Value]) -> None:
        self._recorder, self._name, self._lane, self._id, self._args = recorder, name, lane, id, args

    def __enter__(self) -> None:
        ranges = self._recorder.ranges
        self._range = ranges(self._name) if ranges and self._lane == "main" and self._id is None else None
        if self._range:
            self._range.__enter__()
        self._began = self._recorder.now()

    def __exit__(self, *_: object) -> None:
        self._recorder.since(self._began, self._name, lane=self._lane, id=self._id, **self._args)
        if self._range:
            self._range.__exit__(None, None, None)


class Stretch:
    """Record many short turns as one span, which ends at a cut or when it is `longest` ns long. A profiler gets a range
    of each turn.

    `counts` returns totals that grow with the turns; a span's args are their increase during the span."""

    def __init__(
        self, recorder: Recorder, name: str, counts: Callable[[], dict[str, int]], *, longest: int = MAX_STRETCH_NS
    ) -> None:
        self._recorder, self._name, self._counts, self._longest = recorder, name, counts, longest
        self._began: int | None = None
        self._ended = 0
        self._before: dict[str, int] = {}

    def __enter__(self) -> None:
        if self._began is None:
            self._before, self._began = self._counts(), self._recorder.now()
        self._range = self._recorder.ranges and self._recorder.ranges(self._name)
        if self._range:
            self._range.__enter__()

    def __exit__(self, *_: object) -> None:
        assert self._began is not None
        if self._range:
            self._range.__exit__(None, None, None)
        self._ended = self._recorder.now()
        if self._ended - self._began >= self._longest:
            self.cut()

    def cut(self) -> None:
        """End the span, because other work or none follows."""
        if self._began is not None:
            args = {name: count - self._before[name] for name, count in self._counts().items()}
            self._recorder.add(Span(self._name, "main", self._began, self._ended - self._began, args))
            self._began = None


span = Recorder()
"""This process's recorder."""


class Clock:
    """Adds up the seconds of the named parts of a lap, which is a step."""

    def __init__(self) -> None:
        self._lap_began = time.perf_counter()
        self._lap: defaultdict[str, float] = defaultdict(float)

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        began = time.perf_counter()
        try:
            with span(name):
                yield
        finally:
            self._lap[name] += time.perf_counter() - began

    def lap(self) -> dict[str, float]:
        """Return the seconds by name since the last lap, and the whole lap as "wall"."""
        now = time.perf_counter()
        lap = {**self._lap, "wall": now - self._lap_began}
        self._lap_began = now
        self._lap.clear()
        return lap
