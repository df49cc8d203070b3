"""The endless, seeded, resumable order of prompts.

    Task.train -> Order (prompt k is a pure function of seed and k) -> StatefulDataLoader -> PromptSource.next()

A resumed run continues the order exactly; prompt k can also be asked for by its id, which is how a ledger re-issues it.
"""

import warnings
from collections.abc import Iterator
from functools import lru_cache
from typing import Any

import numpy as np

from titan_rl.tasks.task import Task, shuffled
from titan_rl.tasks.tokenizer import TextTokenizer
from titan_rl.wire.types import Prompt, Sample


class EpochOrder:
    """Item k is the prompt with id k: each epoch is the training examples in a new order."""

    def __init__(self, task: Task, tokenizer: TextTokenizer, seed: int) -> None:
        self.task, self.tokenizer, self.seed = task, tokenizer, seed
        self._epoch = lru_cache(maxsize=2)(self._shuffle)

    def _shuffle(self, epoch: int) -> np.ndarray:
        return shuffled(len(self.task.train), self.seed, epoch)

    def __getitem__(self, id: int) -> Prompt:
        epoch, place = divmod(id, len(self.task.train))
        return self.task.prompt(self.task.train[self._epoch(epoch)[place]], id, self.tokenizer)


class Count:
    """The sampler: 0, 1, 2, ... and where it stands."""

    def __init__(self) -> None:
        self.issued = 0

    def __iter__(self) -> Iterator[int]:
        return self

    def __next__(self) -> int:
        self.issued += 1
        return self.issued - 1

    def state_dict(self) -> dict[str, Any]:
        return {"issued": self.issued}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.issued = state["issued"]


class PromptSource:
    """Prompts 0, 1, 2, ... of a run. `state_dict` is small and JSON-able."""

    def __init__(self, task: Task, tokenizer: TextTokenizer, *, seed: int) -> None:
        # Imported here: torchdata brings torch, 2 s that a controller which only checks its config must not pay.
        from torch import Generator
        from torchdata.stateful_dataloader import StatefulDataLoader

        self.order = EpochOrder(task, tokenizer, seed)
        dataset: Any = self.order  # map-style by having __getitem__, without torch's base class
        self._identity = {"seed": seed, "examples": len(task.train)}
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", ".*set_vital")  # torchdata 0.11 calls what torch 2.13 deprecates
            # A generator of its own: else the loader draws a worker seed from torch's global one.
            self._loader = StatefulDataLoader(dataset, batch_size=None, sampler=Count(), generator=Generator())
        self._prompts = iter(self._loader)
        self._taken: set[int] = set()  # by the run that this one resumes, ahead of their turn

    def next(self) -> Prompt:
        while (prompt := next(self._prompts)).id in self._taken:
            self._taken.remove(prompt.id)
        return prompt

    def __getitem__(self, id: int) -> Prompt:
        """Prompt `id` of this run again, wherever the source stands."""
        return self.order[id]

    def state_dict(self) -> dict[str, Any]:
        return {**self._identity, "loader": self._loader.state_dict(), "taken": sorted(self._taken)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue where `state` was taken, less the prompts that it calls "taken". Another seed or another data set
        would be another order: refused."""
        found = {key: state[key] for key in self._identity}
        if found != self._identity:
            raise ValueError(
                f"the checkpoint's prompts were ordered by {found}, this run's by {self._identity}: "
                "restore debug.seed, eval.size and [task], or start anew with job.fresh"
            )
        self._loader.load_state_dict(state["loader"])
        self._prompts = iter(self._loader)
        self._taken = set(state.get("taken", ()))


def supervised(prompt: Prompt, tokenizer: TextTokenizer) -> list[Sample]:
    """The prompt, then the reference answer and EOS, trained on."""
    return [_answered(prompt, prompt.answer, tokenizer)]


def preference(prompt: Prompt, tokenizer: TextTokenizer) -> list[Sample]:
    """A pair for DPO: chosen, rejected."""
    return [_answered(prompt, answer, tokenizer) for answer in (prompt.answer, prompt.rejected)]


def judged(prompt: Prompt, tokenizer: TextTokenizer) -> list[Sample]:
    """A pair for a reward model: chosen, rejected."""
    return [to_judge(sample.tokens, tokenizer.pad) for sample in preference(prompt, tokenizer)]


def to_judge(tokens: list[int], pad: int) -> Sample:
    """A whole sequence for a reward model, whose score is its value where it has read the last token. A place predicts
    the next token, so that one is padding, and the only one under the mask."""
    return Sample(tokens=[*tokens, pad], mask=[0] * len(tokens) + [1])


def _answered(prompt: Prompt, answer: str, tokenizer: TextTokenizer) -> Sample:
    said = [*tokenizer.encode(answer), tokenizer.eos]
    return Sample(tokens=[*prompt.tokens, *said], mask=[0] * len(prompt.tokens) + [1] * len(said))


SAMPLES = {"supervised": supervised, "preference": preference, "reward": judged}
"""By the algorithm's kind: what one example of it trains on."""
