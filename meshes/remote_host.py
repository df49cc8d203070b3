"""A host of the run whose worker was started elsewhere: joined at its address, followed by its agent.

controller ── ask, attach ──> worker ──> HostAgent (host_agent.py)
    <── take: the reports of the host's launchers, or nothing for fault.detect_seconds: the host is lost
    ── ask ──> the worker of a lost host: it serves anew, at another port, and the host is back
"""

import asyncio
import os
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

from monarch.actor import HostMesh, attach_to_workers

from titan_rl.meshes import deaths
from titan_rl.meshes.faults import the_only
from titan_rl.meshes.host_agent import WATCHES, HostAgent, HostFacts, Refusal, own_versions
from titan_rl.meshes.hosts import Host
from titan_rl.wire.errors import RunError
from titan_rl.wire.worker_address import (
    NoDoor,
    address_of,
    ask_door,
    refuses_connections,
    split_address,
    takes_connections,
    why_silent,
)

LEAVE_SECONDS = 0.5
ASK_SECONDS = 0.2  # between two questions at a worker's door
LOOK_SECONDS = 1.0  # between two looks whether it still serves there
ENDING_SECONDS = 1.0  # from SIGKILL to the end of a process
CLAIM_SECONDS = 2.0  # between two answers of a host that another run has
SILENT_SECONDS = 60.0  # of an agent whose host is reached


Joined = tuple[HostMesh, Any, HostFacts, str]  # the agent of a host, and why the host cannot be had, or ""


@dataclass(frozen=True, slots=True)
class Joining:
    """How long a run waits for hosts, and they for it."""

    join_seconds: float
    orphan_seconds: float
    detect_seconds: float
    tls: str = ""
    run: str = ""  # what a host that it has tells others


@asynccontextmanager
async def attached(
    addresses: Sequence[str],
    joining: Joining,
    say: Callable[[str], None] = lambda _: None,
    back: Callable[[], None] = lambda: None,
) -> AsyncIterator[list[Host]]:
    """Join the workers at these addresses, and leave them as they were: ready for the next run. A host that was lost
    and answers again takes its place in the list again; then `back` is called. `say` shows what happens."""
    async with AsyncExitStack() as stack:
        joins = [asyncio.create_task(_joined(address, joining, say)) for address in addresses]
        found = await asyncio.gather(*joins, return_exceptions=True)
        for remote in found:
            if isinstance(remote, Remote):
                stack.push_async_callback(remote.leave)
        failures = [each for each in found if isinstance(each, BaseException)]
        for failure in failures:
            if not isinstance(failure, RunError):
                raise failure
        if failures:
            raise RunError(
                f"{len(failures)} of {len(addresses)} hosts did not join: {'; '.join(map(str, failures))}",
                "\n".join(failure.details for failure in failures if isinstance(failure, RunError) and failure.details),
            )
        remotes = [remote for remote in found if isinstance(remote, Remote)]
        hosts = [remote.host for remote in remotes]

        async def keep(number: int, remote: Remote) -> None:
            while True:
                await remote.lost.wait()
                remote = await _rejoined(remote, joining, say)
                stack.push_async_callback(remote.leave)
                hosts[number] = remote.host
                say(f"{remote.address} is back: its slots are free")
                back()

        keeping = [asyncio.create_task(keep(number, remote)) for number, remote in enumerate(remotes)]
        try:
            yield hosts
        finally:
            for task in keeping:
                task.cancel()
            await asyncio.wait(keeping)


async def _joined(address: str, joining: Joining, say: Callable[[str], None]) -> "Remote":
    """Join one worker, or raise why not: what was tried, and what a plain connection to it says. `say` shows for which
    run a busy host is waited."""
    served, waits, began = "", list[Refusal](), time.monotonic()

    def told(refused: Refusal) -> None:
        if not waits:
            say(_awaiting(address, refused, joining.join_seconds, time.monotonic() - began))
        waits.append(refused)

    try:
        async with asyncio.timeout(joining.join_seconds):
            joined = None
            while joined is None:
                served = await _served(address)
                joined = await _while_served(address, served, _asked(served, joining, told))
    except NoDoor as error:
        raise RunError(f"{address} cannot be joined: {error}") from None
    except TimeoutError:
        why = waits[-1].why if waits else await asyncio.to_thread(why_silent, served or address, joining.tls)
        raise RunError(
            f"{address} did not answer within hosts.join_seconds = {joining.join_seconds:g}: {why}"
        ) from None
    except Exception as error:
        why = await asyncio.to_thread(why_silent, served or address, joining.tls)
        raise RunError(f"{address} cannot be joined: {why}", str(error)) from None
    mesh, agent, facts, refusal = joined
    if refusal:
        with suppress(Exception):  # it ends without an answer
            await asyncio.wait_for(agent.quit.call_one().as_asyncio(), LEAVE_SECONDS)
        raise RunError(f"{address}: {refusal}")
    return Remote(address, served, mesh, agent, facts, joining)


async def _asked(served: str, joining: Joining, told: Callable[[Refusal], None]) -> Joined:
    """Start an agent at a worker and claim its host, also one that another run has until now; `told` hears of each time
    that it was refused. Return the agent, and why the host cannot be had, or ""."""
    mesh = attach_to_workers(ca="trust_all_connections", workers=[served], name="host")
    agents: Any = mesh.spawn_procs(per_host={"agent": 1}, name="agent")
    agent: Any = agents.spawn("agent", HostAgent, joining.orphan_seconds)
    facts: HostFacts = await agent.facts.call_one().as_asyncio()
    refusal, within = mismatch(facts), min(CLAIM_SECONDS, joining.orphan_seconds / 4)
    while not refusal and (refused := await agent.claim.call_one(joining.run, within).as_asyncio()) is not None:
        if refused.final:
            refusal = refused.why
        else:
            told(refused)
    return mesh, agent, facts, refusal


async def _while_served(address: str, served: str, asked: Coroutine[Any, Any, Joined]) -> Joined | None:
    """Return what a worker answers. None: what it served there has ended meanwhile, as after a killed controller. A
    question that was under way then may never be answered."""
    answer = asyncio.create_task(asked)
    try:
        while not (await asyncio.wait({answer}, timeout=LOOK_SECONDS))[0]:
            if await _served(address) != served:
                return None
        if answer.exception() is not None and await _served(address) != served:
            return None
        return answer.result()
    finally:
        answer.cancel()


def _awaiting(address: str, refused: Refusal, join_seconds: float, waited: float) -> str:
    """Return what a run says when it begins to wait for a busy host."""
    until = f"; its processes there end in about {refused.seconds:.0f} s" if refused.seconds else ""
    left = max(0.0, join_seconds - waited)
    return (
        f"waiting for {address}, for at most {left:.0f} s (hosts.join_seconds = {join_seconds:g}): {refused.why}{until}"
    )


async def _served(address: str) -> str:
    """Wait until a worker says where it serves, and return that."""
    while True:
        try:
            if served := await asyncio.to_thread(ask_door, address):
                return served
        except NoDoor:
            raise
        except OSError:  # it may be started later than the run
            pass
        await asyncio.sleep(ASK_SECONDS)


async def _rejoined(lost: "Remote", joining: Joining, say: Callable[[str], None]) -> "Remote":
    """Wait until the worker of a lost host serves anew, and join it again."""
    refused, served = "", lost.served
    while True:
        await asyncio.sleep(joining.detect_seconds)
        with suppress(OSError):  # still unreachable
            served = await asyncio.to_thread(ask_door, lost.address) or served
        if served in (lost.served, refused):
            continue
        lost.ended.set()
        try:
            return await _joined(lost.address, joining, say)
        except RunError as error:
            refused = served
            say(f"{error}; it stays out of this run")


def mismatch(facts: HostFacts) -> str:
    """Return what a worker has that the run has not, or ""."""
    pairs = (("versions", own_versions(), facts.versions), ("current folder", os.getcwd(), facts.folder))
    differing = (each for each in pairs if each[1] != each[2])
    for what, expected, found in differing:
        return f"expected this run's {what}, {expected}, found {found}; start its worker with them"
    return ""


class Remote:
    """The controller's end of an agent."""

    def __init__(
        self, address: str, served: str, mesh: HostMesh, agent: Any, facts: HostFacts, joining: Joining
    ) -> None:
        self.address, self.served = address, served  # its worker's front door, and where that serves this run
        self._agent, self._detect_seconds, self._orphan_seconds = agent, joining.detect_seconds, joining.orphan_seconds
        scheme, host, _ = split_address(served)
        self._alive = address_of(scheme, host, facts.port)
        self._loop = asyncio.get_running_loop()
        self._launchers = defaultdict[int, deaths.Launcher](lambda: deaths.Launcher(kill=self._kill, host=address))
        self._kills: set[asyncio.Task[None]] = set()
        self._heard = time.monotonic()  # the agent's last answer
        self.lost, self.ended = asyncio.Event(), asyncio.Event()
        self.host = Host(mesh, address, facts.parent, facts, self.lost.is_set, self._silenced)
        self._following = asyncio.create_task(self._follow())

    async def _follow(self) -> None:
        while (news := await self._next()) is not None:
            self._heard = time.monotonic()
            for connection, line in news:
                if not self._launchers[connection].receive(line):
                    del self._launchers[connection]
        self.lost.set()
        how = f"{deaths.GONE}: its host {self.address} does not answer, for {time.monotonic() - self._heard:.2f} s"
        for launcher in list(self._launchers.values()):
            if not launcher.ended:
                launcher.end(how)
        deaths.host_lost(self.address, how)

    async def _next(self) -> list[tuple[int, bytes]] | None:
        """Wait for the agent's answer. None: the host or its agent is lost. One that is only slow still takes a
        connection, because its kernel does. Monarch does not always fail a call to an agent that was killed."""
        quarter = self._detect_seconds / 4
        within = min(quarter, self._orphan_seconds / 4)
        answer = asyncio.ensure_future(self._agent.take.call(within).as_asyncio())
        began, patience = time.monotonic(), 2 * quarter
        while not (await asyncio.wait({answer}, timeout=patience))[0]:
            reached = await asyncio.to_thread(takes_connections, self.served, quarter)
            ended = reached and await asyncio.to_thread(refuses_connections, self._alive, quarter)
            if not reached or ended or time.monotonic() - began > SILENT_SECONDS:
                answer.cancel()
                return None
        try:
            return the_only(answer.result())
        except Exception:  # the agent has ended
            return None

    async def _silenced(self) -> None:
        """Return once no rank of this lost host can run any more. Its agent ends them when its last answer that was
        received here is hosts.orphan_seconds old; they have ended already if the worker serves anew, or if its kernel
        says that it does not."""
        latest = self._heard + self._orphan_seconds * (1 + 1 / WATCHES) + ENDING_SECONDS
        while not self.ended.is_set() and time.monotonic() < latest:
            if await asyncio.to_thread(refuses_connections, self.served, self._detect_seconds):
                self.ended.set()
            with suppress(TimeoutError):
                await asyncio.wait_for(self.ended.wait(), ASK_SECONDS)

    def _kill(self, pid: int) -> None:
        self._loop.call_soon_threadsafe(partial(self._ask_to_kill, pid))

    def _ask_to_kill(self, pid: int) -> None:
        async def kill() -> None:
            with suppress(Exception):  # a host that does not answer is lost
                await asyncio.wait_for(self._agent.kill.call_one([pid]).as_asyncio(), self._detect_seconds)

        if not self.lost.is_set():
            task = asyncio.create_task(kill())
            self._kills.add(task)
            task.add_done_callback(self._kills.discard)

    async def leave(self) -> None:
        """End what the run has on this host. Its worker waits for the next run."""
        self._following.cancel()
        if not self.lost.is_set():
            with suppress(Exception):  # it ends without an answer
                await asyncio.wait_for(self._agent.end.call_one().as_asyncio(), LEAVE_SECONDS)
