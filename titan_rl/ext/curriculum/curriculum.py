"""Which prompts are passed over when their turn comes, by how often the run has solved them.

    visit: a group is trained on, or dropped as flat -> its pass rate -> solved (N in a row: it drops out)
                                                                      -> hopeless (it waits for N of its turns)
                                                                      -> neither

It knows the groups that were trained on or dropped, as the run's ledger does, and none in flight.
"""

import math
from collections.abc import Collection, Sequence
from typing import Any

from titan_rl.config.sections import CurriculumSection


class Curriculum:
    def __init__(self, settings: CurriculumSection, size: int, unfit: Collection[int] = frozenset()) -> None:
        """`size`: number of training examples, of which the `unfit` ones are never sampled."""
        self._settings, self._unfit = settings, unfit
        self._fit = size - len(unfit)
        self._streaks: dict[int, int] = {}  # by example: number of last visits that were solved
        self._out: set[int] = set()  # examples that dropped out
        self._waits: dict[int, int] = {}  # turns that an example still waits
        self.note = ""  # a message for the user, until PromptSource.take_note returns it

    @property
    def on(self) -> bool:
        return self._settings.on

    def visited(self, index: int, rewards: Sequence[float]) -> None:
        """Count the answers to an example. NaN: there is no reward; a group without any changes nothing."""
        known = [reward for reward in rewards if not math.isnan(reward)]
        if not known or not self.on:
            return
        correct = sum(reward >= self._settings.correct_at for reward in known)
        self._waits.pop(index, None)
        if correct == len(known):
            if self._settings.solved_visits:
                self._streaks[index] = self._streaks.get(index, 0) + 1
                self._out.update([index] if self._streaks[index] >= self._settings.solved_visits else [])
            return
        self._streaks.pop(index, None)
        self._out.discard(index)
        if not correct and self._settings.hopeless_wait:
            self._waits[index] = self._settings.hopeless_wait

    def passes_over(self, index: int) -> bool:
        """Return True if an example is not sampled at this turn of its. One that waits has waited once more then."""
        if not self._active:
            self._revive()
        if index not in self._waits:
            return index in self._out
        self._waits[index] -= 1
        if not self._waits[index]:
            del self._waits[index]
        return True

    @property
    def _active(self) -> int:
        return self._fit - len(self._out) - len(self._waits)

    def _revive(self) -> None:
        """Let waiting examples be sampled now, or if all dropped out, let all of them begin again."""
        if self._waits:
            self.note = f"curriculum: the {len(self._waits)} prompts that are not solved all wait: they are sampled now"
            self._waits.clear()
        else:
            self.note = f"curriculum: all {self._fit} prompts are solved: an epoch of all of them begins again"
            self._streaks.clear()
            self._out.clear()

    @property
    def metrics(self) -> dict[str, float]:
        counts = {"active": self._active, "solved": len(self._out), "waiting": len(self._waits)}
        return {f"curriculum/{name}": float(n) for name, n in counts.items()} if self.on else {}

    def state_dict(self) -> dict[str, Any]:
        return {"solved": sorted(self._streaks.items()), "waits": sorted(self._waits.items())}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue at `state`, under the settings of now."""
        if not self.on:
            return
        most = self._settings.solved_visits or math.inf
        self._streaks = {i: n for i, n in state["solved"] if i not in self._unfit}
        self._out = {i for i, n in self._streaks.items() if n >= most}
        self._waits = {i: n for i, n in state["waits"] if i not in self._unfit and self._settings.hopeless_wait}
