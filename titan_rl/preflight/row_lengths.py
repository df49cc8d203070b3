"""Finds the rows of a task that a run cannot use, because they are too long or empty.

examples -> measure -> RowLength(prompt, answer, rejected) in tokens -> limits_on(config) -> unfit rows, and why
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from titan_rl.config.sections import Config
from titan_rl.tasks.task import Example, Task
from titan_rl.tasks.tokenizer import TextTokenizer


class RowLength(NamedTuple):
    """Tokens of the parts of a row; answers include EOS."""

    prompt: int
    answer: int = 0
    rejected: int = 0


@dataclass(frozen=True, slots=True)
class RowLimit:
    """The most tokens that one use of a row may take, and the key that sets it."""

    what: str
    most: int
    taken: Callable[[RowLength], int]
    key: str

    def refuses(self, row: RowLength) -> str:
        """Return why a row cannot be used, or ""."""
        if row.prompt == 0:
            return "expected a prompt of at least 1 token, found none"
        if (taken := self.taken(row)) <= self.most:
            return ""
        return f"expected {self.what}, found {taken}; raise {self.key} by at least {taken - self.most}"


def limits_on(config: Config, *, heldout: bool) -> list[RowLimit]:
    """Return the limits on training rows or on held-out rows. A packed row has a place for each token but the last."""
    kind, seq_len, new = config.algorithm.kind, config.training.seq_len, config.rollout.max_new_tokens
    cold = config.cold_start
    key = "generator.max_model_len" if config.generator.max_model_len else "training.seq_len"
    longest = config.generator.max_model_len or seq_len
    sampled = RowLimit(
        f"a prompt of at most {longest - new} tokens ({key} = {longest}, rollout.max_new_tokens = {new})",
        longest - new,
        lambda row: row.prompt,
        f"{key} (or lower rollout.max_new_tokens)",
    )
    seq = f"(training.seq_len = {seq_len})"
    answered = RowLimit(
        f"at most {seq_len + 1} tokens of prompt, answer and EOS {seq}",
        seq_len + 1,
        lambda row: row.prompt + row.answer,
        "training.seq_len",
    )
    extra = 2 if kind == "reward" else 0  # each answer of a pair is followed by padding, where its score is read
    pair = RowLimit(
        f"a pair of at most {seq_len} tokens, as both answers share a packed row {seq}",
        seq_len,
        lambda row: 2 * row.prompt + row.answer + row.rejected - 2 + extra,
        "training.seq_len",
    )
    judged = RowLimit(
        f"at most {seq_len} tokens of prompt, answer and EOS {seq}",
        seq_len,
        lambda row: row.prompt + max(row.answer, row.rejected),
        "training.seq_len",
    )
    if heldout:
        return [judged if kind == "reward" else sampled]
    uses = {
        "rl": [sampled, *([answered] if cold.steps else [])],
        "supervised": [answered],
        "preference": [pair],
        "reward": [pair],
    }[kind]
    return [*uses, *([sampled] if cold.steps and cold.stop_at and kind != "rl" else [])]


def measure(example: Example, task: Task, tokenizer: TextTokenizer, *, answers: bool) -> RowLength:
    """Return the tokens of a row as the run will read them."""
    try:
        prompt = tokenizer.prompt(example.prompt, task.template, task.system_prompt)
    except Exception as error:  # a template may raise whatever it likes
        why = f"{type(error).__name__}: {error}"
        raise ValueError(f"{example.where}: expected a prompt that the chat template accepts, found {why}") from error
    if not answers:
        return RowLength(len(prompt))
    answer, rejected = (len(tokenizer.encode(text)) + 1 for text in (example.answer, example.rejected))
    return RowLength(len(prompt), answer, rejected)


def unfit_rows(config: Config, task: Task, tokenizer: TextTokenizer) -> tuple[dict[int, str], dict[int, str]]:
    """Return the training examples and the held-out examples that the run cannot use: index -> why."""
    alike: dict[tuple[int, ...], RowLength] = {}
    answers = config.algorithm.kind != "rl" or config.cold_start.steps > 0  # else only prompts are read
    one_token_each = config.task.name == "addition" and not config.model.hf_assets_path  # of the characters

    def length(example: Example) -> RowLength:
        characters = (len(example.prompt), len(example.answer), len(example.rejected))
        if not one_token_each or characters not in alike:
            alike[characters] = measure(example, task, tokenizer, answers=answers)
        return alike[characters]

    def unfit(examples: Sequence[Example], heldout: bool) -> dict[int, str]:
        limits, found = limits_on(config, heldout=heldout), dict[int, str]()
        for i, row in enumerate(map(length, examples)):
            if why := next((why for limit in limits if (why := limit.refuses(row))), ""):
                found[i] = why
        return found

    return unfit(task.train, False), unfit(task.heldout, True)


def first_unfit(examples: Sequence[Example], unfit: Mapping[int, str]) -> str:
    """Return where the first of the unfit rows is, and why it cannot be used."""
    index = min(unfit)
    return f"{examples[index].where or f'task {examples[index].prompt!r}'}: {unfit[index]}"
