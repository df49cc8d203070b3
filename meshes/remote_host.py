"""A host of the run whose worker was started elsewhere: joined at its address, followed by its agent.

controller ── attach ──> worker ──> HostAgent (host_agent.py)
    <── take: what the shims of the host report, or nothing for fault.detect_seconds: the host is lost
"""

import asyncio
import os
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

from monarch.actor import HostMesh, attach_to_workers

from titan_rl.meshes import deaths
from titan_rl.meshes.host_agent import HostAgent, HostFacts, own_versions
from titan_rl.meshes.hosts import Host
from titan_rl.wire.dial import takes_connections, why_silent
from titan_rl.wire.errors import RunError

LEAVE_SECONDS = 0.5
SILENT_SECONDS = 60.0  # of an agent whose host is reached


@dataclass(frozen=True, slots=True)
class Joining:
    """How long a run waits for hosts, and they for it."""

    join_seconds: float
    orphan_seconds: float
    detect_seconds: float
    tls: str = ""


@asynccontextmanager
async def attached(addresses: Sequence[str], joining: Joining) -> AsyncIterator[list[Host]]:
    """Join the workers at these addresses, and leave them as they were: ready for the next run."""
    async with AsyncExitStack() as stack:
        joins = [asyncio.create_task(_joined(address, joining)) for address in addresses]
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
        yield [remote.host for remote in found if isinstance(remote, Remote)]


async def _joined(address: str, joining: Joining) -> "Remote":
    """Join one worker, or raise why not: what was tried, and what a plain connection to it says."""
    try:
        async with asyncio.timeout(joining.join_seconds):
            mesh = attach_to_workers(ca="trust_all_connections", workers=[address], name="host")
            agents: Any = mesh.spawn_procs(per_host={"agent": 1}, name="agent")
            agent: Any = agents.spawn("agent", HostAgent, joining.orphan_seconds)
            facts: HostFacts = await agent.facts.call_one().as_asyncio()
    except TimeoutError:
        why = await asyncio.to_thread(why_silent, address, joining.tls)
        raise RunError(
            f"{address} did not answer within hosts.join_seconds = {joining.join_seconds:g}: {why}"
        ) from None
    except Exception as error:
        why = await asyncio.to_thread(why_silent, address, joining.tls)
        raise RunError(f"{address} cannot be joined: {why}", str(error)) from None
    if why := mismatch(facts):
        raise RunError(f"{address}: {why}")
    return Remote(address, mesh, agent, facts, joining.detect_seconds)


def mismatch(facts: HostFacts) -> str:
    """Return what a worker has that the run has not, or ""."""
    pairs = (("versions", own_versions(), facts.versions), ("current folder", os.getcwd(), facts.folder))
    differing = (each for each in pairs if each[1] != each[2])
    for what, expected, found in differing:
        return f"expected this run's {what}, {expected}, found {found}; start its worker with them"
    return ""


class Remote:
    """The controller's end of an agent."""

    def __init__(self, address: str, mesh: HostMesh, agent: Any, facts: HostFacts, detect_seconds: float) -> None:
        self._address, self._agent, self._detect_seconds = address, agent, detect_seconds
        self._loop = asyncio.get_running_loop()
        self._shims: defaultdict[int, deaths.Shim] = defaultdict(lambda: deaths.Shim(kill=self._kill))
        self._kills: set[asyncio.Task[None]] = set()
        self.lost = asyncio.Event()
        self.host = Host(mesh, address, facts.parent, facts, self.lost.is_set)
        self._following = asyncio.create_task(self._follow())

    async def _follow(self) -> None:
        while (news := await self._next()) is not None:
            for connection, line in news:
                if not self._shims[connection].hear(line):
                    del self._shims[connection]
        self.lost.set()
        for shim in list(self._shims.values()):
            if not shim.ended:
                shim.end(f"is gone: its host {self._address} does not answer")

    async def _next(self) -> list[tuple[int, bytes]] | None:
        """Wait for the agent's answer. None: the host is lost. One that is only slow still takes a connection, because
        its kernel does."""
        quarter = self._detect_seconds / 4
        answer = asyncio.ensure_future(self._agent.take.call_one(quarter).as_asyncio())
        began, patience = time.monotonic(), 2 * quarter
        while not (await asyncio.wait({answer}, timeout=patience))[0]:
            reached = await asyncio.to_thread(takes_connections, self._address, quarter)
            if not reached or time.monotonic() - began > SILENT_SECONDS:
                answer.cancel()
                return None
        try:
            return answer.result()
        except Exception:  # the agent has ended
            return None

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
