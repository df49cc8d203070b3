"""A host whose worker was started elsewhere: joined at its address, then watched through its agent.

controller ── look up, attach ──> worker ──> HostAgent (host_agent.py)
           <── take: reports of the host's launchers; none for fault.detect_seconds: the host is lost
           ── look up ──> the worker of a lost host: once it serves at another port, the host joins again
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

from titan_rl.ext.hosts.host_agent import CHECKS, HostAgent, Refusal, own_versions
from titan_rl.ext.hosts.worker_address import (
    NotAWorker,
    address_of,
    look_up,
    refuses_connections,
    split_address,
    takes_connections,
    why_silent,
    why_untrusted,
)
from titan_rl.meshes import deaths
from titan_rl.meshes.faults import the_only
from titan_rl.meshes.hosts import Host, HostFacts
from titan_rl.wire.errors import RunError

LEAVE_SECONDS = 0.5
RETRY_SECONDS = 0.2  # between lookups of a worker that does not serve
CHECK_SECONDS = 1.0  # between checks that a worker still serves at the same port
KILLED_SECONDS = 1.0  # from SIGKILL to the end of a process
CLAIM_SECONDS = 2.0  # longest wait of one claim for a host that another run has
MAX_SILENT_SECONDS = 60.0  # limit of an agent's answer while its host takes connections


Joined = tuple[HostMesh, Any, HostFacts, str]  # with a host's agent, and the reason of a final refusal, or ""


@dataclass(frozen=True, slots=True)
class Joining:
    """How long a run waits for hosts, and hosts for the run."""

    join_seconds: float
    orphan_seconds: float
    detect_seconds: float
    tls: str = ""
    run: str = ""  # its name in messages of other runs


@asynccontextmanager
async def attached(
    addresses: Sequence[str],
    joining: Joining,
    say: Callable[[str], None] = lambda _: None,
    back: Callable[[], None] = lambda: None,
) -> AsyncIterator[list[Host]]:
    """Join the workers at these addresses, and leave them ready for the next run. A lost host that answers again
    returns to its place in the list; then `back` is called. `say` shows messages."""
    async with AsyncExitStack() as stack:
        joins = [asyncio.create_task(_joined(address, joining, say)) for address in addresses]
        results = await asyncio.gather(*joins, return_exceptions=True)
        remotes = [result for result in results if isinstance(result, Remote)]
        for remote in remotes:
            stack.push_async_callback(remote.leave)
        failures = [result for result in results if isinstance(result, BaseException)]
        for failure in failures:
            if not isinstance(failure, RunError):
                raise failure
        if failures:
            raise RunError(
                f"{len(failures)} of {len(addresses)} hosts did not join: {'; '.join(map(str, failures))}",
                "\n".join(failure.details for failure in failures if isinstance(failure, RunError) and failure.details),
            )
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
    """Join one worker, or raise the reason, which a plain connection to it reveals. `say` shows which run a busy host
    is waiting for."""
    served, refusals, began = "", list[Refusal](), time.monotonic()

    def on_refusal(refused: Refusal) -> None:
        if not refusals:
            say(_awaiting(address, refused, joining.join_seconds, time.monotonic() - began))
        refusals.append(refused)

    try:
        async with asyncio.timeout(joining.join_seconds):
            joined = None
            while joined is None:
                served = await _served(address)
                joined = await _while_served(address, served, _claimed(served, joining, on_refusal), joining.tls)
    except NotAWorker as error:
        raise RunError(f"{address} cannot be joined: {error}") from None
    except TimeoutError:
        reason = refusals[-1].why if refusals else await asyncio.to_thread(why_silent, served or address, joining.tls)
        raise RunError(
            f"{address} did not answer within hosts.join_seconds = {joining.join_seconds:g}: {reason}"
        ) from None
    except Exception as error:
        reason = await asyncio.to_thread(why_silent, served or address, joining.tls)
        raise RunError(f"{address} cannot be joined: {reason}", str(error)) from None
    mesh, agent, facts, refusal = joined
    if refusal:
        with suppress(Exception):  # it ends without an answer
            await asyncio.wait_for(agent.quit.call_one().as_asyncio(), LEAVE_SECONDS)
        raise RunError(f"{address}: {refusal}")
    return Remote(address, served, mesh, agent, facts, joining)


async def _claimed(served: str, joining: Joining, on_refusal: Callable[[Refusal], None]) -> Joined:
    """Start an agent at a worker and claim its host, if necessary until another run leaves it. Return the agent, and
    the reason if the host cannot be claimed."""
    mesh = attach_to_workers(ca="trust_all_connections", workers=[served], name="host")
    agents: Any = mesh.spawn_procs(per_host={"agent": 1}, name="agent")
    agent: Any = agents.spawn("agent", HostAgent, joining.orphan_seconds)
    facts: HostFacts = await agent.facts.call_one().as_asyncio()
    refusal, within = mismatch(facts), min(CLAIM_SECONDS, joining.orphan_seconds / 4)
    while not refusal and (refused := await agent.claim.call_one(joining.run, within).as_asyncio()) is not None:
        if refused.final:
            refusal = refused.why
        else:
            on_refusal(refused)
    return mesh, agent, facts, refusal


async def _while_served(address: str, served: str, claim: Coroutine[Any, Any, Joined], tls: str = "") -> Joined | None:
    """Return the result of a claim. None: the worker no longer serves at that port, as after a killed controller, so
    the claim may never be answered. A certificate of another CA is refused at once, because Monarch would be silent."""
    answer = asyncio.create_task(claim)
    try:
        while not (await asyncio.wait({answer}, timeout=CHECK_SECONDS))[0]:
            if await _served(address) != served:
                return None
            if tls and (why := await asyncio.to_thread(why_untrusted, served, tls)):
                raise NotAWorker(why)
            tls = ""  # it is checked once
        if answer.exception() is not None and await _served(address) != served:
            return None
        return answer.result()
    finally:
        answer.cancel()


def _awaiting(address: str, refused: Refusal, join_seconds: float, waited: float) -> str:
    """Return the message of a run that begins to wait for a busy host."""
    until = f"; its processes there end in about {refused.seconds:.0f} s" if refused.seconds else ""
    limit = f"at most {max(0.0, join_seconds - waited):.0f} s (hosts.join_seconds = {join_seconds:g})"
    return f"waiting for {address}, for {limit}: {refused.why}{until}"


async def _served(address: str) -> str:
    """Wait until a worker serves, and return where."""
    while True:
        try:
            if served := await asyncio.to_thread(look_up, address):
                return served
        except NotAWorker:
            raise
        except OSError:  # it may be started later than the run
            pass
        await asyncio.sleep(RETRY_SECONDS)


async def _rejoined(lost: "Remote", joining: Joining, say: Callable[[str], None]) -> "Remote":
    """Wait until the worker of a lost host serves at another port, and join it again."""
    refused, served = "", lost.served
    while True:
        await asyncio.sleep(joining.detect_seconds)
        with suppress(OSError):  # still unreachable
            served = await asyncio.to_thread(look_up, lost.address) or served
        if served in (lost.served, refused):
            continue
        lost.ended.set()
        try:
            return await _joined(lost.address, joining, say)
        except RunError as error:
            refused = served
            say(f"{error}; it stays out of this run")


def mismatch(facts: HostFacts) -> str:
    """Return how a worker differs from the run, or ""."""
    pairs = (("versions", own_versions(), facts.versions), ("current folder", os.getcwd(), facts.folder))
    for what, expected, found in pairs:
        if expected != found:
            return f"expected this run's {what}, {expected}, found {found}; start its worker with them"
    return ""


class Remote:
    """The controller's end of an agent."""

    def __init__(
        self, address: str, served: str, mesh: HostMesh, agent: Any, facts: HostFacts, joining: Joining
    ) -> None:
        self.address, self.served = address, served  # its worker, and the port that serves this run
        self._agent, self._detect_seconds, self._orphan_seconds = agent, joining.detect_seconds, joining.orphan_seconds
        scheme, host, _ = split_address(served)
        self._alive = address_of(scheme, host, facts.port)
        self._loop = asyncio.get_running_loop()
        self._launchers = defaultdict[int, deaths.Launcher](lambda: deaths.Launcher(kill=self._kill, host=address))
        self._kills: set[asyncio.Task[None]] = set()
        self._answered = time.monotonic()  # when the agent last answered
        self.lost, self.ended = asyncio.Event(), asyncio.Event()
        self.host = Host(mesh, address, facts.parent, facts, self.lost.is_set, self._silenced)
        self._following = asyncio.create_task(self._follow())

    async def _follow(self) -> None:
        while (news := await self._next()) is not None:
            self._answered = time.monotonic()
            for connection, line in news:
                if not self._launchers[connection].receive(line):
                    del self._launchers[connection]
        self.lost.set()
        how = f"{deaths.GONE}: its host {self.address} does not answer, for {time.monotonic() - self._answered:.2f} s"
        for launcher in list(self._launchers.values()):
            if not launcher.ended:
                launcher.end(how)
        deaths.host_lost(self.address, how)

    async def _next(self) -> list[tuple[int, bytes]] | None:
        """Wait for the agent's answer. None: the host or its agent is lost. A host that is only slow still takes a
        connection, because its kernel does. Monarch does not always fail a call to a killed agent."""
        quarter = self._detect_seconds / 4
        within = min(quarter, self._orphan_seconds / 4)
        answer = asyncio.ensure_future(self._agent.take.call(within).as_asyncio())
        began, patience = time.monotonic(), 2 * quarter
        asked = began
        while not (await asyncio.wait({answer}, timeout=patience))[0]:
            if time.monotonic() - asked > 2 * patience:  # this process was stopped, as in a suspended job
                began = time.monotonic()
            reached = await asyncio.to_thread(takes_connections, self.served, quarter)
            ended = reached and await asyncio.to_thread(refuses_connections, self._alive, quarter)
            if not reached or ended or time.monotonic() - began > MAX_SILENT_SECONDS:
                answer.cancel()
                return None
            asked = time.monotonic()
        try:
            return the_only(answer.result())
        except Exception:  # the agent has ended
            return None

    async def _silenced(self) -> None:
        """Return once no rank of this lost host can run. Its agent ends them when the last answer received here is
        hosts.orphan_seconds old. They have ended earlier if the worker serves at another port, or if the host's kernel
        refuses connections to this one."""
        latest = self._answered + self._orphan_seconds * (1 + 1 / CHECKS) + KILLED_SECONDS
        while not self.ended.is_set() and time.monotonic() < latest:
            if await asyncio.to_thread(refuses_connections, self.served, self._detect_seconds):
                self.ended.set()
            with suppress(TimeoutError):
                await asyncio.wait_for(self.ended.wait(), RETRY_SECONDS)

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
        """End the run's processes on this host. Its worker waits for the next run."""
        self._following.cancel()
        if not self.lost.is_set():
            with suppress(Exception):  # it ends without an answer
                await asyncio.wait_for(self._agent.end.call_one().as_asyncio(), LEAVE_SECONDS)
