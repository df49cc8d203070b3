"""Remote calls with deadlines, whose failures name the actor, the rank, the verb and the reason.

A failure is reported by a failed call (ActorError carries the remote traceback), by a launcher (deaths.py), or by
Monarch's supervision, seconds later. When a rank dies, its peers' collectives break at once, so the first error is
often not the cause. `Watch.cause` waits briefly for a death and reports that instead.
"""

import asyncio
import re
import shutil
import tempfile
import time
from collections.abc import Awaitable, Collection, Coroutine, Mapping
from contextlib import ExitStack, suppress
from typing import Any, Protocol, TypeVar

import monarch.actor
from monarch._rust_bindings.monarch_hyperactor.supervision import SupervisionError
from monarch.actor import ActorError, ValueMesh

from titan_rl.meshes import deaths, stalls
from titan_rl.meshes.stalls import Wait
from titan_rl.wire.deadlines import deadline
from titan_rl.wire.errors import DeadlinePassed, RankDied, RankFailed, RunError

T = TypeVar("T")

STALL_SECONDS = 15.0  # late calls to one mesh within this time share one report
LOCAL_SECONDS = 2.0  # wait for a death on this host after a peer's collective broke: a busy machine reports it late
SPARE_BYTES = 2**24  # a disk for temporary files with less free space is reported as full
CAUSE_SECONDS = 5.0  # wait for a death on another host, and for Monarch's report, which may be later (environment.py)

_waits: dict[int, Wait] = {}
_reports: dict[str, asyncio.Task[str]] = {}  # by mesh: late ranks of one mesh share a report


def waits() -> list[Wait]:
    """Return this process's unanswered calls."""
    return list(_waits.values())


class MonarchFuture(Protocol):
    def as_asyncio(self) -> Awaitable[Any]: ...


async def ask(future: MonarchFuture, *, actor: str, verb: str, seconds: float | None) -> Any:
    """Await a call to one rank, and return its answer. Pass `seconds=None` only for a long poll, which supervision
    ends. Make the call by `call`, on a slice of one rank: Monarch 0.7.0 leaks more memory with `call_one`."""
    answer, task = asyncio.ensure_future(future.as_asyncio()), asyncio.current_task()
    wait = Wait(actor, verb, time.monotonic(), seconds)
    _waits[id(wait)] = wait
    try:
        with deaths.cancelled_by_death(actor, answer) as call:
            try:
                # Not wait_for: in Python 3.11 it loses a cancellation if the answer arrives in the same tick.
                async with deadline(seconds):
                    return the_only(await answer)
            except asyncio.CancelledError:
                if call.death is None or (task is not None and task.cancelling()):
                    raise  # the caller was cancelled, not the call
                raise RankDied(actor, call.death) from None
    except ActorError as error:
        kind = type(error.exception).__name__
        raise RankFailed(f"{actor} failed in {verb}: {kind}", remote(error), rank=actor, kind=kind) from None
    except SupervisionError as error:
        raise failure(str(error)) from None
    except ValueError as error:
        if (failed := not_started(actor, str(error))) is None:
            raise
        raise failed from None
    except TimeoutError:
        raise DeadlinePassed(
            f"{actor}.{verb} did not answer within {seconds:g} s",
            f"{await _stall(wait)}\nIf this is slow rather than stuck, raise [comm] *_timeout_seconds, or "
            "fault.hang_seconds for generators.",
            rank=actor,
        ) from None
    finally:
        del _waits[id(wait)]


def the_only(answers: Any) -> Any:
    """Return the only answer of a `call`, or the answer of a `call_one`."""
    if isinstance(answers, ValueMesh):
        (answers,) = answers.values()
    return answers


async def _stall(wait: Wait) -> str:
    mesh = wait.actor.partition("[")[0]
    if mesh not in _reports:
        _reports[mesh] = asyncio.create_task(stalls.report(wait, waits(), deaths.alive()))
        asyncio.get_running_loop().call_later(STALL_SECONDS, _reports.pop, mesh, None)
    return await asyncio.shield(_reports[mesh])


async def ask_all(calls: dict[str, MonarchFuture], *, verb: str, seconds: float | None) -> list[Any]:
    """Await the same verb on many ranks, by name. The first failure ends the wait: the other ranks may be blocked in a
    collective that the failed rank will never join."""
    return await asyncio.gather(*(ask(call, actor=name, verb=verb, seconds=seconds) for name, call in calls.items()))


async def death_behind(error: Exception, ranks: Collection[str]) -> Exception:
    """Return the death among `ranks`, peers in collectives, that caused the error if one is reported in time, else the
    error itself."""
    until = time.monotonic() + LOCAL_SECONDS
    while not isinstance(error, RankDied) and len(ranks) > 1:
        if dead := [RankDied(rank, how) for rank in ranks if (how := deaths.ended(rank)) is not None]:
            return dead[0]
        if time.monotonic() > until:
            break
        await asyncio.sleep(0.02)
    return error


def remote(error: ActorError) -> str:
    """Return the remote traceback without Monarch's own frames."""
    text = str(error).strip()
    frames = re.split(r"(?m)^(?=  File )", text)
    ours = [f for f in frames[1:] if "/monarch/_src/actor/" not in f.splitlines()[0]]
    return "Traceback on the remote rank (most recent call last):\n" + "".join(ours) if ours else text


_ACTOR = re.compile(r"The actor <root>\.<\S* (?P<name>[\w-]+)\{(?P<rank>[^}]*)\}>")
_NOT_STARTED = re.compile(r"error creating proc .* agent host_agent\.service@(\S+?)<")
_UNANSWERED = re.compile(r"error spawning proc mesh: statuses: Timeout\((?P<seconds>[\d.]+)s\)")
_DEATH = re.compile(r"process this actor was running on failed: (?P<how>[^\n]+)")


def not_started(actor: str, report: str) -> RankFailed | None:
    """Turn Monarch's report of a process that it could not start into an error that names the rank."""
    if place := _NOT_STARTED.search(report):
        hint = f"Its output, or its worker's log, has the reason.{_full_disk()}"
        return RankFailed(f"{actor} cannot be started on {place[1]}", f"{hint}\n{report}", rank=actor)
    if late := _UNANSWERED.search(report):
        hint = "The worker of its host is stopped, or so busy that it does not answer Monarch."
        what = f"{actor} was not started within {float(late['seconds']):.0f} s"
        return RankFailed(what, f"{hint}\n{report}", rank=actor)
    return None


def _full_disk() -> str:
    """Return a sentence if the disk of this machine's folder for temporary files is full, else ""."""
    folder = tempfile.gettempdir()
    with suppress(OSError):
        free = shutil.disk_usage(folder).free
        return f" {folder} has only {free / 2**20:.1f} MiB free." if free < SPARE_BYTES else ""
    return ""


def failure(report: str) -> RankFailed:
    """Turn a supervision report into an error that names the rank."""
    actor, death = _ACTOR.search(report), _DEATH.search(report)
    name = "an actor"
    if actor:
        axes = dict(re.findall(r"'(\w+)': (\d+)/\d+", actor["rank"]))
        axes.pop("hosts", None)  # Monarch's own axis: each of our process meshes is on one
        name = label(actor["name"], axes)
    if death is None:
        return RankFailed(f"{name} failed", report.strip(), rank=name if actor else "")
    signal = re.search(r"Killed\(sig=(\d+)\)", death["how"])
    return RankDied(name, f"was killed by signal {signal[1]}" if signal else death["how"].strip(), report.strip())


async def _within(event: Awaitable[Any], seconds: float) -> None:
    with suppress(TimeoutError):
        await asyncio.wait_for(event, seconds)


def label(actor: str, axes: Mapping[str, Any]) -> str:
    """Return a rank's name: `trainer` with {dp: 1, tp: 0} -> "trainer[dp=1 tp=0]"."""
    return f"{actor}[{' '.join(f'{k}={v}' for k, v in axes.items())}]" if axes else actor


class Watch:
    """Root supervision of a run: a dead rank ends the driven work, even if no call waits on that rank.

    Monarch's default hook would end the controller by KeyboardInterrupt, without a message."""

    def __init__(self, tended: Collection[str] = ()) -> None:
        """Ignore ranks whose mesh name begins with one of `tended`: their mesh handles its failures."""
        self._tended = tuple(tended)
        self._loop = asyncio.get_running_loop()
        self._driven = set[asyncio.Task[Any]]()
        self._listening = ExitStack()
        self._listening.enter_context(deaths.listening(self._death))
        self._forget()
        monarch.actor.unhandled_fault_hook = self._hook

    async def drive(self, work: Coroutine[Any, Any, T]) -> T:
        """Await `work`, or raise once a rank dies or fails. If a death caused the failure, raise the death."""
        if not self._driven:
            self._forget()
        task = asyncio.create_task(work)
        self._driven.add(task)
        try:
            return await task
        except RunError as error:
            raise await self.cause(error) from None
        except asyncio.CancelledError:
            caller = asyncio.current_task()
            if not self.failures or (caller is not None and caller.cancelling()):
                raise  # Ctrl-C
            raise await self.cause(self.failures[0]) from None
        finally:
            self._driven.discard(task)

    def fail(self, error: RunError) -> None:
        """End the driven work with an error that no rank has."""
        self.failures.append(error)
        driven, self._driven = self._driven, set()
        for task in driven:
            task.cancel()

    def close(self) -> None:
        """Stop watching, because processes are about to be ended on purpose."""
        self._driven.clear()
        self._listening.close()
        monarch.actor.unhandled_fault_hook = lambda _: None

    async def cause(self, error: RunError) -> RunError:
        """Return the death that caused a rank's error if one is reported in time, else the error itself."""
        if not error.rank:
            return error
        if not isinstance(error, RankDied):
            await _within(self._died.wait(), LOCAL_SECONDS if error.rank in deaths.alive() else CAUSE_SECONDS)
        return next((failed for failed in [*self.failures, error] if isinstance(failed, RankDied)), error)

    async def explained(self, error: RunError) -> RunError:
        """Return how a rank died if only its death is known: Monarch reaped the process first, and reports later."""
        if not isinstance(error, RankDied) or error.how != deaths.GONE:
            return error
        await _within(self._reported.wait(), CAUSE_SECONDS)
        return next((report for report in self._reports if report.rank == error.rank), error)

    def _forget(self) -> None:
        self.failures: list[RunError] = []
        self._reports: list[RankDied] = []  # from Monarch: later, but with details
        self._died, self._reported = asyncio.Event(), asyncio.Event()  # from any source; from Monarch

    def _death(self, name: str, how: str) -> None:  # called on a thread of deaths.py
        self._loop.call_soon_threadsafe(self._note, RankDied(name, how))

    def _hook(self, failed: Any) -> None:  # called on Monarch's thread
        report = failed.report()
        if "<root>.<titan_rl." in report:  # else it is an actor that Monarch added to our process; ours is reported too
            self._loop.call_soon_threadsafe(self._note, failure(report))

    def _note(self, failed: RankFailed) -> None:
        if failed.mesh.startswith(self._tended):
            return
        if isinstance(failed, RankDied) and failed.details:
            self._reports.append(failed)
            self._reported.set()
            if deaths.follows(failed.rank):  # reported by the kernel before, or killed on purpose
                return
        if isinstance(failed, RankDied):
            self._died.set()
        self.fail(failed)
