"""Judges answers in processes: as many at a time as there are workers, each killed at its deadline.

    verdicts(prompt, rollouts) ── rows ──> a queue ── chunks ──> RewardProcess ── a verdict per row ──>

A worker takes one row at a time, or a chunk of one or more groups if rows are fast, or the whole group if a function
judges it at once. The row during which its process is killed, or dies, is the culprit: it alone is tried again or
fails, and the others of its chunk return to the queue. Processes are started when they are needed: a fast reward has
one.
"""

import asyncio
import math
from collections import Counter, deque
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import chain

from titan_rl.tasks.reward_process import RewardProcess, RewardProcessLost
from titan_rl.tasks.reward_thread import SideThread
from titan_rl.tasks.reward_worker import JudgeRequest, verdict_of
from titan_rl.tasks.rewards import Answered
from titan_rl.tasks.rubric import GRADER, RewardUnusable, Rubric
from titan_rl.wire.types import Judgement, Prompt, Rollout

CHUNK_SECONDS = 0.05
"""What a worker takes from the queue at a time, if its rows are fast."""
GROW_SECONDS = 0.1
"""How long rows wait before another process is started."""
LOOK_SECONDS = 0.25
"""Between two looks at the memory of the workers."""
IMPORTS = 3
"""Processes in a row that may fail to import a reward which another one has imported."""
MIB = 2**20


@dataclass(frozen=True, slots=True)
class PoolLimits:
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
        if math.isnan(verdict.reward):
            self.failures[row] += 1
            if self.failures[row] < self.attempts:
                self.left.append(row)
                return
        self.verdicts[row] = verdict
        if len(self.verdicts) == len(self.answers) and not self.done.done():
            self.done.set_result(None)


class RewardPool:
    def __init__(self, limits: PoolLimits) -> None:
        self._limits = limits
        self._spawner = SideThread()  # its children use the host's network
        self._queue: deque[OpenGroup] = deque()  # with rows left
        self._more = asyncio.Event()
        self._runners: set[asyncio.Task[None]] = set()
        self._busy: dict[asyncio.Task[None] | None, RewardProcess] = {}
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
        batch = OpenGroup(rubric, prompt, answers, attempts, deque(range(len(answers))), done)
        self._queue.append(batch)
        self._more.set()
        if not self._runners:
            self._start_runner()
            self._watch = asyncio.create_task(self._watch_memory())
        self._look_later()
        try:
            await done
        finally:
            batch.left.clear()
        return [batch.verdicts[row] for row in range(len(answers))]

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

    # -- how many processes ---------------------------------------------------------------------------------------

    def _start_runner(self) -> None:
        task = asyncio.create_task(self._serve())
        self._runners.add(task)
        task.add_done_callback(self._ended)

    def _ended(self, task: "asyncio.Task[None]") -> None:
        self._runners.discard(task)
        error = None if task.cancelled() else task.exception()
        for batch in self._queue if error else ():  # a bug here must not leave a run waiting
            if not batch.done.done():
                batch.done.set_exception(error or RuntimeError())

    def _look_later(self) -> None:
        if self._timer is None and len(self._runners) < self._limits.workers:
            self._timer = asyncio.get_running_loop().call_later(GROW_SECONDS, self._grow)

    def _grow(self) -> None:
        """Start the processes that the rows which still wait would keep busy."""
        self._timer = None
        waiting = [batch for batch in self._queue if batch.left]
        if not waiting:
            return
        if self._imported:
            seconds = sum(len(batch.left) * self._pace.get(batch.rubric, 1.0) for batch in waiting)
            wanted = min(sum(len(batch.left) for batch in waiting), math.ceil(seconds / GROW_SECONDS))
            for _ in range(min(wanted, self._limits.workers - len(self._runners))):
                self._start_runner()
        self._look_later()

    async def _watch_memory(self) -> None:
        most = self._limits.memory_mb
        while most:
            await asyncio.sleep(LOOK_SECONDS)
            for process in list(self._busy.values()):
                if (found := process.memory // MIB) > most:
                    process.doom(
                        f"the reward function's process had {found:,} MiB of memory, more than task.reward_memory_mb = "
                        f"{most:,}, and is killed"
                    )

    # -- one worker -----------------------------------------------------------------------------------------------

    async def _serve(self) -> None:
        """Judge what is in the queue, with one process at a time."""
        process: RewardProcess | None = None
        me = asyncio.current_task()
        try:
            while True:
                batch = await self._next_batch()
                if process is None:
                    try:
                        process = await self._started()
                    except OSError as error:
                        self._fail(batch, f"no reward process can be started: {error}")
                        continue
                self._busy[me] = process
                if not await self._judge_some(process, batch) or self._swollen(process):
                    await process.end()
                    process = None
                self._busy.pop(me, None)
        finally:
            self._busy.pop(me, None)
            if process is not None:
                await process.end()

    async def _next_batch(self) -> OpenGroup:
        while True:
            while self._queue and not self._queue[0].left:
                self._queue.popleft()
            if self._queue:
                return self._queue[0]
            self._more.clear()
            await self._more.wait()

    async def _started(self) -> RewardProcess:
        self._numbers += 1
        return await RewardProcess.start(self._numbers, self._spawner)

    def _fail(self, batch: OpenGroup, error: str) -> None:
        for own, rows in self._take(batch, everything=True):
            for row in rows:
                self._settle(own, row, Judgement(math.nan, error=error))

    async def _judge_some(self, process: RewardProcess, batch: OpenGroup) -> bool:
        """Have the process judge rows of the batch. Return whether it lives."""
        try:
            at_once = await process.imported(batch.rubric)
        except (ValueError, RewardProcessLost) as error:
            self._failed_imports[batch.rubric] += 1
            if batch.rubric not in self._imported or self._failed_imports[batch.rubric] >= IMPORTS:
                self._unusable = RewardUnusable(batch.rubric, str(error))
                raise self._unusable from None
            return False
        self._imported.add(batch.rubric)
        self._failed_imports[batch.rubric] = 0
        taken = self._take(batch, everything=at_once)
        if not taken:
            return True
        left = deque((own, row) for own, rows in taken for row in rows)
        try:
            async for line in process.judge([self._request(own, rows, at_once) for own, rows in taken]):
                own, row = left.popleft()
                seconds = float(line["seconds"])
                self._pace[own.rubric] = 0.8 * self._pace.get(own.rubric, seconds) + 0.2 * seconds
                self._settle(own, row, verdict_of(line))
        except RewardProcessLost as lost:
            self._blame(left, lost, at_once)
            return False
        return True

    def _request(self, batch: OpenGroup, rows: Sequence[int], at_once: bool) -> JudgeRequest:
        every = batch.answers if at_once else [batch.answers[row] for row in rows]
        asked = rows if at_once else range(len(rows))
        ungraded = [k for k, row in zip(asked, rows, strict=True) if row in batch.ungraded]
        return JudgeRequest(batch.rubric, batch.prompt, every, [*asked], ungraded, self._limits.seconds)

    def _blame(self, left: deque[tuple[OpenGroup, int]], lost: RewardProcessLost, at_once: bool) -> None:
        """Settle the rows that have no verdict because a process was lost: all of them, if it judged them together, or
        else the first. If the grader is to blame, they are judged again without it."""
        for batch, row in list(left) if at_once and lost.at else [left[0]]:
            if lost.at == GRADER:
                batch.ungraded.add(row)
            else:
                left.remove((batch, row))
                self._settle(batch, row, Judgement(math.nan, error=str(lost), hung=lost.hung))
        for batch, row in reversed(left):
            batch.left.appendleft(row)
        for batch in dict.fromkeys(batch for batch, _ in left):
            self._requeue(batch)

    def _settle(self, batch: OpenGroup, row: int, verdict: Judgement) -> None:
        if row in batch.ungraded and not verdict.error:
            verdict = Judgement(verdict.reward, verdict.parts, "the grader: its process was killed or died")
        batch.settle(row, verdict)
        self._requeue(batch)

    def _requeue(self, batch: OpenGroup) -> None:
        if batch.left and not batch.done.done():
            if batch not in self._queue:
                self._queue.append(batch)
            self._more.set()
            self._look_later()

    def _take(self, batch: OpenGroup, *, everything: bool) -> list[tuple[OpenGroup, list[int]]]:
        """Take what a worker judges next: all rows of a group, or some of it, and of later ones while rows are fast."""
        if everything:
            most, groups = len(batch.left), [batch]
        else:
            pace = self._pace.get(batch.rubric)
            most = max(1, int(CHUNK_SECONDS / pace)) if pace else 1
            groups = chain([batch], self._queue)
        taken = list[tuple[OpenGroup, list[int]]]()
        for own in groups:
            if most <= 0:
                break
            if own.left and own.rubric == batch.rubric:
                rows = [own.left.popleft() for _ in range(min(most, len(own.left)))]
                most -= len(rows)
                taken.append((own, rows))
        return taken

    def _swollen(self, process: RewardProcess) -> bool:
        """Return True if it leaks: it is replaced between two calls, before one of them is to blame."""
        with suppress(OSError):
            found = process.memory
            return bool(self._limits.memory_mb) and found > max(self._limits.memory_mb * MIB // 2, 2 * process.resting)
        return False


def answer_of(rollout: Rollout) -> Answered:
    turns = rollout.turns
    completion = turns[-1].completion if turns else None
    versions = completion.versions if completion else ()
    return Answered(rollout.text, completion.tokens if completion else (), max(versions, default=0), rollout.messages)
