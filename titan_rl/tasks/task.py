"""Tasks: training examples, held-out examples, and the template that makes an example a Prompt.

    config.TaskSection -> load_task -> Task(train, heldout) -> task.prompt -> Prompt

"addition", "calc", "hunt" and "reasoning_gym" generate their own data; "jsonl" reads files, and
"package.module:function" is a user's own (docs/data.md).
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal

import numpy as np

from titan_rl.config import sections as config
from titan_rl.config.data_sources import DataSource, data_sources, source_of
from titan_rl.config.eval_sets import EvalSet
from titan_rl.config.plain_files import text_of
from titan_rl.tasks.examples import GYM, EndlessExamples, Example, PromptTokens, SourceRows, read_source
from titan_rl.tasks.games import Game, game_of
from titan_rl.tasks.own_task import own_examples
from titan_rl.text.template import ChatSettings, is_inline
from titan_rl.text.tokenizer import TextTokenizer, messages_of
from titan_rl.wire.parts import needed_part
from titan_rl.wire.seeds import derive, shuffled
from titan_rl.wire.sessions import Opening
from titan_rl.wire.types import Prompt

MOST_PLAYED = 20_000  # training problems of a game
MOST_KNOWN = 512  # endless problems that are looked at before the run


@dataclass(frozen=True, slots=True)
class TaskPart:
    """The training examples of one source of [task.sources]."""

    name: str
    count: int
    weight: float  # relative frequency of its draws
    system_prompt: str
    template: str  # Jinja; empty: the tokenizer's own
    kwargs: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Task:
    """Examples to train on, examples to evaluate on, and the template of both."""

    train: Sequence[Example]
    heldout: Sequence[Example]
    template: Literal["plain", "chat"] = "plain"
    system_prompt: str = ""
    unfit: Collection[int] = frozenset()  # indices of training examples that are left out, because they do not fit
    game: Game | None = None  # which demonstrates its problems
    seed: int = 0  # for the demonstrations
    notes: tuple[str, ...] = ()  # for the user, about the rows
    bad_rows: int = 0  # that task.bad_rows left out
    curriculum: config.CurriculumSection = config.CurriculumSection()  # noqa: RUF009 (frozen)
    parts: Sequence[TaskPart] = ()  # the training examples' sources, in order, if there are several
    openings: Mapping[str, Opening] = field(default_factory=dict)
    """How the environment begins each training row, by its file:line: what supervised steps read before an answer."""

    @property
    def endless(self) -> bool:
        return isinstance(self.train, EndlessExamples)

    @property
    def known(self) -> Sequence[Example]:
        """Return the training examples that can all be looked at before the run: of endless ones, the first."""
        return self.train[:MOST_KNOWN] if self.endless else self.train

    def prompt(self, example: Example, id: int, tokenizer: TextTokenizer) -> Prompt:
        """Return the example as the policy reads it. For a chat, `text` is the rendered template."""
        prompt, tokens, expanded, images = self._read(example, tokenizer)
        text, messages = prompt, ()
        if self.template == "chat":
            text, messages = tokenizer.decode(tokens, skip_special=False), messages_of(prompt, self._system(example))
        demonstration = example.demonstration
        if self.game:
            demonstration = self.game.demonstration(example.row, derive(self.seed, "demonstration", id))
        columns = (example.answer, example.row, example.rejected)
        return Prompt(id, str(text), expanded, *columns, messages, demonstration, example.where, images)

    def read(self, example: Example, tokenizer: TextTokenizer) -> list[int]:
        """Return the tokens of the example, by the chat template and the system prompt of its source."""
        return self._read(example, tokenizer).expanded

    def _read(self, example: Example, tokenizer: TextTokenizer) -> PromptTokens:
        """Return the rendered prompt and its tokens."""
        reader, system = self.reader(example, tokenizer), self._system(example)
        if example.images:
            return needed_part("image tokens", "task.images_key")(example, reader, self.template, system)
        tokens = reader.prompt(example.prompt, self.template, system)
        return PromptTokens(example.prompt, tokens, tokens)

    def rendered(self, example: Example, tokenizer: TextTokenizer) -> str:
        """Return the text whose tokens a chat's example has, with marks that the renderer of `reader` reads."""
        return self.reader(example, tokenizer).chat.render(messages_of(example.prompt, self._system(example)))

    def reader(self, example: Example, tokenizer: TextTokenizer) -> TextTokenizer:
        """Return the tokenizer with the chat template of the example's source."""
        part = self._part(example)
        if part is None or self.template != "chat":
            return tokenizer
        return with_chat(tokenizer, replace(tokenizer.chat_settings, template=part.template, kwargs=part.kwargs))

    def _system(self, example: Example) -> str:
        part = self._part(example)
        return self.system_prompt if part is None else part.system_prompt

    def _part(self, example: Example) -> TaskPart | None:
        return next((part for part in self.parts if part.name == example.source), None)


@lru_cache(maxsize=32)
def with_chat(tokenizer: TextTokenizer, settings: ChatSettings) -> TextTokenizer:
    """Return a tokenizer that renders chats in another way. It parses its template once."""
    return tokenizer if settings == tokenizer.chat_settings else replace(tokenizer, chat_settings=settings)


def template_text(template: str) -> str:
    """Return the template, or the text of the file that it names."""
    return text_of(Path(template)) if template and not is_inline(template) else template


def chat_settings(run: config.Config) -> ChatSettings:
    """Return how a run renders chats. A template's file is read once: it may change while the run starts processes."""
    task, stops = run.task, tuple(run.rollout.stop_token_ids)
    return ChatSettings(template_text(task.chat_template), task.chat_template_kwargs, task.thinking, stops)


def load_task(task: config.TaskSection, *, seed: int, eval_size: int, pairs: bool = False) -> Task:
    """Load the task of [task], with at most `eval_size` held-out examples, and with rejected answers if `pairs`."""
    game = game_of(task.name)
    if game is not None:
        train, heldout = played(task.name, seed, eval_size)
    elif task.name == "addition":
        train, heldout = addition(seed, eval_size)
    elif ":" in task.name:
        train, heldout = own_examples(task, seed, eval_size, pairs=pairs)
    elif task.name == GYM:
        train, heldout = needed_part("task reasoning_gym", "task.name")(task, seed, eval_size)
    else:
        return _of_files(task, eval_size, pairs)
    return Task(train, heldout, task.template, task.system_prompt, game=game, seed=seed)


def _of_files(task: config.TaskSection, eval_size: int, pairs: bool) -> Task:
    read = [(source, read_source(source, pairs=pairs)) for source in data_sources(task)]
    parts = [_part(source, len(rows.examples)) for source, rows in read if source.name]
    train = [example for _, rows in read for example in rows.examples]
    if eval_size:
        source = source_of(task, task.eval_path, "task.eval_path")
        read.append((source, read_source(source, eval_size, pairs=pairs)))
    return Task(
        train,
        read[-1][1].examples if eval_size else [],
        task.template,
        task.system_prompt,
        notes=tuple(note for source, rows in read for note in rows.notes(source.path_key)),
        bad_rows=sum(rows.bad for _, rows in read),
        parts=parts,
    )


def _part(source: DataSource, count: int) -> TaskPart:
    template = template_text(source.chat_template)
    return TaskPart(source.name, count, source.weight, source.system_prompt, template, source.chat_template_kwargs)


def set_rows(run: config.Config, chosen: EvalSet) -> SourceRows:
    """Return the rows of an evaluation set that has files."""
    return read_source(source_of(run.task, chosen.path, f"eval.sets.{chosen.name}.path"), chosen.size or None)


@lru_cache(maxsize=1)
def addition(seed: int, eval_size: int) -> tuple[list[Example], list[Example]]:
    """Return all two-digit sums, split by the seed. The answer's three digits are written least significant first, so
    that each digit depends only on digits already read and a carry already computed."""
    wrong = np.random.PCG64(np.random.SeedSequence(seed, spawn_key=(1,))).random_raw(10_000).tolist()
    sums = [
        Example(f"{a:02d}+{b:02d}=", answer, {"a": a, "b": b}, rejected_answer(answer, wrong[100 * a + b]))
        for a in range(100)
        for b in range(100)
        for answer in [f"{a + b:03d}"[::-1]]
    ]
    if eval_size >= len(sums):
        raise ValueError(f"eval.size: expected less than addition's {len(sums)} problems, found {eval_size}")
    held = set(shuffled(len(sums), seed)[:eval_size].tolist())
    return [e for i, e in enumerate(sums) if i not in held], [sums[i] for i in sorted(held)]


@lru_cache(maxsize=1)
def played(name: str, seed: int, eval_size: int) -> tuple[list[Example], list[Example]]:
    """Return problems of a game, drawn and split by the seed."""
    game = game_of(name)
    assert game is not None, "checks refuse a game that this installation lacks"
    if eval_size >= game.count:
        raise ValueError(f"eval.size: expected less than {name}'s {game.count} problems, found {eval_size}")
    rows = [game.row(int(number)) for number in shuffled(game.count, seed)[: eval_size + MOST_PLAYED]]
    examples = [Example(game.prompt(row), game.answer(row), row) for row in rows]
    return examples[eval_size:], examples[:eval_size]


def rejected_answer(answer: str, draw: int) -> str:
    """Return a wrong answer as a learner would give it: one digit off (most often), missing, or added."""
    kind, place, shift = draw % 8, draw // 8 % len(answer), draw // 64 % 9 + 1
    if kind == 0:
        return answer[:place] + answer[place + 1 :]
    if kind == 1:
        return answer[:place] + str(shift) + answer[place:]
    return answer[:place] + str((int(answer[place]) + shift) % 10) + answer[place + 1 :]
