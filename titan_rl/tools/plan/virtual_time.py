"""Runs asyncio programs in virtual time: when nothing is left to do at a moment, the clock jumps to the next timer.

The functions of `time` read that clock meanwhile, in the whole process. So unchanged code that measures seconds, or has
deadlines, does both in virtual time.
"""

import asyncio
import gc
import math
import selectors
import time
from collections.abc import Callable, Coroutine
from typing import Any, cast

FOREVER = 24 * 3600.0
"""Seconds without an event after which none is expected; asyncio cuts longer waits at this."""


class Stuck(RuntimeError):
    """Every task waits, and nothing is left that could end a wait."""


class _Jumps(selectors.SelectSelector):
    """Moves the loop's clock where other selectors wait."""

    def __init__(self, loop: "VirtualLoop") -> None:
        super().__init__()
        self._loop = loop

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        if self._loop.failure is not None:
            raise self._loop.failure
        if timeout is None or timeout >= FOREVER:
            raise Stuck(f"after {self._loop.now:g} virtual seconds every task waits, and nothing can end a wait")
        self._loop.now += max(timeout, 0.0)
        return []


class VirtualLoop(asyncio.SelectorEventLoop):
    """An event loop without threads, files and waiting."""

    def __init__(self) -> None:
        self.now = 0.0
        self.failure: Exception | None = None  # a callback's
        super().__init__(_Jumps(self))
        self._clock_resolution = 1e-6  # above the rounding of months

    def time(self) -> float:
        return self.now

    def call_exception_handler(self, context: dict[str, Any]) -> None:
        """End at the failure of a callback: what waits for it would wait for ever."""
        self.failure = self.failure or (context.get("exception") if "handle" in context else None)

    def run_in_executor(self, executor: Any, func: Callable[..., Any], *args: Any) -> asyncio.Future[Any]:
        """Call `func` here and now: a thread would race with virtual time."""
        done = self.create_future()
        try:
            done.set_result(func(*args))
        except Exception as error:
            done.set_exception(error)
        return done


def in_virtual_time(main: Callable[[VirtualLoop], Coroutine[Any, Any, None]]) -> None:
    """Run `main(loop)`. Until it returns, all clocks of this process show virtual time."""
    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        loop = cast(VirtualLoop, runner.get_loop())
        clocks: dict[str, Any] = dict.fromkeys(("time", "monotonic", "perf_counter"), loop.time)
        clocks |= {f"{name}_ns": lambda: round(loop.now * 1e9) for name in clocks}
        real = {name: getattr(time, name) for name in clocks}
        for name, clock in clocks.items():
            setattr(time, name, clock)
        gc.disable()  # scanning all requests in flight again and again takes as long as all else
        try:
            runner.run(main(loop))
        finally:
            gc.enable()
            for name, clock in real.items():
                setattr(time, name, clock)


class Timer:
    """A callback at a moment in seconds of work."""

    __slots__ = ("callback", "cores", "due", "handle")

    def __init__(self, cores: "Cores", due: float, callback: Callable[[], None]) -> None:
        self.cores, self.due, self.callback = cores, due, callback
        self.handle: asyncio.TimerHandle | None = None

    def cancel(self) -> None:
        if self.handle is not None and self in self.cores.timers:
            del self.cores.timers[self]
            self.handle.cancel()


class Cores:
    """Cores that parts share: if busy parts ask for more than there are, all of them slow down in proportion. Seconds
    of work, which this class counts, are seconds of a part that has all of its cores."""

    def __init__(self, loop: VirtualLoop, number: float = math.inf) -> None:
        self.loop, self._number = loop, number
        self._asked, self._speed = 0.0, 1.0
        self._work = self._at = 0.0  # seconds of work until the last change of speed, and when it was
        self.timers: dict[Timer, None] = {}

    def now(self) -> float:
        """Return the seconds of work until now."""
        return self._work + (self.loop.now - self._at) * self._speed

    def call_at(self, due: float, callback: Callable[[], None]) -> Timer:
        timer = Timer(self, due, callback)
        self.timers[timer] = None
        self._arm(timer)
        return timer

    def ask(self, cores: float) -> None:
        """Let a part begin to keep `cores` busy, or end it: then they are negative."""
        if not cores or math.isinf(self._number):
            return
        self._work, self._at = self.now(), self.loop.now
        self._asked += cores
        self._speed = min(1.0, self._number / max(self._asked, 1e-9))
        for timer in self.timers:
            assert timer.handle is not None
            timer.handle.cancel()
            self._arm(timer)

    async def work(self, seconds: float, cores: float = 0.0) -> None:
        """Return once a part with these cores has done `seconds` of work."""
        done = self.loop.create_future()
        self.ask(cores)
        timer = self.call_at(self.now() + seconds, lambda: done.set_result(None))
        try:
            await done
        finally:
            timer.cancel()
            self.ask(-cores)

    def _arm(self, timer: Timer) -> None:
        timer.handle = self.loop.call_at(self._at + (timer.due - self._work) / self._speed, self._ring, timer)

    def _ring(self, timer: Timer) -> None:
        del self.timers[timer]
        timer.callback()
