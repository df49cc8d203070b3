"""Finds the rows of a task that a run cannot use, because they are too long or empty.

examples -> lengths -> RowLength(prompt, answer, rejected) in tokens -> limits_on(config) -> unfit rows, and why

The lengths of a large data set are cached by content (length_cache.py).
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from titan_rl.config.sections import Config
from titan_rl.ext.row_lengths.length_cache import RowLength, Rows, cached, digest_of
from titan_rl.tasks.announced import announced
from titan_rl.tasks.examples import BadRows, Example
from titan_rl.tasks.games import GAMES
from titan_rl.tasks.prompts import supervised
from titan_rl.tasks.task import Task
from titan_rl.text.inspection import unusable
from titan_rl.text.template import own_template
from titan_rl.text.tokenizer import TextTokenizer

CHUNK = 512  # rows that are tokenized at once, on all cores
SURELY_TOKENIZED = 1_000_000  # characters of a text whose tokens are counted, even where few are allowed
CACHED_ROWS = 5_000  # fewer are tokenized in less than a second


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
    cold, online = config.cold_start, config.algorithm.online_pairs
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
        lambda row: 2 * row.prompt + (2 * new if online else row.answer + row.rejected) - 2 + extra,
    )
    if heldout:
        return [judged if kind == "reward" else sampled]
    uses = {"supervised": [answered], "preference": [pair], "reward": [pair]}.get(kind, [sampled])
    uses = [*uses, *([pair] if online else []), *([answered] if kind == "rl" and cold.steps else [])]
    return [*uses, *([sampled] if cold.steps and cold.stop_at and kind != "rl" else [])]


def lengths(examples: Sequence[Example], task: Task, tokenizer: TextTokenizer, *, answers: bool, most: int) -> Rows:
    """Yield the tokens of each row as the run will read them, or why it cannot be read. A text that cannot fit
    `most` tokens is not tokenized."""
    longest = _longest_text(tokenizer, most)

    def tokens(texts: Sequence[str], special: bool = False) -> list[int]:
        short = [text if len(text) <= longest else "" for text in texts]
        encoded = tokenizer.tokenizer.encode_batch_fast(short, add_special_tokens=special)
        whole = zip(texts, short, encoded, strict=True)
        return [
            len(encoded) if text == short else len(text) // tokenizer.longest_token for text, short, encoded in whole
        ]

    def prompts(chunk: Sequence[Example]) -> list[int | str]:
        if task.template == "plain" and not any(example.images for example in chunk):
            return list(tokens([str(example.prompt) for example in chunk], special=True))
        return _chat_lengths(chunk, task, tokenizer, longest)

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


def cached_lengths(
    examples: Sequence[Example], task: Task, tokenizer: TextTokenizer, *, answers: bool, most: int
) -> Rows:
    """Yield what `lengths` does, from the cache if that is known."""
    measured = lengths(examples, task, tokenizer, answers=answers, most=most)
    templates = own_template(tokenizer.folder, tokenizer.settings)
    sources = (*templates, tokenizer.chat_settings.template, *(part.template for part in task.parts))
    dated = any("strftime_now" in source for source in sources)  # tomorrow's prompts may have other lengths
    seen = any(example.images for example in examples)  # whose tokens are the processor's
    if len(examples) < CACHED_ROWS or task.game or seen or (dated and task.template == "chat"):
        yield from measured
        return

    def parts() -> Iterator[Any]:
        yield tokenizer.tokenizer.to_str().encode()
        yield tokenizer.settings, tokenizer.bos, tokenizer.eos_ids, tokenizer.chat_settings, templates
        yield task.template, task.system_prompt, task.parts
        yield answers, _longest_text(tokenizer, most)
        for e in examples:
            yield e.prompt, *((e.answer, e.rejected, e.demonstration) if answers else ()), e.source, e.where
            if answers and (opening := task.openings.get(e.where)) is not None:
                yield type(opening.observation).__name__, opening

    yield from cached(digest_of(parts()), measured)


def _longest_text(tokenizer: TextTokenizer, most: int) -> int:
    """Return the characters of the longest text that is tokenized where `most` tokens are allowed."""
    return max(most * tokenizer.longest_token, SURELY_TOKENIZED)


def _demonstrated_length(example: Example, task: Task, tokenizer: TextTokenizer) -> RowLength | str:
    try:
        (sample,) = supervised(task.prompt(example, 0, tokenizer), tokenizer, task.openings.get(example.where))
    except Exception as error:
        return _refused(example, "a demonstration", error)
    return RowLength(sample.prompt, len(sample.tokens) - sample.prompt)


def _chat_lengths(chunk: Sequence[Example], task: Task, tokenizer: TextTokenizer, longest: int) -> list[int | str]:
    """Return the tokens of each prompt, or why the chat template refuses it."""
    found: dict[int, int | str] = {}
    rendered: dict[TextTokenizer, dict[int, str]] = {}  # the templates of sources have their own renderers
    for i, example in enumerate(chunk):
        try:
            if (characters := len(str(example.prompt))) > longest:
                found[i] = characters // tokenizer.longest_token
            elif example.images or task.template == "plain":
                found[i] = len(task.read(example, tokenizer))
            else:
                rendered.setdefault(task.reader(example, tokenizer), {})[i] = task.rendered(example, tokenizer)
        except Exception as error:
            found[i] = _refused(example, "a prompt", error)
    for reader, texts in rendered.items():
        try:
            found |= zip(texts, reader.chat.outside.lengths([*texts.values()]), strict=True)
        except Exception:  # one text has no tokens: which one?
            for i in texts:
                try:
                    found[i] = len(task.read(chunk[i], tokenizer))
                except Exception as error:
                    found[i] = _refused(chunk[i], "a prompt", error)
    return [found[i] for i in range(len(chunk))]


def _refused(example: Example, what: str, error: Exception) -> str:
    """Describe the error of a chat template, which may raise any."""
    return f"{example.where}: expected {what} that the chat template accepts, found {type(error).__name__}: {error}"


def unfit_rows(config: Config, task: Task, tokenizer: TextTokenizer) -> tuple[dict[int, str], dict[int, str]]:
    """Return the training examples and the held-out examples that the run cannot use: index -> why. BadRows names those
    that cannot even be read."""
    if task.template == "chat" and (why := unusable(tokenizer)):
        expected = f"a chat template of {tokenizer.folder} that renders one question"
        raise BadRows([f"task.template: expected {expected}, found: {why}"], "")
    answers = reads_answers(config)
    one_token_each = config.task.name in ("addition", *GAMES) and not config.model.hf_assets_path  # one per character

    def measured(examples: Sequence[Example], most: int) -> Rows:
        if not one_token_each:
            yield from cached_lengths(examples, task, tokenizer, answers=answers, most=most)
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
