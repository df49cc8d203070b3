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
