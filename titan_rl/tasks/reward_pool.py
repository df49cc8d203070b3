"""Judges answers in processes: as many at a time as there are workers, each killed at its deadline.

    verdicts(prompt, rollouts) ── rows ──> a queue ── chunks ──> RewardProcess ── a verdict per row ──>

A worker takes one row at a time, or a chunk of one or more groups if rows are fast, or the whole group if a function
judges it at once. The row during which its process is killed, or dies, is the culprit: it alone is tried again or
fails, and the others of its chunk return to the queue. Processes are started when they are needed: a fast reward has
one. concurrent.futures would not do: one worker that dies breaks its whole pool, and none can be killed.
"""

import asyncio
import math
import multiprocessing
import os
import re
import signal
import subprocess
import sys
import sysconfig
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from queue import SimpleQueue
from typing import Any, NamedTuple, TypeVar

from titan_rl.isolation import start_outside
from titan_rl.tasks.reward_worker import Imported, ImportFailed, Judged
from titan_rl.tasks.rewards import Answered
from titan_rl.tasks.rubric import GRADER, JudgeRequest, RewardUnusable, Rubric
from titan_rl.wire.deadlines import LATE_SECONDS, deadline
from titan_rl.wire.types import Judgement, Prompt, Rollout

T = TypeVar("T")
Call = tuple[Future[Any], Callable[[], Any]]

CHUNK_SECONDS = 0.05
"""What a worker takes from the queue at a time, if its rows are fast."""
GROW_SECONDS = 0.1
"""How long rows wait before another process is started."""
LOOK_SECONDS = 0.25
"""Between two looks at the deadlines and the memory of the workers."""
IMPORT_SECONDS = 300.0
"""Until a rubric must be imported."""
GRACE_SECONDS = 5.0
"""Added to the deadline of functions that are called together and have deadlines themselves. Also until the supervisor
of a process that has hung up must have ended."""
STACK_SECONDS = 1.0
"""Until a process that is about to be killed must have written its stack."""
KILL_SECONDS = 10.0
"""Until a supervisor must have ended its worker and all that this started; then it is killed itself."""
IMPORTS = 3
"""Processes in a row that may fail to import a reward which another one has imported."""
PAGE, MIB = os.sysconf("SC_PAGE_SIZE"), 2**20
PROGRAM = "import sys; sys.path[:] = {path!r}; from titan_rl.tasks import reward_worker; reward_worker.main{given}"
"""The worker finds modules where this process does."""


class PoolLimits(NamedTuple):
    workers: int
    seconds: float | None  # of one call
    memory_mb: int = 0  # of one process; 0: no limit


@dataclass(slots=True, eq=False)
class OpenGroup:
    """The rows of one group that have no verdict yet."""

    rubric: Rubric
    prompt: Prompt
    answers: Sequence[Answered]
    attempts: int
    left: deque[int]  # rows that no worker has
    done: asyncio.Future[None]
    verdicts: dict[int, Judgement] = field(default_factory=dict)
    failures: Counter[int] = field(default_factory=Counter)  # by row
    ungraded: set[int] = field(default_factory=set)

    def settle(self, row: int, verdict: Judgement) -> None:
        """Keep a verdict, or have the row judged again if it failed and has another attempt."""
        if row in self.ungraded and not verdict.error:
            verdict = Judgement(verdict.reward, verdict.parts, "the grader: its process was killed or died")
        if math.isnan(verdict.reward):
            self.failures[row] += 1
            if self.failures[row] < self.attempts:
                self.left.append(row)
                return
        self.verdicts[row] = verdict
        if len(self.verdicts) == len(self.answers) and not self.done.done():
            self.done.set_result(None)

    def request(self, rows: Sequence[int], at_once: bool, seconds: float | None) -> JudgeRequest:
        answers = self.answers if at_once else [self.answers[row] for row in rows]
        asked = rows if at_once else range(len(rows))
        ungraded = [k for k, row in zip(asked, rows, strict=True) if row in self.ungraded]
        return JudgeRequest(self.rubric, self.prompt, answers, [*asked], ungraded, seconds)


class RewardPool:
    def __init__(self, limits: PoolLimits) -> None:
        self._limits = limits
        self._queue: deque[OpenGroup] = deque()  # with rows left
        self._more = asyncio.Event()
        self._runners: set[asyncio.Task[None]] = set()
        self._busy: set[RewardProcess] = set()
        self._imported: set[Rubric] = set()  # by some process
        self._failed_imports: Counter[Rubric] = Counter()  # in a row
        self._unusable: RewardUnusable | None = None
        self._pace: dict[Rubric, float] = {}  # seconds per row, a running mean
        self._timer: asyncio.TimerHandle | None = None
        self._watch: asyncio.Task[None] | None = None
        self._numbers = 0

    async def verdicts(
        self, rubric: Rubric, prompt: Prompt, rollouts: Sequence[Rollout], attempts: int = 1
    ) -> list[Judgement]:
        """Return a verdict for each rollout. A row that fails is tried `attempts` times. Raise RewardUnusable if the
        reward cannot be imported."""
        if self._unusable is not None:
            raise self._unusable
        answers = [answer_of(rollout) for rollout in rollouts]
        done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        group = OpenGroup(rubric, prompt, answers, attempts, deque(range(len(answers))), done)
        if not self._runners:
            self._start_runner()
        self._watch = self._watch or asyncio.create_task(self._look())
        self._requeue([group])
        try:
            await done
        finally:
            group.left.clear()
        return [group.verdicts[row] for row in range(len(answers))]

    async def close(self) -> None:
        """Kill every process."""
        if self._timer is not None:
            self._timer.cancel()
        tasks = [*self._runners, *filter(None, [self._watch])]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._runners.clear()
        self._queue.clear()

    # -- how many processes, and until when -----------------------------------------------------------------------

    def _start_runner(self) -> None:
        self._numbers += 1
        task = asyncio.create_task(self._serve(self._numbers))
        self._runners.add(task)
        task.add_done_callback(self._ended)

    def _ended(self, task: "asyncio.Task[None]") -> None:
        self._runners.discard(task)
        error = None if task.cancelled() else task.exception()
        for group in self._queue if error else ():  # a bug here must not leave a run waiting
            if not group.done.done():
                group.done.set_exception(error or RuntimeError())

    def _grow_later(self) -> None:
        if self._timer is None and len(self._runners) < self._limits.workers:
            self._timer = asyncio.get_running_loop().call_later(GROW_SECONDS, self._grow)

    def _grow(self) -> None:
        """Start the processes that the rows which still wait would keep busy."""
        self._timer = None
        waiting = [group for group in self._queue if group.left]
        if not waiting:
            return
        if self._imported:
            seconds = sum(len(group.left) * self._pace.get(group.rubric, 1.0) for group in waiting)
            wanted = min(sum(len(group.left) for group in waiting), math.ceil(seconds / GROW_SECONDS))
            for _ in range(min(wanted, self._limits.workers - len(self._runners))):
                self._start_runner()
        self._grow_later()

    async def _look(self) -> None:
        """Settle received verdicts, and kill processes that are late or too large."""
        while True:
            due = time.monotonic() + LOOK_SECONDS
            await asyncio.sleep(LOOK_SECONDS)
            stopped = time.monotonic() - due
            for process in list(self._busy):
                self._settle(process)
                process.look(self._limits.memory_mb, stopped if stopped > LATE_SECONDS else 0.0)

    # -- one worker -----------------------------------------------------------------------------------------------

    async def _serve(self, number: int) -> None:
        """Judge what is in the queue, with one process at a time."""
        process = RewardProcess(number)
        try:
            while True:
                group = await self._next_group()
                self._busy.add(process)
                if not await self._judge_some(process, group) or process.swollen(self._limits.memory_mb):
                    self._busy.discard(process)
                    await process.end()
                    process = RewardProcess(number)
                self._busy.discard(process)
        finally:
            self._busy.discard(process)
            await process.end()

    async def _next_group(self) -> OpenGroup:
        while True:
            while self._queue and not self._queue[0].left:
                self._queue.popleft()
            if self._queue:
                return self._queue[0]
            self._more.clear()
            await self._more.wait()

    async def _judge_some(self, process: "RewardProcess", group: OpenGroup) -> bool:
        """Have the process judge rows of the group. Return whether it lives."""
        try:
            at_once = await process.imported(group.rubric)
        except OSError as error:
            for row in [group.left.popleft() for _ in range(len(group.left))]:
                group.settle(row, Judgement(math.nan, error=f"no reward process can be started: {error}"))
            self._requeue([group])
            return False
        except (ValueError, RewardProcessLost) as error:
            self._failed_imports[group.rubric] += 1
            if group.rubric not in self._imported or self._failed_imports[group.rubric] >= IMPORTS:
                self._unusable = RewardUnusable(group.rubric, str(error))
                raise self._unusable from None
            return False
        self._imported.add(group.rubric)
        self._failed_imports[group.rubric] = 0
        if not (taken := self._take(group, everything=at_once)):
            return True
        process.rows.extend((own, row) for own, rows in taken for row in rows)
        try:
            await process.judge([own.request(rows, at_once, self._limits.seconds) for own, rows in taken])
        except RewardProcessLost as lost:
            self._settle(process)
            self._blame(process.rows, lost, at_once)
            return False
        self._settle(process)
        return True

    def _settle(self, process: "RewardProcess") -> None:
        """Settle the rows that the process has sent the verdicts about, in order."""
        while process.judged:
            verdict, seconds = process.judged.popleft()
            group, row = process.rows.popleft()
            self._pace[group.rubric] = 0.8 * self._pace.get(group.rubric, seconds) + 0.2 * seconds
            group.settle(row, verdict)
            self._requeue([group])

    def _blame(self, rows: deque[tuple[OpenGroup, int]], lost: "RewardProcessLost", at_once: bool) -> None:
        """Settle the rows that have no verdict because a process was lost: all of them, if it judged them together, or
        else the first. If the grader is to blame, they are judged again without it."""
        groups = dict.fromkeys(group for group, _ in rows)
        for group, row in list(rows) if at_once and lost.at else [rows[0]]:
            if lost.at == GRADER:
                group.ungraded.add(row)
            else:
                rows.remove((group, row))
                group.settle(row, Judgement(math.nan, error=str(lost), hung=lost.hung))
        for group, row in reversed(rows):
            group.left.appendleft(row)
        self._requeue(groups)

    def _requeue(self, groups: "Sequence[OpenGroup] | dict[OpenGroup, None]") -> None:
        for group in groups:
            if group.left and not group.done.done():
                if group not in self._queue:
                    self._queue.append(group)
                self._more.set()
                self._grow_later()

    def _take(self, group: OpenGroup, *, everything: bool) -> list[tuple[OpenGroup, list[int]]]:
        """Take what a worker judges next: all rows of a group, or some of it, and of later ones while rows are fast."""
        pace = self._pace.get(group.rubric)
        most = len(group.left) if everything else max(1, int(CHUNK_SECONDS / pace)) if pace else 1
        taken = list[tuple[OpenGroup, list[int]]]()
        for own in [group] if everything else chain([group], self._queue):
            if own.left and most > 0 and own.rubric == group.rubric:
                rows = [own.left.popleft() for _ in range(min(most, len(own.left)))]
                most -= len(rows)
                taken.append((own, rows))
        return taken


class RewardProcessLost(Exception):
    """The process ended, or was killed because it was late or too large. `at`: what it was doing."""

    def __init__(self, reason: str, *, at: str = "", hung: bool = False) -> None:
        super().__init__(reason)
        self.at, self.hung = at, hung


class RewardProcess:
    """A worker, started by the first rubric to import, and the thread that it is asked from. That thread lives as long
    as the process, because the kernel kills a child whose parent thread ends. The child uses the host's network."""

    def __init__(self, number: int) -> None:
        self.rows = deque[tuple[OpenGroup, int]]()  # that it judges now
        self.judged = deque[Judged]()  # verdicts about the first of them
        self._name, self._thread = f"reward{number}", SideThread()
        self._connection, self._theirs = multiprocessing.Pipe()
        self._stack = os.memfd_create("stack")
        self._process: subprocess.Popen[bytes] | None = None
        self._pid = self._resting = 0  # of the worker; bytes of its memory after the last import
        self._at_once: dict[Rubric, bool] = {}  # per imported rubric
        self._at = self._doing = ""  # a call with another deadline; what else it does
        self._seconds, self._due, self._stack_due = 0.0, math.inf, math.inf
        self._kill_reason, self._hung = "", False  # why it was killed, if it was

    async def imported(self, rubric: Rubric) -> bool:
        """Import a rubric unless it is. Return True if it judges answers together. Raise ValueError if it cannot be,
        OSError if no process can be started."""
        if rubric not in self._at_once:
            self._at_once[rubric] = await self._thread.run(lambda: self._import(rubric), None)
        return self._at_once[rubric]

    async def judge(self, requests: Sequence[JudgeRequest]) -> None:
        """Have answers judged: `judged` gets a verdict about each, in order. Raise RewardProcessLost if the process
        ends before the last one. The requests have the same rubric and deadline."""
        await self._thread.run(lambda: self._judge(requests), None)

    async def end(self) -> None:
        """End the process. A call that waits for it ends before."""
        self._kill()
        await asyncio.shield(self._thread.run(self._end, None))
        self._thread.end()

    @property
    def memory(self) -> int:
        """Return the bytes of memory that the worker has; 0 if it has ended."""
        with suppress(OSError, ValueError, IndexError):
            return int(Path(f"/proc/{self._pid or -1}/statm").read_text().split()[1]) * PAGE
        return 0

    def swollen(self, memory_mb: int) -> bool:
        """Return True if it leaks: it is replaced between two calls, before one of them is to blame."""
        return bool(memory_mb) and self.memory > max(memory_mb * MIB // 2, 2 * self._resting)

    def look(self, memory_mb: int, stopped: float) -> None:
        """Kill the worker if it is too large or late. `stopped`: seconds for which this process has just stood still.
        A late one writes its stack first."""
        now, self._due = time.monotonic(), self._due + stopped
        if 0 < memory_mb < (found := self.memory // MIB):
            self._kill_reason = (
                f"the reward function's process had {found:,} MiB of memory, more than task.reward_memory_mb = "
                f"{memory_mb:,}, and is killed"
            )
            self._kill()
        elif now < self._due:
            self._stack_due = math.inf
        elif self._stack_due == math.inf:
            self._stack_due = now + STACK_SECONDS
            os.ftruncate(self._stack, 0)
            if self._process is not None:
                self._process.send_signal(signal.SIGUSR2)
        elif (stack := os.pread(self._stack, 2**16, 0).decode(errors="replace")).endswith(
            "\n"
        ) or now > self._stack_due:
            late = f"{self._at or self._doing} did not return within {self._seconds:g} s{place_in(stack)}"
            self._kill_reason, self._hung = f"{late} (task.reward_seconds); its process is killed", True
            self._kill()

    def _kill(self) -> None:
        if self._process is not None:
            self._process.terminate()  # the supervisor kills the worker and all that this started

    # -- on the thread --------------------------------------------------------------------------------------------

    def _import(self, rubric: Rubric) -> bool:
        if self._process is None:
            with self._theirs:
                given = (os.getpid(), self._theirs.fileno(), self._stack)
                self._process = subprocess.Popen(
                    [sys.executable, "-P", "-c", PROGRAM.format(path=sys.path, given=given)],
                    stdin=subprocess.DEVNULL,
                    pass_fds=given[1:],
                    start_new_session=True,
                    env={**os.environ, "TITAN_RL_PROC": self._name},
                )
        self._ask([JudgeRequest(rubric)])
        found = self._next("", "importing the reward", IMPORT_SECONDS)
        if isinstance(found, ImportFailed):
            raise ValueError(found.error)
        assert isinstance(found, Imported)
        self._pid = found.pid
        self._resting = self.memory
        return found.at_once

    def _judge(self, requests: Sequence[JudgeRequest]) -> None:
        self._ask(requests)
        names, seconds = requests[0].rubric.names, requests[0].seconds or math.inf
        doing = names[0] if len(names) == 1 else "the reward function"
        for _ in range(sum(len(request.rows) for request in requests)):
            found = self._next("", doing, seconds)
            while isinstance(found, str):
                found = self._next(found, doing, seconds + GRACE_SECONDS)
            self.judged.append(found)

    def _ask(self, requests: Sequence[JudgeRequest]) -> None:
        with suppress(OSError):  # it has ended, as the next answer says
            self._connection.send(requests)

    def _next(self, at: str, doing: str, seconds: float) -> Any:
        """Return the worker's next message. Raise RewardProcessLost if it has ended."""
        self._at, self._doing, self._seconds, self._due = at, doing, seconds, time.monotonic() + seconds
        try:
            return self._connection.recv()
        except (EOFError, OSError):
            raise RewardProcessLost(self._kill_reason or self._death(), at=at, hung=self._hung) from None
        except Exception:
            raise RewardProcessLost("the reward process sent what is no answer") from None
        finally:
            self._due = math.inf

    def _death(self) -> str:
        """Return how the process ended, or that it did not but hung up."""
        assert self._process is not None
        with suppress(subprocess.TimeoutExpired):
            code = self._process.wait(GRACE_SECONDS)
            how = f"was killed by signal {-code}" if code < 0 else f"ended with exit code {code}"
            return f"the reward function's process {how}"
        return "the reward function closed its process's connection"

    def _end(self) -> None:
        self._kill()  # also one that was being started
        if self._process is not None:
            try:
                self._process.wait(KILL_SECONDS)
            except subprocess.TimeoutExpired:  # the supervisor was stopped
                self._process.kill()
                self._process.wait()
        self._connection.close()
        self._theirs.close()
        with suppress(OSError):
            os.close(self._stack)


def place_in(stack: str) -> str:
    """Return the innermost line of the user's code in a stack that faulthandler wrote."""
    ours = (str(Path(__file__).parents[1]), sysconfig.get_paths()["stdlib"], "<")
    for file, line in re.findall(r'File "(.*)", line (\d+)', stack):
        if not file.startswith(ours):
            return f" at {file}:{line}"
    return ""


def answer_of(rollout: Rollout) -> Answered:
    turns = rollout.turns
    completion = turns[-1].completion if turns else None
    versions = completion.versions if completion else ()
    return Answered(rollout.text, completion.tokens if completion else (), max(versions, default=0), rollout.messages)


class RewardHung(TimeoutError):
    """A reward function did not return within its deadline."""


class SideThread:
    """Calls functions one at a time on a thread, so that they need not be thread-safe and the event loop continues.

    A function that outlasts its deadline is abandoned with its thread, and the next call gets a new one; no thread
    delays the end of the process, as one of concurrent.futures does. A function that never releases the interpreter's
    lock (such as one long regular expression) blocks the process anyway."""

    def __init__(self) -> None:
        self._free = asyncio.Lock()  # first come, first served: results arrive in the order of the calls
        self._calls: SimpleQueue[Call | None] | None = None

    async def run(self, function: Callable[[], T], seconds: float | None) -> T:
        async with self._free:
            if self._calls is None:
                self._calls = SimpleQueue()
                start_outside(threading.Thread(target=_serve, args=(self._calls,), name="reward", daemon=True))
            found = Future[T]()
            self._calls.put((found, function))
            answer = asyncio.wrap_future(found)
            try:
                async with deadline(seconds):
                    await asyncio.wait([answer])
            except TimeoutError:
                self.end()
                raise RewardHung(
                    f"the reward function did not return within {seconds:g} s (rollout.timeout_seconds)"
                ) from None
            finally:
                answer.cancel()
            return answer.result()

    def end(self) -> None:
        """Let the thread end when its call does, if ever. Another call starts another thread."""
        if self._calls is not None:
            self._calls.put(None)
            self._calls = None


def _serve(calls: "SimpleQueue[Call | None]") -> None:
    while (call := calls.get()) is not None:
        found, function = call
        if found.set_running_or_notify_cancel():
            try:
                found.set_result(function())
            except StopIteration:  # no future can hold it
                found.set_exception(RuntimeError("coroutine raised StopIteration"))
            except Exception as error:
                found.set_exception(error)
            except BaseException as error:  # a sys.exit in user code must end only this call
                found.set_exception(RuntimeError(repr(error)))
