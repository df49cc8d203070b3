"""A failure has a name: which actor, which rank, doing what, why. And every wait has a deadline.

Trouble shows in three ways: a call fails (ActorError carries the remote traceback), the kernel tells of a process of
this host that died (deaths.py), or Monarch's supervision calls the root hook, seconds later. When a rank dies, its
peers' collectives break at once, so the first error is often not the cause. `Watch.cause` waits a moment for a death
and then names that.
"""

import asyncio
import re
from collections.abc import Awaitable, Mapping
from contextlib import ExitStack, suppress
from typing import Any, Protocol

import monarch.actor
from monarch._rust_bindings.monarch_hyperactor.supervision import SupervisionError
from monarch.actor import ActorError

from titan_rl.meshes import deaths

CAUSE_SECONDS = 5.0  # for a death of another host's, which supervision polls every second (environment.py)


class RunError(Exception):
    """A run cannot go on. str() is a headline; `details` is the remote traceback or signal, shown once."""

    def __init__(self, headline: str, details: str = "") -> None:
        super().__init__(headline)
        self.details = details


class RankFailed(RunError):
    """An actor raised, or its process died."""


class RankDied(RankFailed):
    """Its process ended."""


class DeadlinePassed(RunError):
    """Somebody waited longer than allowed."""


class MonarchFuture(Protocol):
    def as_asyncio(self) -> Awaitable[Any]: ...


async def ask(future: MonarchFuture, *, actor: str, verb: str, seconds: float | None) -> Any:
    """Await a remote call. `seconds=None` only where the wait is open-ended and supervision ends it (a long poll)."""
    call = asyncio.ensure_future(future.as_asyncio())
    try:
        with deaths.cancelled_by_death(actor, call):
            return await asyncio.wait_for(call, seconds)
    except asyncio.CancelledError:
        task, how = asyncio.current_task(), deaths.end_of(actor)
        if how is None or (task is not None and task.cancelling()):
            raise  # it is the caller that was cancelled
        raise died(actor, how) from None
    except ActorError as error:
        raise RankFailed(f"{actor} failed in {verb}: {type(error.exception).__name__}", remote(error)) from None
    except SupervisionError as error:
        raise failure(str(error)) from None
    except TimeoutError:
        raise DeadlinePassed(
            f"{actor}.{verb} did not answer within {seconds:g} s",
            "The controller gave up waiting. If this is slow rather than stuck, raise [comm] *_timeout_seconds.",
        ) from None


async def ask_all(calls: dict[str, MonarchFuture], *, verb: str, seconds: float | None) -> list[Any]:
    """Await the same verb on many ranks, by name. The first failure ends the wait: the other ranks may well be
    blocked in a collective that the failed rank will never join."""
    return await asyncio.gather(*(ask(call, actor=name, verb=verb, seconds=seconds) for name, call in calls.items()))


def remote(error: ActorError) -> str:
    """The remote traceback without Monarch's own frames."""
    text = str(error).strip()
    frames = re.split(r"(?m)^(?=  File )", text)
    ours = [f for f in frames[1:] if "/monarch/_src/actor/" not in f.splitlines()[0]]
    return "Traceback on the remote rank (most recent call last):\n" + "".join(ours) if ours else text


_ACTOR = re.compile(r"The actor <root>\.<\S* (?P<name>[\w-]+)\{(?P<rank>[^}]*)\}>")
_DEATH = re.compile(r"process this actor was running on failed: (?P<how>[^\n]+)")


def failure(report: str) -> RankFailed:
    """A supervision report as an error that names the rank."""
    actor, death = _ACTOR.search(report), _DEATH.search(report)
    name = "an actor"
    if actor:
        name = label(actor["name"], dict(re.findall(r"'(\w+)': (\d+)/\d+", actor["rank"])))
    if death is None:
        return RankFailed(f"{name} failed", report.strip())
    signal = re.search(r"Killed\(sig=(\d+)\)", death["how"])
    return died(name, f"was killed by signal {signal[1]}" if signal else death["how"].strip(), report.strip())


async def _within(event: Awaitable[Any], seconds: float) -> None:
    with suppress(TimeoutError):
        await asyncio.wait_for(event, seconds)


def died(name: str, how: str, report: str = "") -> RankDied:
    return RankDied(f"{name} died: its process {how}", report)


def label(actor: str, axes: Mapping[str, Any]) -> str:
    """`trainer` with {dp: 1, tp: 0} -> "trainer[dp=1 tp=0]"."""
    return f"{actor}[{' '.join(f'{k}={v}' for k, v in axes.items())}]" if axes else actor


class Watch:
    """Root supervision of a run: a rank that dies cancels the task that runs it, whether or not anybody waits on that
    rank. (Monarch's default hook would end the controller by KeyboardInterrupt, without a word.)"""

    def __init__(self, body: asyncio.Task[Any]) -> None:
        self._body = body
        self._loop = asyncio.get_running_loop()
        self._armed = True
        self._died, self._reported = asyncio.Event(), asyncio.Event()  # by anybody, by Monarch
        self._told = ExitStack()
        self._told.enter_context(deaths.told(self._death))
        self.failures: list[RankFailed] = []
        monarch.actor.unhandled_fault_hook = self._hook

    def close(self) -> None:
        """From here on processes are meant to end."""
        self._armed = False
        self._told.close()
        monarch.actor.unhandled_fault_hook = lambda _: None

    async def cause(self, error: RunError) -> RunError:
        """The death behind an error, if one is reported in time; else the error itself."""
        self._armed = False
        if not isinstance(error, RankDied):
            await _within(self._died.wait(), CAUSE_SECONDS)
        dead = [failed for failed in [*self.failures, error] if isinstance(failed, RankDied)]
        if not dead or not str(dead[0]).endswith(deaths.GONE):
            return dead[0] if dead else error
        await _within(self._reported.wait(), CAUSE_SECONDS)  # Monarch knows how, for it reaped the process
        name = str(dead[0]).removesuffix(deaths.GONE)
        return next((failed for failed in self.failures if failed.details and str(failed).startswith(name)), dead[0])

    def _death(self, name: str, how: str) -> None:  # on a thread of its own
        self._loop.call_soon_threadsafe(self._note, died(name, how))

    def _hook(self, failed: Any) -> None:  # on Monarch's thread
        report = failed.report()
        if "<root>.<titan_rl." in report:  # else an actor that Monarch added to our process; ours is reported too
            self._loop.call_soon_threadsafe(self._note, failure(report))

    def _note(self, failed: RankFailed) -> None:
        self.failures.append(failed)
        if isinstance(failed, RankDied):
            self._died.set()
            if failed.details:
                self._reported.set()
        if self._armed:
            self._armed = False
            self._body.cancel()
