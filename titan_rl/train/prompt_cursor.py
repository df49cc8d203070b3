"""Which prompts a user's loop was given, and what became of them, for the ledger and for a resumed run.

next ── sampled ── trained
            └───── dropped: a step was trained on later prompts, and not on this one
"""

from typing import Any

from titan_rl.record.ledger import Ledger
from titan_rl.tasks.prompts import PromptSource
from titan_rl.wire.reports import Backlog
from titan_rl.wire.types import Group, Prompt

LEFT_OUT = "left out"
"""The reason in the ledger for a group that the loop did not train on."""


class PromptCursor:
    def __init__(self, prompts: PromptSource, ledger: Ledger) -> None:
        self.ledger, self._prompts = ledger, prompts
        self._open: dict[int, dict[str, Any]] = {}  # by prompt: the state before it
        self._sampled: dict[int, Group] = {}  # by prompt, of the open ones
        self._issued = 0  # id after the last prompt
        self._dropped: list[Group] = []

    def next(self, step: int) -> Prompt:
        """Return the next prompt, which is meant for a step."""
        before = self._prompts.state_dict()
        prompt = self._prompts.next()
        self._issued, self._open[prompt.id] = prompt.id + 1, before
        self.ledger.admitted(prompt.id, step, prompt.images)
        return prompt

    def sampled(self, group: Group) -> None:
        """Take a group, or the same group with rewards."""
        if group.prompt.id in self._open:
            self._sampled[group.prompt.id] = group

    def trained(self, step: int, groups: list[Group]) -> None:
        """Record that the update of `step` is made, by these rewards. Sampled prompts before its last one are left out
        for good."""
        last = max(group.prompt.id for group in groups)
        trained = {group.prompt.id for group in groups}
        for id in [id for id in self._sampled if id < last and id not in trained]:
            group = self._sampled.pop(id)
            self._open.pop(id, None)
            self.ledger.dropped(group, LEFT_OUT)
            self._prompts.visited(id, ())
            self._dropped.append(group)
        for group in groups:
            self.ledger.scored(group.prompt.id, group.rewards)  # again: they may be the loop's
            self._open.pop(group.prompt.id, None)
            self._sampled.pop(group.prompt.id, None)
            self._prompts.visited(group.prompt.id, group.rewards)
        self.ledger.trained(step, groups)

    @property
    def backlog(self) -> Backlog:
        return Backlog(len(self._open), len(self._sampled), self._prompts.metrics)

    def take_dropped(self) -> list[Group]:
        """Return the groups that were left out since the last call."""
        dropped, self._dropped = self._dropped, []
        return dropped

    def state(self) -> dict[str, Any]:
        """Return the state from which a run resumes here."""
        return self._prompts.resume_state(self._open, self._issued)

    def saved(self, step: int) -> None:
        self.ledger.saved(step)

    def close(self) -> None:
        self.ledger.close()
