"""The endless, seeded, resumable order of prompts, and the training samples that supervised algorithms make of them.

Prompt k is a pure function of the seed and k, so one integer is the whole state, and a resumed run continues exactly.
Examples that do not fit are skipped. Then a second integer counts the places that were passed, with the skipped ones,
so that a run which resumes with other limits continues where it was in the same order. With a curriculum the order
depends on the solved examples: then the cursor also has the visits of each example, and the examples of the prompts in
flight.
"""

from collections import deque
from collections.abc import Collection, Mapping, Sequence
from typing import Any, Protocol

import numpy as np

from titan_rl.tasks.orders import order_of
from titan_rl.tasks.task import Task
from titan_rl.text.tokenizer import TextTokenizer
from titan_rl.wire.errors import RunError
from titan_rl.wire.parts import needed_part
from titan_rl.wire.sessions import Opening
from titan_rl.wire.types import Prompt, Sample


class Curriculum(Protocol):
    """Which examples are passed over when their turn comes."""

    note: str  # a message for the user, until it is taken

    @property
    def on(self) -> bool: ...
    @property
    def metrics(self) -> dict[str, float]: ...
    def visited(self, index: int, rewards: Sequence[float]) -> None: ...
    def passes_over(self, index: int) -> bool: ...
    def state_dict(self) -> dict[str, Any]: ...
    def load_state_dict(self, state: dict[str, Any]) -> None: ...


class NoCurriculum:
    """Every example is sampled at each of its turns."""

    on = False

    def __init__(self) -> None:
        self.note, self.metrics = "", dict[str, float]()

    def visited(self, index: int, rewards: Sequence[float]) -> None: ...
    def passes_over(self, index: int) -> bool:
        return False

    def state_dict(self) -> dict[str, Any]:
        return {"solved": [], "waits": []}

    def load_state_dict(self, state: dict[str, Any]) -> None: ...


def _curriculum(task: Task) -> Curriculum:
    if not task.curriculum.on:
        return NoCurriculum()
    return needed_part("curriculum", "curriculum")(task.curriculum, len(task.train), task.unfit)


class PromptSource:
    """Prompts 0, 1, 2, ... of a run; each epoch of a source is its training examples in a new order."""

    def __init__(self, task: Task, tokenizer: TextTokenizer, *, seed: int) -> None:
        self._task, self._tokenizer = task, tokenizer
        self._identity: dict[str, Any] = {"seed": seed, "examples": len(task.train)}
        if task.parts:
            self._identity["sources"] = {part.name: [part.count, part.weight] for part in task.parts}
        self._index_at = order_of(task, seed)
        self._position = 0  # id of the next prompt
        self._place = 0  # in the endless order of all examples
        self._taken: set[int] = set()  # ids that the resumed run has already trained on, ahead of their turn
        self._curriculum = _curriculum(task)
        self._remembers = self._curriculum.on
        self._issued: dict[int, int] = {}  # id -> index of the example, of prompts in flight, if it remembers
        self._again: deque[tuple[int, int]] = deque()  # prompts that were in flight when the run was cut

    def next(self) -> Prompt:
        while self._position in self._taken:
            self._taken.remove(self._position)
            self._position += 1
            self._next_fitting()
        if self._again:
            id, index = self._again.popleft()
            index = self._next_index() if index in self._task.unfit else index
        else:
            id, index = self._position, self._next_index()
            self._position += 1
        if self._remembers:
            self._issued[id] = index
        return self._task.prompt(self._task.train[index], id, self._tokenizer)

    def visited(self, id: int, rewards: Sequence[float]) -> None:
        """Pass the rewards of a prompt that is no longer in flight to the curriculum."""
        if (index := self._issued.pop(id, None)) is not None:
            self._curriculum.visited(index, rewards)

    @property
    def metrics(self) -> dict[str, float]:
        return self._curriculum.metrics

    def take_note(self) -> str:
        """Return the curriculum's message for the user since the last call, or ""."""
        note, self._curriculum.note = self._curriculum.note, ""
        return note

    def _next_index(self) -> int:
        """Return the index of the next example that fits, and that the curriculum does not pass over."""
        while True:
            index = self._next_fitting()
            if not self._curriculum.on or not self._curriculum.passes_over(index):
                return index

    def _next_fitting(self) -> int:
        while True:
            index = self._index_at(self._place)
            self._place += 1
            if index not in self._task.unfit:
                return index

    def state_dict(self) -> dict[str, Any]:
        skipped = {"place": self._place} if self._place != self._position else {}
        return {**self._identity, "position": self._position, **skipped, "taken": sorted(self._taken)}

    def cut(self, inflight: Collection[int]) -> dict[str, Any] | None:
        """Return the state from which a run resumes with the prompts in flight, if their examples depend on more than
        the seed and the place. They are "open", and are the first that the resumed run is given."""
        if not self._remembers:
            return None
        again = sorted([*((id, self._issued[id]) for id in inflight), *self._again])
        more = {"next": self._position, "open": [id for id, _ in again], "again": again}
        return self.state_dict() | more | {"curriculum": self._curriculum.state_dict()}

    def resume_state(self, inflight: Mapping[int, dict[str, Any]], issued: int) -> dict[str, Any]:
        """Return the state from which a run resumes at the oldest prompt in flight, without those after it that are
        done. `inflight`: the state before each prompt in flight, the oldest first; `issued`: the id after the last
        prompt. Prompts in flight are sampled again: these are "open", and so is what an earlier attempt had in flight
        and this one has not started again. Of the prompts before "next" all others are done."""
        if (remembered := self.cut(inflight)) is not None:
            return remembered
        state = next(iter(inflight.values()), None) or self.state_dict()
        done = {id for id in range(state["position"], issued) if id not in inflight} | {*state["taken"]}
        after = max(state["position"], issued, *(id + 1 for id in done))
        open = [id for id in range(state["position"], after) if id not in done]
        return state | {"next": after, "open": open, "taken": sorted(done)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue at `state`, without the prompts listed in its "taken". Refuse the state of another seed or data set,
        whose order differs."""
        identity = {key: state.get(key) for key in (*self._identity, *(["sources"] if "sources" in state else []))}
        if identity != self._identity:
            raise RunError(
                f"expected a checkpoint whose prompts were ordered by {self._identity}, found {identity}: restore "
                'debug.seed, eval.size, [task] and every row of its file (task.bad_rows = "drop" leaves out rows '
                "that do not fit and keeps the order), or start from scratch with --job.fresh"
            )
        if "mixture" in state:
            raise RunError(
                "expected a checkpoint whose prompts this version drew from task.sources, found one of an earlier "
                "version, whose draws differ: start from scratch with --job.fresh"
            )
        if "position" in state:
            self._position = state["position"]
        else:  # an older checkpoint, whose prompts a torchdata loader counted
            self._position = state["loader"]["_sampler_iter_state"]["issued"]
        self._place = state.get("place", self._position)
        self._taken = set(state.get("taken", ()))
        self._again = deque((id, index) for id, index in state.get("again", ()))
        self._issued.clear()
        self._remembers = self._curriculum.on or bool(self._again)
        if "curriculum" in state:
            self._curriculum.load_state_dict(state["curriculum"])


def supervised(prompt: Prompt, tokenizer: TextTokenizer, opening: Opening | None = None) -> list[Sample]:
    """Return the prompt and the reference answer; the answer and EOS are trained on. Of a demonstration of several
    turns, the policy's texts are trained on, and never the messages that it reads. `opening`: how the environment
    begins the row."""
    if opening is not None:
        prompt = needed_part("prompts after an opening", "environment.name")(prompt, opening, tokenizer)
    if prompt.demonstration:
        return [demonstrated(prompt, tokenizer, opening.tools if opening is not None else ())]
    return [_answered(prompt, prompt.answer, tokenizer)]


def preference(prompt: Prompt, tokenizer: TextTokenizer) -> list[Sample]:
    """Return a pair for a policy: chosen, rejected."""
    return [_answered(prompt, answer, tokenizer) for answer in (prompt.answer, prompt.rejected)]


def with_answer(prompt: Sample, answer: Sample, most: int) -> Sample:
    """Return the prompt of one sample with the answer of another, cut to at most `most` tokens."""
    tokens = [*prompt.tokens[: prompt.prompt], *answer.tokens[answer.prompt :]][:most]
    mask = [*prompt.mask[: prompt.prompt], *answer.mask[answer.prompt :]][:most]
    return Sample(tokens=tokens, mask=mask, prompt=prompt.prompt, images=prompt.images)


def judged(prompt: Prompt, tokenizer: TextTokenizer) -> list[Sample]:
    """Return a pair for a reward model: chosen, rejected."""
    pair = preference(prompt, tokenizer)
    return [to_judge(sample.tokens, tokenizer.pad, len(prompt.tokens)) for sample in pair]


def to_judge(tokens: Sequence[int] | np.ndarray, pad: int, prompt: int = 0) -> Sample:
    """Return a sequence for a reward model, whose score is its value at the last token. Each position predicts the
    next token, so padding is appended, and only that one is under the mask."""
    return Sample(tokens=[*tokens, pad], mask=[0] * len(tokens) + [1], prompt=prompt)


def demonstrated(prompt: Prompt, tokenizer: TextTokenizer, tools: Sequence[dict[str, Any]] = ()) -> Sample:
    """Return a demonstration as a rollout has it. It ends before a message that the chat template cannot append."""
    tokens, mask = [*prompt.tokens], [0] * len(prompt.tokens)
    for text, observation in prompt.demonstration:
        sampled = [*tokenizer.encode(text), tokenizer.eos]
        tokens += sampled
        mask += [1] * len(sampled)
        if not observation:
            continue
        messages = [{"role": "user", "content": observation}] if isinstance(observation, str) else observation
        if prompt.messages:
            read = tokenizer.chat.extend(tokens, messages, tools or None)
        else:
            read = tokenizer.encode("".join(message["content"] for message in messages))
        if read is None:
            break
        tokens += read
        mask += [0] * len(read)
    return Sample(tokens=tokens, mask=mask, prompt=len(prompt.tokens), images=prompt.images)


def _answered(prompt: Prompt, answer: str, tokenizer: TextTokenizer) -> Sample:
    sampled = [*tokenizer.encode(answer), tokenizer.eos]
    length = len(prompt.tokens)
    mask = [0] * length + [1] * len(sampled)
    return Sample(tokens=[*prompt.tokens, *sampled], mask=mask, prompt=length, images=prompt.images)


SAMPLES = {"supervised": supervised, "preference": preference, "reward": judged}
"""The algorithm's kind -> the function that makes training samples of one prompt."""
