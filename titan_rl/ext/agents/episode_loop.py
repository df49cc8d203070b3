"""Runs rollouts on a separate event loop and thread, so that user code never blocks the process's own loop.

begin, answer, cancel ──> the user's loop: one task per rollout; plain functions on threads
take_news, look       <── Ask | Ended; where the loop stands if it is blocked
"""

import asyncio
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from titan_rl.ext.agents.agent_session import AgentSession
from titan_rl.ext.agents.conversation import Delta, Renderer
from titan_rl.ext.agents.endpoint_seats import EndpointPolicy
from titan_rl.ext.agents.environment_calls import load_agent, load_user_environment
from titan_rl.ext.agents.episode_news import PROMPT, Answer, Ask, Begin, Blocked, Dropped, Ended, News
from titan_rl.ext.agents.episodes import EpisodeOver, Limits
from titan_rl.ext.agents.external_python import ExternalPython
from titan_rl.ext.agents.games import GAMES
from titan_rl.ext.agents.play import Bounded, Policy, Sampled, play, roll_out, scored
from titan_rl.ext.agents.players import Seats, outcome_of_players, play_in_turn
from titan_rl.tasks.user_code import (
    Threads,
    asynchronous,
    error_place,
    task_place,
    thread_place,
    threads,
)
from titan_rl.text.template import Message
from titan_rl.wire.sessions import Outcome
from titan_rl.wire.spans import Recorded, Recorder

if TYPE_CHECKING:
    from titan_rl.ext.agents.openai_endpoint import OpenAIEndpoint

KEY, AGENT_KEY = "environment.name", "task.agent"
SPANS_SECONDS = 0.5  # for the loop to give its spans
SHOWN_NANOSECONDS = 1_000_000  # shorter calls are not in the timeline
GRACE_SECONDS = 5.0  # for a cancelled rollout to end


@dataclass(frozen=True, slots=True)
class LoopSettings:
    name: str  # environment.name or task.agent
    concurrency: int
    limits: Limits
    agent: bool = False  # it reaches the policy through the endpoint
    python: str = ""  # environment.python
    args: Mapping[str, Any] = field(default_factory=dict)  # environment.args
    context: int = 0  # the most tokens of a prompt and its answer, for agents; 0: unknown
    seats: Seats = field(default_factory=Seats)


def load_environment(name: str, args: Mapping[str, Any] | None = None, seats: Sequence[str] = ()) -> Callable[..., Any]:
    """Return a maker of environments: a built-in one, one of a package, or the user's "module:name"."""
    return GAMES[name].environment if name in GAMES else load_user_environment(name, args or {}, KEY, seats)


class Late(Exception):
    """A call into the user's code has passed its deadline. The text is the place where it was."""


class Asking:
    """A rollout's way to the policy."""

    def __init__(self, id: int, report: Callable[[News], None]) -> None:
        self._id, self._report = id, report
        self._waiting: dict[int, asyncio.Future[Answer]] = {}
        self._next, self._last = 0, dict[str, int]()  # the last turn of each player that was answered
        self._since = 0.0
        self.seconds = 0.0  # in which a turn or several were sampled
        self.given_up = False  # asks are cancelled
        self.rollout: asyncio.Task[None] | None = None

    async def ask(
        self,
        delta: Delta,
        most: int | None,
        *,
        after: int | None = None,
        logprobs: bool = False,
        seat: str = "",
    ) -> Sampled:
        """Ask for a turn after the turn `after`: None is the player's last one that was answered."""
        if self.given_up:
            raise asyncio.CancelledError
        turn, self._next = self._next, self._next + 1
        if not self._waiting:
            self._since = time.monotonic()
        waiting = self._waiting[turn] = asyncio.get_running_loop().create_future()
        after = self._last.get(seat, PROMPT) if after is None else after
        self._report(Ask(self._id, delta.kept, delta.new, most, turn, after, logprobs, seat, delta.images))
        try:
            answer = await waiting
        except asyncio.CancelledError:
            if self.rollout is None or not self.rollout.cancelling():  # else the whole rollout ends
                self._report(Dropped(self._id, turn))
            raise
        finally:
            del self._waiting[turn]
            if not self._waiting:
                self.seconds += time.monotonic() - self._since
        if answer.over is not None:
            raise EpisodeOver(answer.over)
        self._last[seat] = turn
        return Sampled(answer.tokens, answer.finish, turn, answer.logprobs)

    def resolve(self, answer: Answer) -> None:
        waiting = self._waiting.get(answer.turn)
        if waiting is not None and not waiting.done():
            waiting.set_result(answer)


class EpisodeLoop:
    def __init__(self, settings: LoopSettings, renderer: Renderer, notify: Callable[[], None]) -> None:
        """`notify` is called, on any thread, when there is news."""
        self._settings, self._limits, self._renderer = settings, settings.limits, renderer
        self._notify = notify
        self._news: deque[News] = deque()
        self._fresh: list[News] = []  # not published yet: players that move together ask in one message
        self._tasks: dict[int, asyncio.Task[None]] = {}
        self._asking: dict[int, Asking] = {}
        self._threads = Threads(settings.concurrency)
        self._spans = Recorder()
        self._swallowed: set[int] = set()  # rollouts that continued after their cancellation
        self._asked_at: float | None = None  # when a callback was queued that the loop has not called yet
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._serve, name="user code", daemon=True)
        self._thread.start()
        self._servers = {each.seat: each.server() for each in settings.seats.endpoints}
        self._external: ExternalPython | None = None
        self._endpoint: OpenAIEndpoint | None = None
        try:
            self._make = self._loaded()
        except BaseException:
            self.close()
            raise
        self._endpoint = self._open_endpoint() if settings.agent else None

    @property
    def running(self) -> int:
        return len(self._tasks)

    @property
    def stuck(self) -> int:
        """Number of rollouts that have ended, but whose code still runs, and has for a while: a function that is
        cancelled in mid-call may return soon."""
        own = self._threads.stuck(min(GRACE_SECONDS, self._limits.turn_seconds)) + len(self._swallowed)
        return own + (self._external.report.stuck if self._external is not None else 0)

    def begin(self, begins: Sequence[Begin]) -> None:
        self._soon(lambda: [self._begin(each) for each in begins])

    def answer(self, answers: Sequence[Answer]) -> None:
        self._soon(lambda: [self._resolve(each) for each in answers])

    def cancel(self, ids: Sequence[int]) -> None:
        """End rollouts without news of their end."""
        self._soon(lambda: [self._tasks[id].cancel() for id in ids if id in self._tasks])

    def take_news(self) -> list[News]:
        return [self._news.popleft() for _ in range(len(self._news))]

    async def take_spans(self) -> Recorded:
        """Return the calls into the environment since the last take; nothing while the loop is blocked."""

        async def taken() -> Recorded:  # on the loop that records them
            return self._spans.take()

        taking = asyncio.wrap_future(asyncio.run_coroutine_threadsafe(taken(), self._loop))
        with suppress(TimeoutError):
            return await asyncio.wait_for(taking, SPANS_SECONDS)
        return Recorded([])

    def look(self) -> Blocked | None:
        """Return the rollout that blocks this loop, or the loop of environment.python, if it has not moved for
        turn_seconds. Call it repeatedly."""
        if self._external is not None:
            report, dead = self._external.report, self._external.dead
            if dead or report.blocked >= self._limits.turn_seconds:
                return Blocked(report.of, report.blocked, report.place, dead)
        queued_at, now = self._asked_at, time.monotonic()
        if queued_at is None:
            self._asked_at = now
            self._soon(self._beat)
        elif now - queued_at >= self._limits.turn_seconds:
            task = asyncio.current_task(self._loop)
            id = int(task.get_name()) if task is not None and task.get_name().isdecimal() else None
            return Blocked(id, now - queued_at, thread_place(self._thread.ident or 0))
        return None

    def close(self, seconds: float = 0.0) -> None:
        """Cancel every rollout, and end the loop. Wait at most `seconds` for it: the end of the interpreter destroys
        pending tasks."""
        self._threads.close()
        self._soon(lambda: self._loop.create_task(self._end()))
        self._thread.join(seconds)

    def _serve(self) -> None:
        self._loop.run_forever()
        self._loop.close()

    def _loaded(self) -> Callable[..., Any]:
        """Load the environment or the agent, in this Python or in environment.python."""
        settings = self._settings
        if settings.python:
            key = AGENT_KEY if settings.agent else KEY
            start = ExternalPython.start(
                settings.python,
                settings.name,
                key=key,
                args=settings.args,
                agent=settings.agent,
                concurrency=settings.concurrency,
                seats=settings.seats.names,
            )
            self._external = asyncio.run_coroutine_threadsafe(start, self._loop).result()
            return self._external.run if settings.agent else self._external.make
        if settings.agent:
            return load_agent(settings.name, settings.args, AGENT_KEY, settings.seats.names)
        return load_environment(settings.name, settings.args, settings.seats.names)

    def _open_endpoint(self) -> "OpenAIEndpoint":
        from titan_rl.ext.agents.openai_endpoint import OpenAIEndpoint  # imports aiohttp: 0.3 s

        endpoint = OpenAIEndpoint(context=self._settings.context)
        asyncio.run_coroutine_threadsafe(endpoint.listen(), self._loop).result()
        return endpoint

    async def _end(self) -> None:
        rollouts = list(self._tasks.values())
        for task in rollouts:
            task.cancel()
        if self._external is not None and (self._external.dead or self._external.report.blocked):
            await self._external.close()  # its environments cannot be closed
        if rollouts:
            await asyncio.wait(rollouts, timeout=GRACE_SECONDS)
        if self._endpoint is not None:
            await self._endpoint.close()
        for server in self._servers.values():
            await server.close()
        if self._external is not None:
            await self._external.close()
            if pending := [task for task in rollouts if not task.done()]:  # they waited for environment.python
                await asyncio.wait(pending, timeout=GRACE_SECONDS)
        self._loop.stop()

    def _soon(self, function: Callable[[], Any]) -> None:
        with suppress(RuntimeError):  # it has ended
            self._loop.call_soon_threadsafe(function)

    def _beat(self) -> None:
        self._asked_at = None

    def _report(self, news: News) -> None:
        if not self._fresh:
            self._loop.call_soon(self._publish)
        self._fresh.append(news)

    def _publish(self) -> None:
        self._news.extend(self._fresh)
        self._fresh.clear()
        self._notify()

    def _begin(self, begin: Begin) -> None:
        asking = self._asking[begin.id] = Asking(begin.id, self._report)
        task = asking.rollout = self._loop.create_task(self._run(begin), name=str(begin.id))
        self._tasks[begin.id] = task
        overdue = self._loop.call_later(self._limits.rollout_seconds + GRACE_SECONDS, self._overdue, begin.id)

        def ended(_: object) -> None:
            overdue.cancel()
            self._swallowed.discard(begin.id)
            self._tasks.pop(begin.id, None)
            self._asking.pop(begin.id, None)

        task.add_done_callback(ended)

    def _overdue(self, id: int) -> None:
        """Give a rollout up that did not end when it was cancelled."""
        if (task := self._tasks.get(id)) is not None:
            self._swallowed.add(id)
            self._asking[id].given_up = True
            self._report(Ended(id, Outcome("timeout", error=f"it caught its cancellation: {task_place(task)}")))

    def _resolve(self, answer: Answer) -> None:
        if (asking := self._asking.get(answer.id)) is not None:
            asking.resolve(answer)

    async def _run(self, begin: Begin) -> None:
        threads.set(self._threads)
        task, whole = asyncio.current_task(), asyncio.timeout(self._limits.rollout_seconds)
        assert task is not None
        try:
            async with whole:
                outcome = await self._play(begin)
        except asyncio.CancelledError:
            if task.cancelling():
                return
            outcome = Outcome("error", error="CancelledError, raised by the environment")
        except Late as error:
            outcome = Outcome("timeout", error=str(error))
        except BaseException as error:  # also a sys.exit: it ends this rollout, not the process
            if whole.expired() and isinstance(error, TimeoutError):
                outcome = Outcome("timeout", error=f"rollout_seconds: {_late_place(error)}")
            else:
                outcome = Outcome("error", error=f"{type(error).__name__}: {error} ({error_place(error)})")
        if begin.id not in self._swallowed:
            self._report(Ended(begin.id, outcome))

    async def _play(self, begin: Begin) -> Outcome:
        began, asking = time.monotonic(), self._asking[begin.id]

        async def bounded(call: Any) -> Any:
            limit, called = asyncio.timeout(self._limits.turn_seconds), self._spans.now()
            try:
                async with limit:
                    return await call
            except TimeoutError as error:
                if not limit.expired():
                    raise
                raise Late(f"turn_seconds: {_late_place(error)}") from error
            finally:
                if self._spans.now() - called >= SHOWN_NANOSECONDS:
                    self._spans.since(called, "call", lane="environment", id=begin.id, prompt=begin.prompt.id)

        name, seats = self._settings.name, self._settings.seats
        policy = Policy(begin.prompt, self._renderer, self._limits, asking.ask)
        if self._endpoint is not None:
            sessions = {
                seat: AgentSession(begin.prompt, self._renderer, self._limits, partial(asking.ask, seat=seat))
                for seat in seats.names or ("",)
            }
            outcome = await self._endpoint.run_agent(
                self._make, name, str(begin.id), sessions, begin.prompt, begin.seed, seats
            )
        elif seats.names:
            outcome = await self._play_seats(begin, asking, bounded)
        elif self._external is None and not isinstance(self._make, type) and asynchronous(self._make):
            result, status = await roll_out(self._make, name, {"policy": policy}, begin.prompt, begin.seed)
            whole = isinstance(result, Outcome)
            outcome = result if whole else scored(result, status, policy.turns, policy.messages, name)
        else:
            outcome = await play(self._make, name, policy, begin.prompt, begin.seed, bounded, self._settings.args)
        seconds = time.monotonic() - began - asking.seconds
        return replace(outcome, metrics={**outcome.metrics, "seconds": seconds})

    async def _play_seats(self, begin: Begin, asking: Asking, bounded: Bounded) -> Outcome:
        """Play an episode of several players."""
        settings, prompt, seats = self._settings, begin.prompt, self._settings.seats
        messages: list[Message] = [*prompt.messages]

        def note(seat: str) -> Callable[[Message], None]:
            return lambda message: messages.append({**message, "name": seat})

        asked = {
            each.seat: EndpointPolicy(
                each,
                self._servers[each.seat],
                prompt,
                self._limits,
                begin.seed,
                bounded,
                note(each.seat),
            )
            for each in seats.endpoints
        }
        policies = {
            seat: asked.get(seat)
            or Policy(prompt, self._renderer, self._limits, partial(asking.ask, seat=seat), note(seat))
            for seat in seats.names
        }
        if self._external is None and not isinstance(self._make, type) and asynchronous(self._make):
            result, status = await roll_out(self._make, settings.name, {"policies": policies}, prompt, begin.seed)
        else:
            result, status = await play_in_turn(
                self._make, settings.name, policies, prompt, begin.seed, bounded, settings.args
            )
        for policy in asked.values():  # the user's code may have caught it
            if policy.failure is not None:
                raise policy.failure
        moved = [seat for seat, policy in policies.items() if policy.turns]
        return outcome_of_players(result, status, moved, seats, messages, settings.name)


def _late_place(error: BaseException) -> str:
    """Return where the code was when its deadline passed."""
    cancelled = error.__cause__ or error.__context__ or error  # Python before 3.11.3 sets no cause
    notes = getattr(cancelled, "__notes__", ())
    return notes[0] if notes else error_place(cancelled)
