"""Judges answers in up to task.reward_workers processes. A late one is killed at its deadline.

    verdicts(prompt, rollouts) ── rows ──> a queue ── chunks ──> RewardProcess ── a verdict per row ──>

A worker takes one row at a time, or a chunk of one or more groups if rows are fast, or the whole group if a function
judges it at once. The row during which its process is killed, or dies, is the culprit: it alone is tried again or
fails, and the others of its chunk return to the queue. Processes are started when they are needed: a fast reward has
one. concurrent.futures would not do: one worker that dies breaks its whole pool, and none can be killed.
"""

import asyncio
import math
from collections import Counter, deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import NamedTuple

from titan_rl.config.sections import TaskSection
from titan_rl.ext.reward_processes.reward_process import RewardProcess, RewardProcessLost
from titan_rl.tasks.rewards import Answered, answer_of
from titan_rl.tasks.rubric import GRADER, JudgeRequest, RewardUnusable, Rubric
from titan_rl.wire.cores import host_memory
from titan_rl.wire.types import Judgement, Prompt, Rollout

CHUNK_SECONDS = 0.05
"""Duration of the rows that a worker takes from the queue at a time, if they are fast."""
GROW_SECONDS = 0.1
"""How long rows wait before another process is started."""
LOOK_SECONDS = 0.25
"""Between two looks at the memory of the workers."""
IMPORTS = 3
"""Processes in a row that may fail to import a reward which another one has imported."""


class PoolLimits(NamedTuple):
    workers: int
    seconds: float | None  # deadline of one call
    memory_mb: int = 0  # most per process; 0: no limit


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
            verdict = replace(verdict, error="the grader: its process was killed or died")
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
        self._processes: set[RewardProcess] = set()
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
        if self._unusable is not None:
            raise self._unusable
        answers = [answer_of(rollout) for rollout in rollouts]
        done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        group = OpenGroup(rubric, prompt, answers, attempts, deque(range(len(answers))), done)
        if not self._runners:
            self._start_runner()
        self._watch = self._watch or asyncio.create_task(self._watch_memory())
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

    async def _watch_memory(self) -> None:
        while True:
            await asyncio.sleep(LOOK_SECONDS)
            for process in self._processes:
                process.kill_if_larger(self._limits.memory_mb)

    # -- one worker -----------------------------------------------------------------------------------------------

    async def _serve(self, number: int) -> None:
        """Judge rows of the queue, with one process at a time."""
        while True:
            group = await self._next_group()
            process = RewardProcess(number)
            self._processes.add(process)
            try:
                while await self._judge_some(process, group) and not process.swollen(self._limits.memory_mb):
                    group = await self._next_group()
            finally:
                self._processes.discard(process)
                await process.end()

    async def _next_group(self) -> OpenGroup:
        while True:
            while self._queue and not self._queue[0].left:
                self._queue.popleft()
            if self._queue:
                return self._queue[0]
            self._more.clear()
            await self._more.wait()

    async def _judge_some(self, process: RewardProcess, group: OpenGroup) -> bool:
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
        rows = deque((own, row) for own, rows in taken for row in rows)
        try:
            async for verdict, seconds in process.verdicts(
                [own.request(rows, at_once, self._limits.seconds) for own, rows in taken]
            ):
                own, row = rows.popleft()
                self._pace[own.rubric] = 0.8 * self._pace.get(own.rubric, seconds) + 0.2 * seconds
                own.settle(row, verdict)
                self._requeue([own])
        except RewardProcessLost as lost:
            self._blame(rows, lost, at_once)
            return False
        return True

    def _blame(self, rows: deque[tuple[OpenGroup, int]], lost: RewardProcessLost, at_once: bool) -> None:
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

    def _requeue(self, groups: Iterable[OpenGroup]) -> None:
        for group in groups:
            if group.left and not group.done.done():
                if group not in self._queue:
                    self._queue.append(group)
                self._more.set()
                self._grow_later()

    def _take(self, group: OpenGroup, *, everything: bool) -> list[tuple[OpenGroup, list[int]]]:
        """Take the rows that a worker judges next: all rows of a group, or some of its rows, and of later groups while
        rows are fast."""
        pace = self._pace.get(group.rubric)
        most = len(group.left) if everything else max(1, int(CHUNK_SECONDS / pace)) if pace else 1
        taken = list[tuple[OpenGroup, list[int]]]()
        for own in [group] if everything else chain([group], self._queue):
            if own.left and most > 0 and own.rubric == group.rubric:
                rows = [own.left.popleft() for _ in range(min(most, len(own.left)))]
                most -= len(rows)
                taken.append((own, rows))
        return taken


def reward_pool(task: TaskSection, seconds: float | None) -> RewardPool:
    """Return the pool of a task, whose calls have this deadline."""
    memory_mb = task.reward_memory_mb or host_memory() >> 21
    return RewardPool(PoolLimits(task.reward_workers, seconds, memory_mb))
