"""Keeps a bounded number of groups in flight, and hands them over before they are too old."""

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

from titan_rl.batch.experience import teaches
from titan_rl.batch.seats import seat_groups
from titan_rl.record.ledger import Ledger
from titan_rl.rollout.sampling import GroupSampler, Judge, StreamSettings, Unjudged
from titan_rl.tasks.prompts import PromptSource
from titan_rl.wire.errors import RunError
from titan_rl.wire.reports import Backlog
from titan_rl.wire.spans import Clock, span
from titan_rl.wire.types import Decode, Generates, Group

FLAT = "flat"
"""The reason in the ledger for a group that was dropped because its rewards give no token an advantage."""

REFUSED = "refused"
"""The reason for a group that task.filter refused."""

ROLLED_BACK = "rolled back"
"""The reason for a group that was dropped because a step that trained on it was undone (fault.on_bad_steps)."""


@dataclass(slots=True, eq=False)
class InFlight:
    """A group being sampled and judged, or waiting to be taken."""

    task: asyncio.Task[Group]
    prompt: int
    turn: int  # the step that trains it if no group overtakes another
    before: dict[str, Any]  # state of the prompt source when this prompt was next
    admitted: int = field(default_factory=span.now)

    @property
    def group(self) -> Group:
        return self.task.result()

    def finished(self) -> bool:
        if self.task.done():
            self.task.result()  # raises if the task failed
        return self.task.done()


class RolloutStream:
    """`admit(n)` starts n groups; `take(n, step)` returns the groups that `step` trains on.

    Two rules bound staleness. Admission: steps_ahead + 1 steps' worth of groups at first, then one step's worth for
    each version that the generators serve, so a group whose turn is step s is sampled by version s - 1 - steps_ahead or
    a newer one. Order: a group is trained on at its turn (oldest first), or at most overtake_steps later, and earlier
    if it finishes earlier. So no token is older than max_staleness_steps when it is trained on; docs/algorithms.md has
    the proof.

    A group that cannot be used, because its judge failed, task.filter refuses it or (dynamic sampling) its rewards
    are all equal, is dropped and another prompt is admitted behind the groups in flight, which all move up by one turn.
    """

    def __init__(
        self,
        settings: StreamSettings,
        generators: Generates,
        prompts: PromptSource,
        judge: Judge,
        decode: Decode,
        clock: Clock,
        ledger: Ledger,
    ) -> None:
        self._settings, self._rollout, self._algorithm = settings, settings.rollout, settings.algorithm
        self._sampler = GroupSampler(settings, generators, judge, decode, ledger)
        self._prompts, self._clock, self._ledger = prompts, clock, ledger
        self._left = settings.groups  # groups still to be allowed; more would never be trained on
        self._admitted = 0  # groups started, without replacements
        self._allowed = 0  # groups that may start
        self._paced = self._rollout.steps_ahead > 1
        self._steps_in_flight, self._ahead = 2, 0  # if paced
        self._issued = 0  # id after the last prompt that was started
        self._inflight: dict[int, InFlight] = {}  # by prompt, the oldest first
        self._ended: asyncio.Queue[asyncio.Task[Group]] | None = None  # groups that end while a step waits for any
        self.dropped: list[Group] = []
        """The groups that the last `take` or `parts` replaced."""

    def trained(self, step: int, groups: Sequence[Group]) -> None:
        """Record that the update of `step` is made."""
        self._ledger.trained(step, groups)
        for group in groups:
            self._prompts.visited(group.prompt.id, group.rewards)

    def logged(self, step: int, checksums: tuple[int, int]) -> None:
        """Record the checksums of the step's lines in metrics.jsonl and rollouts.jsonl."""
        self._ledger.logged(step, *checksums)

    def saved(self, step: int) -> dict[str, Any]:
        """Return the cut for the checkpoint of this step. All earlier events are on disk when this returns."""
        self._ledger.saved(step)
        return self.cut()

    def cut(self) -> dict[str, Any]:
        """Return the state from which a run resumes here: at the oldest group in flight, without the groups that
        overtook it."""
        return self._prompts.resume_state({id: g.before for id, g in self._inflight.items()}, self._issued)

    @property
    def backlog(self) -> Backlog:
        finished = sum(group.task.done() for group in self._inflight.values())
        return Backlog(len(self._inflight), finished, self._prompts.metrics)

    def admit(self, n: int) -> None:
        """Allow n more groups. If paced and the finished groups already cover the next two steps, some start only when
        they are needed, and so with newer weights."""
        n = min(n, self._left)
        self._left -= n
        self._allowed += n
        self._ahead = self._ahead + 1 if self._covered(2 * self._rollout.groups_per_step) else 0
        if self._ahead > self._rollout.steps_ahead:  # more than steps_ahead times in a row, so not by chance
            self._ahead, self._steps_in_flight = 0, max(2, self._steps_in_flight - 1)
        self._fill()

    async def take(self, n: int, step: int) -> list[Group]:
        """Return n judged groups that task.filter keeps. With dynamic sampling their rewards are unequal, except that
        the groups of the last of max_refills rounds are returned as they are. A round is admitted at once, not group by
        group, so that a synchronous run always makes the same engine batches."""
        refills = most = self._algorithm.max_refills
        with self._clock("generate"):
            self._hurry(n, step)
            groups, self.dropped = list(await self._gather(n, step)), []
            while useless := {group: reason for group in groups if (reason := self._useless(group.group, refills))}:
                refills -= not {FLAT, REFUSED}.isdisjoint(useless.values())
                if refills < 0:
                    refused = sum(reason == REFUSED for reason in useless.values())
                    raise RunError(
                        f"step {step}: expected task.filter to keep {n} groups within algorithm.max_refills = {most} "
                        f"rounds of replacements, found {refused} refused in the last one"
                    )
                self._replace(useless)
                groups = [group for group in groups if group not in useless]
                groups += await self._gather(len(useless), step)
        return [group.group for group in groups]

    async def parts(self, n: int, step: int, size: int) -> AsyncIterator[list[Group]]:
        """Yield the n oldest judged groups, `size` at a time, in the order in which they finish."""
        self._hurry(n, step)
        self.dropped, finished = [], asyncio.Queue[InFlight]()

        def watch(group: InFlight) -> None:
            group.task.add_done_callback(lambda _: finished.put_nowait(group))

        for group in self._oldest(n, step):
            watch(group)
        while n > 0:  # the n oldest groups in flight are watched
            part: list[Group] = []
            with self._clock("generate"):
                while len(part) < size and n > 0:
                    (group,) = self._taken([await finished.get()], step)
                    if reason := self._useless(group.group, refills=0):
                        self._replace({group: reason})
                        watch(self._oldest(n, step)[-1])
                    else:
                        part.append(group.group)
                        n -= 1
            yield part

    def _start(self, turn: int) -> None:
        before = self._prompts.state_dict()
        prompt = self._prompts.next()
        if note := self._prompts.take_note():
            self._settings.warn(note)
        self._issued = prompt.id + 1
        self._ledger.admitted(prompt.id, turn, prompt.images)
        sampling = asyncio.create_task(self._sampler.sample(prompt))
        sampling.add_done_callback(self._note_end)
        self._inflight[prompt.id] = InFlight(sampling, prompt.id, turn, before)

    def _fill(self) -> None:
        room = self._steps_in_flight * self._rollout.groups_per_step - len(self._inflight)
        for _ in range(min(self._allowed, room) if self._paced else self._allowed):
            self._allowed -= 1
            self._start(self._settings.first + self._admitted // self._rollout.groups_per_step)
            self._admitted += 1

    def _replace(self, useless: Mapping[InFlight, str]) -> None:
        """Start new groups behind the groups in flight, which move up. The set of turns stays the same."""
        turns = sorted(group.turn for group in (*self._inflight.values(), *useless))
        for group, reason in useless.items():
            self.dropped.append(group.group)
            self._ledger.dropped(group.group, reason)
            self._prompts.visited(group.prompt, group.group.rewards if reason in (FLAT, REFUSED) else ())
        for turn in turns[len(self._inflight) :]:
            self._start(turn)
        for group, turn in zip(self._inflight.values(), turns, strict=True):
            group.turn = turn

    async def _gather(self, n: int, step: int) -> Sequence[InFlight]:
        """Return the n oldest groups. With overtake_steps: all that this step must take, and of the others the first to
        finish. In the order of admission."""
        chosen = self._oldest(n, step)
        if self._rollout.overtake_steps:
            latest = step - self._rollout.overtake_steps
            due = [group for group in self._inflight.values() if group.turn <= latest]
            ready = await self._finished(n - len(due), latest)
            chosen = sorted([*due, *ready], key=lambda group: group.prompt)
        for group in chosen:
            await group.task
        return self._taken(chosen, step)

    async def _finished(self, count: int, latest: int) -> list[InFlight]:
        """Wait until `count` groups whose turn is after `latest` have finished, and return the oldest of these. Groups
        that are admitted meanwhile count too. Raise the failure of any of them."""
        self._ended = asyncio.Queue()
        try:
            while True:
                found = [group for group in self._inflight.values() if group.turn > latest and group.finished()]
                if len(found) >= count:
                    return found[:count]
                for _ in range(count - len(found)):
                    (await self._ended.get()).result()
        finally:
            self._ended = None

    def _note_end(self, task: asyncio.Task[Group]) -> None:
        if self._ended is not None:
            self._ended.put_nowait(task)

    def _hurry(self, n: int, step: int) -> None:
        """Allow more groups in flight if the trainers are waiting."""
        if self._paced and step > self._settings.first and not self._covered(n):
            self._ahead, self._steps_in_flight = 0, min(self._steps_in_flight + 1, self._rollout.steps_ahead + 1)
            self._fill()

    def _covered(self, n: int) -> bool:
        """Return True if n groups can be taken without a wait: any that have finished, or, if none overtakes another,
        the oldest ones."""
        oldest = None if self._rollout.overtake_steps else n
        return sum(group.task.done() for group in islice(self._inflight.values(), oldest)) >= n

    def _oldest(self, n: int, step: int) -> list[InFlight]:
        if len(self._inflight) < n:
            raise RuntimeError(f"step {step}: expected at least {n} groups in flight, found {len(self._inflight)}")
        return list(islice(self._inflight.values(), n))

    def _taken(self, chosen: Sequence[InFlight], step: int) -> Sequence[InFlight]:
        """Remove the groups from the stream, and check that none of them is too old."""
        for group in chosen:
            del self._inflight[group.prompt]
        oldest = step - 1 - self._rollout.steps_ahead - self._rollout.overtake_steps
        for group in chosen:
            span.since(group.admitted, "group", lane="groups", id=group.prompt, step=step)
            if not isinstance(group.group, Unjudged) and (version := group.group.version) < oldest:
                raise RuntimeError(
                    f"step {step}: expected version {oldest} or newer, found {version} in prompt {group.prompt}"
                )
        return chosen

    def _useless(self, group: Group, refills: int) -> str:
        """Return why a group must be replaced: its judge failed, its step was undone, task.filter refuses it, or (with
        refills left) it teaches nothing. Else ""."""
        if isinstance(group, Unjudged):
            return f"failed: {group.failure.reason}"
        if group.prompt.id in self._settings.bad_prompts:
            return ROLLED_BACK
        if (keeps := self._settings.keeps) is not None and not keeps(group):
            return REFUSED
        wanted = self._algorithm.dynamic_sampling and refills > 0
        if not wanted or any(teaches(each, self._algorithm, self._settings.weights) for each in seat_groups([group])):
            return ""
        return FLAT

    async def aclose(self) -> None:
        self._left = self._allowed = 0  # a weight sync in progress admits nothing more
        for group in self._inflight.values():
            group.task.cancel()
        await asyncio.gather(*(group.task for group in self._inflight.values()), return_exceptions=True)
        self._ledger.close()
