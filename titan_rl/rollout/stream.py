"""Keep a bounded number of groups in flight, and hand them over before they are too old."""

import asyncio
import math
import traceback
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

from titan_rl.batch.advantages import soft_overlong_punishment
from titan_rl.config.sections import AlgorithmSection, FaultSection, RolloutSection
from titan_rl.record.ledger import Ledger
from titan_rl.tasks.prompts import PromptSource
from titan_rl.wire.clock import Clock
from titan_rl.wire.errors import DeadlinePassed, RunError
from titan_rl.wire.seeds import sample_seed
from titan_rl.wire.spans import span
from titan_rl.wire.types import Backlog, Completion, Decode, Generates, Group, Prompt, Request, Rollout, Sampling, Turn

MEMORY = 0.05
"""What one more group counts in the mean length of samples."""
BRIEF = 200
"""Characters of an error's message."""

Judge = Callable[[Prompt, Sequence[Completion], Sequence[str]], Awaitable[Sequence[float]]]
"""Rewards of a group's completions, whose texts come along: a rule at once, a reward model after a while. What it
raises says that this group has none, unless it is a RunError: that is the failure of a mesh, and no verdict."""


class RewardFailed(RunError):
    """A judge had no rewards for a group. One group is replaced; so many in a row end the run."""

    def __init__(self, prompt: int, reason: str, details: str) -> None:
        super().__init__(f"the reward failed on prompt {prompt}: {reason}", details)
        self.prompt, self.reason = prompt, reason

    @classmethod
    def of(cls, prompt: int, error: Exception) -> "RewardFailed":
        reason = f"{type(error).__name__}: {str(error)[:BRIEF]}"
        return cls(prompt, reason, "".join(traceback.format_exception(error)))


@dataclass(frozen=True, slots=True)
class Unjudged(Group):
    """Sampled, and then its judge failed, every time: its rewards are no numbers."""

    failure: RewardFailed


@dataclass(slots=True, eq=False)
class InFlight:
    """A group under way."""

    task: asyncio.Task[Group]
    prompt: int
    turn: int  # the step that trains it, if none overtakes another
    before: dict[str, Any]  # the data source's state in which this prompt is the next
    admitted: int = field(default_factory=span.now)

    @property
    def group(self) -> Group:
        return self.task.result()

    def finished(self) -> bool:
        if self.task.done():
            self.task.result()  # or raise what ended it
        return self.task.done()


class RolloutStream:
    """`admit(n)` starts n groups; `take(n, step)` gathers those that step trains.

    Two rules bound staleness. Admission: (lag + 1) steps' worth at first, then a step's worth for each version that the
    generators serve; so a group whose turn is step s sees no version older than s - 1 - lag. Order: a group is trained
    at its turn (oldest first), or, with a window, at most `window` steps later, and earlier if it finishes earlier. So
    no token is older than lag + window optimizer steps when it is trained on; docs/asynchrony.md has the proof.

    A group that is no use, for its judge failed or, under dynamic sampling, for it has no signal, is dropped, and
    another prompt is admitted: at the end of those in flight, which all move up by one turn.
    """

    def __init__(
        self,
        generators: Generates,
        prompts: PromptSource,
        judge: Judge,
        decode: Decode,
        *,
        algorithm: AlgorithmSection,
        rollout: RolloutSection,
        sampling: Sampling,
        first: int,
        groups: int,
        seed: int,
        clock: Clock,
        ledger: Ledger,
        fault: FaultSection = FaultSection(),  # noqa: B008 (frozen)
        attempt: int = 1,
    ) -> None:
        """`attempt` counts the streams of this process: an engine may still have a request of the one before."""
        self._generators = generators
        self._prompts = prompts
        self._judge = judge
        self._algorithm = algorithm
        self._decode = decode
        self._sampling = sampling
        self._rollout = rollout
        self._first = first  # step
        self._left = groups  # how many the rest of the run needs: admission beyond it would be waste
        self._admitted = 0  # replacements apart
        self._allowed = 0  # to start
        self._paced = rollout.pace and rollout.lag > 1
        self._steps_in_flight, self._ahead = 2, 0  # if paced
        self._seed = seed
        self._clock = clock
        self._ledger = ledger
        self._attempts = fault.reward_attempts
        self._suffix = f"@{attempt}" if attempt > 1 else ""  # of request ids
        self._failures: list[RewardFailed] = []  # of the latest groups to be judged, since one had its rewards
        self._mean_length = 0.0  # of the latest samples: what routing expects of the next
        self._issued = 0  # the prompt after the last that was started
        self._inflight: deque[InFlight] = deque()
        self.dropped: list[Group] = []
        """The groups that the last `take`, or `parts`, replaced."""

    def trained(self, step: int, groups: Sequence[Group]) -> None:
        """A step's update is made."""
        self._ledger.trained(step, groups)

    def saved(self, step: int) -> dict[str, Any]:
        """The cut, for a checkpoint of this step that is about to be written. All events before it are on disk."""
        self._ledger.saved(step)
        return self.cut()

    def cut(self) -> dict[str, Any]:
        """Where a run that goes back to this moment goes on: at the oldest group still in flight, but without the
        groups that overtook it. What is in flight is sampled again."""
        open = [group.prompt for group in self._inflight]
        cut = {"next": self._issued, "open": open}
        if not open:
            return self._prompts.state_dict() | cut
        before = self._inflight[0].before
        taken = {id for id in range(open[0], open[-1]) if id not in open}
        return before | cut | {"taken": sorted(taken.union(before["taken"]))}

    @property
    def backlog(self) -> Backlog:
        return Backlog(len(self._inflight), sum(group.task.done() for group in self._inflight))

    def admit(self, n: int) -> None:
        """Allow n more groups. Where that many finished ones wait already that the next two steps are sure, some start
        later than they may: when they are needed, and so with newer weights."""
        n = min(n, self._left)
        self._left -= n
        self._allowed += n
        self._ahead = self._ahead + 1 if self.backlog.finished >= 2 * self._rollout.groups_per_step else 0
        if self._ahead > self._rollout.lag:  # so often in a row: no accident
            self._ahead, self._steps_in_flight = 0, max(2, self._steps_in_flight - 1)
        self._fill()

    async def take(self, n: int, step: int) -> list[Group]:
        """n groups that were judged; under dynamic sampling, n that have a signal, or those found after max_refills
        rounds. A round is admitted at once, never group by group: so engines see the same batches in every synchronous
        run."""
        refills = self._algorithm.max_refills if self._algorithm.dynamic_sampling else 0
        with self._clock("generate"):
            self._hurry(n, step)
            taken, self.dropped = list(await self._gather(n, step)), []
            while useless := {group: why for group in taken if (why := _useless(group.group, flat=refills > 0))}:
                refills -= "flat" in useless.values()
                self._replace(useless)
                taken = [group for group in taken if group not in useless]
                taken += await self._gather(len(useless), step)
        return [group.group for group in taken]

    async def parts(self, n: int, step: int, size: int) -> AsyncIterator[list[Group]]:
        """The n oldest that are judged, `size` at a time, in the order in which they finish."""
        self._hurry(n, step)
        self.dropped, finished = [], asyncio.Queue[InFlight]()

        def watch(group: InFlight) -> None:
            group.task.add_done_callback(lambda _: finished.put_nowait(group))

        for group in self._oldest(n, step):
            watch(group)
        while n > 0:  # the n oldest in flight are watched
            part: list[Group] = []
            with self._clock("generate"):
                while len(part) < size and n > 0:
                    (group,) = self._taken([await finished.get()], step)
                    if why := _useless(group.group, flat=False):
                        self._replace({group: why})
                        watch(self._inflight[n - 1])
                    else:
                        part.append(group.group)
                        n -= 1
            yield part

    def _start(self, turn: int) -> None:
        before = self._prompts.state_dict()
        prompt = self._prompts.next()
        self._issued = prompt.id + 1
        self._ledger.admitted(prompt.id, turn)
        self._inflight.append(InFlight(asyncio.create_task(self._sample(prompt)), prompt.id, turn, before))

    def _fill(self) -> None:
        room = self._steps_in_flight * self._rollout.groups_per_step - len(self._inflight)
        for _ in range(min(self._allowed, room) if self._paced else self._allowed):
            self._allowed -= 1
            self._start(self._first + self._admitted // self._rollout.groups_per_step)
            self._admitted += 1

    def _replace(self, useless: Mapping[InFlight, str]) -> None:
        """New groups take the last places of those in flight, and the others move up: the turns are the same ones."""
        turns = sorted(group.turn for group in (*self._inflight, *useless))
        for group, why in useless.items():
            self.dropped.append(group.group)
            self._ledger.dropped(group.group, why)
        for turn in turns[len(self._inflight) :]:
            self._start(turn)
        for group, turn in zip(self._inflight, turns, strict=True):
            group.turn = turn

    async def _gather(self, n: int, step: int) -> Sequence[InFlight]:
        """The n oldest. With a window: all whose last chance this step is, and of the others those that are finished
        first. In the order of admission."""
        chosen = self._oldest(n, step)
        if self._rollout.window:
            due = [group for group in self._inflight if group.turn + self._rollout.window <= step]
            others = [group for group in self._inflight if group not in due]
            while len(ready := [group for group in others if group.finished()]) < n - len(due):
                open = [group.task for group in self._inflight if not group.task.done()]
                await asyncio.wait(open, return_when=asyncio.FIRST_COMPLETED)
            chosen = sorted([*due, *ready[: n - len(due)]], key=lambda group: group.prompt)
        for group in chosen:
            await group.task
        return self._taken(chosen, step)

    def _hurry(self, n: int, step: int) -> None:
        """Do the trainers wait? Then more may be in flight."""
        if self._paced and self.backlog.finished < n and step > self._first:
            self._ahead, self._steps_in_flight = 0, min(self._steps_in_flight + 1, self._rollout.lag + 1)
            self._fill()

    def _oldest(self, n: int, step: int) -> list[InFlight]:
        if len(self._inflight) < n:
            raise RuntimeError(f"step {step} takes {n} groups, but {len(self._inflight)} are in flight")
        return list(islice(self._inflight, n))

    def _taken(self, chosen: Sequence[InFlight], step: int) -> Sequence[InFlight]:
        """They leave the stream, and none of them is too old."""
        gone = {group.prompt for group in chosen}
        self._inflight = deque(group for group in self._inflight if group.prompt not in gone)
        oldest = step - 1 - self._rollout.lag - self._rollout.window
        for group in chosen:
            span.since(group.admitted, "group", lane="groups", id=group.prompt, step=step)
            if (version := group.group.version) < oldest:
                raise RuntimeError(f"prompt {group.prompt} holds tokens of version {version} at step {step}")
        return chosen

    async def aclose(self) -> None:
        self._left = self._allowed = 0  # a sync under way admits nothing more
        for group in self._inflight:
            group.task.cancel()
        await asyncio.gather(*(group.task for group in self._inflight), return_exceptions=True)
        self._ledger.close()

    async def _sample(self, prompt: Prompt) -> Group:
        seeds = [sample_seed(self._seed, prompt.id, k) for k in range(self._rollout.group_size)]
        expected = round(self._mean_length) if self._rollout.lag else 0
        request = Request(f"prompt-{prompt.id}{self._suffix}", prompt.tokens, seeds, self._sampling, expected=expected)
        seconds = self._rollout.timeout_seconds
        try:
            with span("sample", lane="groups", id=prompt.id):
                async with asyncio.timeout(seconds):
                    completions = await self._generators.generate(request)
        except TimeoutError:
            raise DeadlinePassed(
                f"generators.generate did not answer prompt {prompt.id} within {seconds} s",
                f"{len(self._inflight)} groups are in flight. Slow rather than stuck? Raise [rollout] timeout_seconds.",
            ) from None
        self._ledger.sampled(prompt.id, completions)
        length = sum(len(completion.tokens) for completion in completions) / len(completions)
        self._mean_length += MEMORY * (length - self._mean_length) if self._mean_length else length
        texts = [self._decode(completion.tokens) for completion in completions]
        with span("judge", lane="groups", id=prompt.id):
            rewards = await self._judged(prompt, completions, texts)
        failed = isinstance(rewards, RewardFailed)
        rollouts = [
            Rollout([Turn(prompt.tokens, completion)], text, reward, self._penalty(completion))
            for completion, text, reward in zip(
                completions, texts, [math.nan] * len(texts) if failed else rewards, strict=True
            )
        ]
        if failed:
            return Unjudged(prompt, rollouts, rewards)
        self._ledger.scored(prompt.id, rewards)
        return Group(prompt, rollouts)

    async def _judged(
        self, prompt: Prompt, completions: Sequence[Completion], texts: Sequence[str]
    ) -> Sequence[float] | RewardFailed:
        """The rewards, or why there are none. Raises where as many groups in a row as a step takes have none: that is
        no bad rollout but a bad reward."""
        errors: list[Exception] = []
        while len(errors) < self._attempts:
            try:
                rewards = await self._judge(prompt, completions, texts)
                if len(rewards) != len(texts) or not all(map(math.isfinite, rewards)):
                    raise ValueError(f"expected {len(texts)} finite rewards, got {list(rewards)}")
            except RunError:
                raise
            except Exception as error:
                errors.append(error)
                self._ledger.failed(prompt.id, len(errors), RewardFailed.of(prompt.id, error).reason)
            else:
                self._failures = []
                return rewards
        self._failures.append(RewardFailed.of(prompt.id, errors[-1]))
        if len(self._failures) < self._rollout.groups_per_step:
            return self._failures[-1]
        first = min(self._failures, key=lambda failure: failure.prompt)
        raise RewardFailed(
            first.prompt,
            first.reason,
            f"{first.details}\n{len(self._failures)} groups in a row had no rewards, though each was judged "
            f"{self._attempts} times (fault.reward_attempts).",
        )

    def _penalty(self, completion: Completion) -> float:
        """Soft overlong punishment, where it is asked for."""
        longest, buffer = self._sampling.max_new_tokens, self._algorithm.overlong_buffer
        punishment = soft_overlong_punishment(len(completion.tokens), longest=longest, buffer=buffer)
        return -self._algorithm.overlong_penalty * punishment


def _useless(group: Group, *, flat: bool) -> str:
    """Why a group is replaced, if it is: its judge failed; or it has no signal, where that counts."""
    if isinstance(group, Unjudged):
        return f"failed: {group.failure.reason}"
    return "flat" if flat and group.flat else ""
