"""Demonstrations are read after what rollouts read: the environment's tools and its first observation of each row."""

import json
import os
import random
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from support.chat_folders import chat_folder
from support.played import playing
from titan_rl.config.sections import Config
from titan_rl.config.toml import load
from titan_rl.ext.agents.episodes import Reply, Step
from titan_rl.ext.agents.openings import Openings, openings
from titan_rl.tasks.prompts import supervised
from titan_rl.tasks.task import Task, load_task
from titan_rl.text.template import ChatSettings
from titan_rl.text.tokenizer import OWN_CHAT, TextTokenizer

TOKENIZERS: dict[str, ChatSettings | None] = {"chat": OWN_CHAT, "plain": None}


class Shop:
    """A first observation, and tools, that depend on the row."""

    def reset(self, row: Mapping[str, Any]) -> str:
        self._price = row["price"]
        self.tools = [self.price] if self._price > 1 else []
        return f"What costs {self._price} / 2?"

    def price(self, thing: str) -> int:
        """Look a price up."""
        return self._price

    def step(self, reply: Reply) -> Step:
        return Step("Again?", 1.0, reply.text == "b")


class Tools:
    """A set of tools, whose text ends the user's message."""

    def reset(self, price: int) -> str:
        return f" It is {price}."

    def add(self, n: int) -> int:
        """Add."""
        return n


class Seeded(Shop):
    def reset(self, row: Mapping[str, Any], task_seed: int) -> str:  # type: ignore[override]
        return f"Number {random.Random(task_seed).random()}?"


class Failing:
    def reset(self, row: Mapping[str, Any]) -> None:
        return row["no such column"]


class Exits:
    def reset(self, row: Mapping[str, Any]) -> None:
        if row["price"] > 1:
            os._exit(7)


def own_rows(seed: int, eval_size: int) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Return drawn rows of a user's own task."""
    draws = random.Random(seed)
    rows = [{"question": "Go", "answer": "b", "price": draws.randint(1, 9)} for _ in range(6)]
    return rows[eval_size:], rows[:eval_size]


class ByProblem:
    """Tools that depend on a generated problem."""

    def reset(self, row: Mapping[str, Any]) -> None:
        self.tools = [self.add] if row["b"] > 40 else []

    def add(self, n: int) -> int:
        """Add."""
        return n

    def step(self, reply: Reply) -> Step:
        return Step("", 1.0, True)


class SameTools(ByProblem):
    def reset(self, row: Mapping[str, Any]) -> None:
        self.tools = [self.add]


class ReadsProblems(ByProblem):
    def reset(self, row: Mapping[str, Any]) -> str:  # type: ignore[override]
        return "Add!" if row["b"] > 40 else ""


def case(folder: Path, name: str, template: str = "chat", python: str = "", **columns: Any) -> tuple[Config, Task]:
    rows = [{"question": "Go", "answer": "b", "price": n, **columns} for n in (1, 2)]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "small.toml").write_text(
        f"""[task]
name = "jsonl"
path = "{folder / "rows.jsonl"}"
template = "{template}"
[environment]
name = "{__name__}:{name}"
python = "{python}"
[cold_start]
steps = 1
[eval]
size = 0
"""
    )
    config = load(folder / "small.toml")
    return config, load_task(config.task, seed=0, eval_size=0)


def begun(folder: Path, name: str, template: str = "chat", python: str = "", **columns: Any) -> Openings:
    chat_folder(folder, "hermes")
    config, task = case(folder, name, template, python, **columns)
    return openings(config, task, TextTokenizer.load(folder, OWN_CHAT))


@pytest.mark.parametrize("python", ["", sys.executable])
@pytest.mark.parametrize(("name", "template"), [("Shop", "chat"), ("Shop", "plain"), ("Tools", "chat")])
def test_a_demonstration_reads_what_a_rollout_reads(tmp_path: Path, name: str, template: str, python: str) -> None:
    chat_folder(tmp_path, "hermes")
    config, task = case(tmp_path, name, template, python)
    tokenizer = TextTokenizer.load(tmp_path, OWN_CHAT)
    found = openings(config, task, tokenizer)
    assert not found.problem
    prompts = [task.prompt(example, id, tokenizer) for id, example in enumerate(task.train)]
    with playing(config.environment.name, tmp_path, chat=TOKENIZERS[template], python=python) as played:
        played.play(prompts, lambda id, turn: [*tokenizer.encode("b"), tokenizer.eos], end=tokenizer.eos)
    end = [*tokenizer.encode("b"), tokenizer.eos]
    for id, prompt in enumerate(prompts):
        (sample,) = supervised(prompt, tokenizer, found.by_row.get(prompt.where))
        assert list(sample.tokens) == [*played.contexts[id][0], *end]
        assert sample.prompt == len(played.contexts[id][0]) > len(prompt.tokens)


@pytest.mark.parametrize("template", ["chat", "plain"])
@pytest.mark.parametrize("seed", range(2))
def test_every_row_of_an_own_task_begins_as_its_rollouts_do(tmp_path: Path, seed: int, template: str) -> None:
    chat_folder(tmp_path, "hermes")
    config, _ = case(tmp_path, "Shop", template)
    config = replace(config, task=replace(config.task, name=f"{__name__}:own_rows", path=""))
    task, tokenizer = load_task(config.task, seed=seed, eval_size=0), TextTokenizer.load(tmp_path, OWN_CHAT)
    found = openings(config, task, tokenizer)
    assert not found.problem
    prompts = [task.prompt(example, id, tokenizer) for id, example in enumerate(task.train)]
    with playing(config.environment.name, tmp_path, chat=TOKENIZERS[template]) as played:
        played.play(prompts, lambda id, turn: [*tokenizer.encode("b"), tokenizer.eos], end=tokenizer.eos)
    for id, prompt in enumerate(prompts):
        (sample,) = supervised(prompt, tokenizer, found.by_row.get(prompt.where))
        assert list(sample.tokens[: sample.prompt]) == list(played.contexts[id][0])
        assert sample.prompt > len(prompt.tokens)


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("ByProblem", "because its demonstrations are read after the tools, which differ between problems, of"),
        ("ReadsProblems", "because its demonstrations are read after the first observation of"),
        ("SameTools", ""),
    ],
)
def test_generated_problems_must_begin_alike(tmp_path: Path, name: str, why: str) -> None:
    chat_folder(tmp_path, "hermes")
    config, _ = case(tmp_path, name)
    config = replace(config, task=replace(config.task, name="addition", path=""))
    task = load_task(config.task, seed=0, eval_size=0)
    train = [task.train[number] for number in (3, 50, 4, 51)]  # sums of small and large numbers
    found = openings(config, replace(task, train=train), TextTokenizer.load(tmp_path, OWN_CHAT))
    assert (why in found.problem and bool(found.problem)) == bool(why), found
    assert list(found.by_row) == [""] * (not why)


def test_the_turns_of_a_demonstration_follow_the_first_observation(tmp_path: Path) -> None:
    chat_folder(tmp_path, "hermes")
    config, task = case(tmp_path, "Shop")
    tokenizer = TextTokenizer.load(tmp_path, OWN_CHAT)
    prompt = task.prompt(task.train[0], 0, tokenizer)
    with playing(config.environment.name, tmp_path, chat=OWN_CHAT) as played:
        said = [[*tokenizer.encode(text), tokenizer.eos] for text in ("a", "b")]
        played.play([prompt], lambda id, turn: said[turn], end=tokenizer.eos)
    shown = replace(prompt, demonstration=[("a", [{"role": "user", "content": "Again?"}]), ("b", [])])
    found = openings(config, task, tokenizer)
    assert not found.problem
    (sample,) = supervised(shown, tokenizer, found.by_row[prompt.where])
    assert list(sample.tokens) == [*played.contexts[0][1], *said[1]]


@pytest.mark.parametrize("python", ["", sys.executable])
@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("Seeded", "expected a first observation and tools that depend on the row only, not on seeds"),
        ("Failing", "rows.jsonl:1, found KeyError: 'no such column' at "),
        ("Exits", "rows.jsonl:2, found "),
    ],
)
def test_an_opening_that_no_demonstration_can_follow_is_refused(
    tmp_path: Path, name: str, why: str, python: str
) -> None:
    found = begun(tmp_path, name, python=python)
    assert why in found.problem, found
    assert "exit code 7" in found.problem or name != "Exits"


def test_a_seed_in_the_row_makes_it_the_rows(tmp_path: Path) -> None:
    assert begun(tmp_path, "Seeded", seed=3).problem == ""
