"""Finds the rows of a task that a run cannot use, because they are too long or empty.

examples -> lengths -> RowLength(prompt, answer, rejected) in tokens -> limits_on(config) -> unfit rows, and why
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from titan_rl.agents.games import GAMES
from titan_rl.config.sections import Config
from titan_rl.tasks.announced import announced
from titan_rl.tasks.examples import MOST_NAMED, BadRows, Example
from titan_rl.tasks.prompts import supervised
from titan_rl.tasks.task import Task
from titan_rl.text.tokenizer import TextTokenizer

CHUNK = 512  # rows that are tokenized at once, on all cores
SURELY_TOKENIZED = 1_000_000  # characters of a text whose tokens are counted, however few are allowed


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
    key: str = "training.seq_len"

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
    prompt = f"a prompt of at most {longest - new} tokens ({key} = {longest}, rollout.max_new_tokens = {new})"
    lower = f"{key} (or lower rollout.max_new_tokens)"
    sampled = RowLimit(prompt, longest - new, lambda row: row.prompt, lower)
    row_size = f"(training.seq_len = {seq_len})"
    whole = f"tokens of prompt, answer and EOS {row_size}"
    answered = RowLimit(f"at most {seq_len + 1} {whole}", seq_len + 1, lambda row: row.prompt + row.answer)
    judged = RowLimit(f"at most {seq_len} {whole}", seq_len, lambda row: row.prompt + max(row.answer, row.rejected))
    extra = 2 if kind == "reward" else 0  # each answer of a pair is followed by padding, where its score is read
    pair = RowLimit(
        f"a pair of at most {seq_len} tokens, as both answers share a packed row {row_size}",
        seq_len,
        lambda row: 2 * row.prompt + row.answer + row.rejected - 2 + extra,
    )
    if heldout:
        return [judged if kind == "reward" else sampled]
    uses = {"supervised": [answered], "preference": [pair], "reward": [pair]}.get(kind, [sampled])
    uses = [*uses, *([answered] if kind == "rl" and cold.steps else [])]
    return [*uses, *([sampled] if cold.steps and cold.stop_at and kind != "rl" else [])]


def lengths(
    examples: Sequence[Example], task: Task, tokenizer: TextTokenizer, *, answers: bool, most: int
) -> Iterator[RowLength | str]:
    """Yield the tokens of each row as the run will read them, or why it cannot be read. A text that cannot fit
    `most` tokens is not tokenized."""
    longest = most * tokenizer.longest_token

    def tokens(texts: Sequence[str], special: bool = False) -> list[int]:
        short = [text if len(text) <= max(longest, SURELY_TOKENIZED) else "" for text in texts]
        encoded = tokenizer.tokenizer.encode_batch_fast(short, add_special_tokens=special)
        whole = zip(texts, short, encoded, strict=True)
        return [
            len(encoded) if text == short else len(text) // tokenizer.longest_token for text, short, encoded in whole
        ]

    def prompts(chunk: Sequence[Example]) -> list[int | str]:
        if task.template == "plain":
            return list(tokens([str(example.prompt) for example in chunk], special=True))
        return [_chat_tokens(example, task, tokenizer, longest) for example in chunk]

    for start in range(0, len(examples), CHUNK):
        chunk = examples[start : start + CHUNK]
        answered = tokens([e.answer for e in chunk]) if answers else [-1] * len(chunk)
        rejected = tokens([e.rejected for e in chunk]) if answers else [-1] * len(chunk)
        for example, prompt, answer, other in zip(chunk, prompts(chunk), answered, rejected, strict=True):
            if isinstance(prompt, str):
                yield prompt
            elif answers and (example.demonstration or example.where in task.openings):
                yield _demonstrated_length(example, task, tokenizer)
            else:
                yield RowLength(prompt, answer + 1, other + 1)


def _demonstrated_length(example: Example, task: Task, tokenizer: TextTokenizer) -> RowLength | str:
    try:
        (sample,) = supervised(task.prompt(example, 0, tokenizer), tokenizer, task.openings.get(example.where))
    except Exception as error:
        return _refused(example, "a demonstration", error)
    return RowLength(sample.prompt, len(sample.tokens) - sample.prompt)


def _chat_tokens(example: Example, task: Task, tokenizer: TextTokenizer, longest: int) -> int | str:
    characters = len(str(example.prompt))
    if characters > max(longest, SURELY_TOKENIZED):
        return characters // tokenizer.longest_token
    try:
        return len(task.read(example, tokenizer))
    except Exception as error:
        return _refused(example, "a prompt", error)


def _refused(example: Example, what: str, error: Exception) -> str:
    """Describe the error of a chat template, which may raise any."""
    return f"{example.where}: expected {what} that the chat template accepts, found {type(error).__name__}: {error}"


def unfit_rows(config: Config, task: Task, tokenizer: TextTokenizer) -> tuple[dict[int, str], dict[int, str]]:
    """Return the training examples and the held-out examples that the run cannot use: index -> why. BadRows names those
    that cannot even be read."""
    if task.template == "chat":
        try:
            tokenizer.prompt("1", "chat")
        except Exception as error:
            why = f"{type(error).__name__}: {error}"
            expected = f"a tokenizer in {tokenizer.folder} that renders chats"
            raise BadRows([f"task.template: expected {expected}, found {why}"], "") from error
    answers = reads_answers(config)
    one_token_each = config.task.name in ("addition", *GAMES) and not config.model.hf_assets_path  # one per character

    def measured(examples: Sequence[Example], most: int) -> Iterator[RowLength | str]:
        if not one_token_each:
            yield from lengths(examples, task, tokenizer, answers=answers, most=most)
            return
        by_characters: dict[tuple[int, ...], RowLength | str] = {}
        for example in examples:
            characters = (len(example.prompt), len(example.answer), len(example.rejected))
            if characters not in by_characters:
                (by_characters[characters],) = lengths([example], task, tokenizer, answers=answers, most=most)
            yield by_characters[characters]

    def unfit(examples: Sequence[Example], heldout: bool) -> dict[int, str]:
        limits, reasons, unreadable = limits_on(config, heldout=heldout), dict[int, str](), list[str]()
        rows = measured(examples, max(limit.most for limit in limits))
        what = "measuring held-out rows" if heldout else "measuring training rows"
        for i, row in enumerate(announced(rows, what, len(examples))):
            if isinstance(row, str):
                unreadable.append(row)
            elif why := next((why for limit in limits if (why := limit.refuses(row))), ""):
                reasons[i] = why
        if unreadable:
            raise BadRows(unreadable, config.task.eval_path if heldout else config.task.path or "task.sources")
        return reasons

    return unfit(task.known, False), unfit(task.heldout, True)


def reads_answers(config: Config) -> bool:
    """Return whether the run trains on reference answers, not only on prompts."""
    return config.algorithm.kind != "rl" or config.cold_start.steps > 0


def fits(config: Config, task: Task, tokenizer: TextTokenizer) -> Callable[[Example], bool]:
    """Return a predicate: whether the run can train on an example."""
    limits = limits_on(config, heldout=False)
    most = max(limit.most for limit in limits)

    def fit(example: Example) -> bool:
        (row,) = lengths([example], task, tokenizer, answers=reads_answers(config), most=most)
        return not isinstance(row, str) and not any(limit.refuses(row) for limit in limits)

    return fit


def other_unfit(examples: Sequence[Example], unfit: Mapping[int, str]) -> str:
    """Return where the other unfit rows are, as far as a line can hold them."""
    others = [examples[i].where.rpartition(":") for i in sorted(unfit)[1:MOST_NAMED] if examples[i].where]
    files = {file for file, _, _ in others} | {examples[min(unfit)].where.rpartition(":")[0]}
    lines = ", ".join(line if len(files) == 1 else f"{Path(file).name}:{line}" for file, _, line in others)
    more = "" if len(unfit) <= MOST_NAMED else ", ..."
    return f" (the others: {'line ' if len(files) == 1 else ''}{lines}{more})" if lines else ""


def first_unfit(examples: Sequence[Example], unfit: Mapping[int, str]) -> str:
    """Return where the first of the unfit rows is, and why it cannot be used."""
    index = min(unfit)
    return f"{examples[index].where or f'task {examples[index].prompt!r}'}: {unfit[index]}"
