"""Prompts of a user's loop: trained on, left out, and where a resumed run continues."""

import json
from pathlib import Path
from typing import Any

from support.judged_groups import rollout
from titan_rl.config.sections import Config
from titan_rl.record.ledger import Ledger, bounds_of
from titan_rl.tasks.prompts import PromptSource
from titan_rl.tasks.task import load_task
from titan_rl.text import tokenizer as characters
from titan_rl.text.tokenizer import TextTokenizer
from titan_rl.tools.inspect.run_files import RunFiles
from titan_rl.train.prompt_cursor import PromptCursor
from titan_rl.wire.types import Group, Prompt


def cursor(folder: Path, state: dict[str, Any] | None = None) -> PromptCursor:
    characters.build(folder)
    task = load_task(Config().task, seed=0, eval_size=4, pairs=False)
    prompts = PromptSource(task, TextTokenizer.load(folder), seed=0)
    if state:
        prompts.load_state_dict(state)
    ledger = Ledger(folder)
    ledger.begun(0, 0, (), bounds=bounds_of(Config()))
    return PromptCursor(prompts, ledger)


def sampled(prompts: list[Prompt]) -> list[Group]:
    return [Group(prompt, [rollout(1.0), rollout(0.0)]) for prompt in prompts]


def test_earlier_prompts_that_a_step_leaves_out_are_dropped(tmp_path: Path) -> None:
    made = cursor(tmp_path)
    groups = sampled([made.next(1) for _ in range(4)])
    for group in groups:
        made.sampled(group)
    made.trained(1, [groups[0], groups[2]])
    assert [group.prompt.id for group in made.take_dropped()] == [1]
    assert made.take_dropped() == []
    assert made.backlog.inflight == made.backlog.finished == 1, "a later step may train on prompt 3"
    made.close()
    found = [(each["event"], each.get("prompt")) for each in RunFiles(tmp_path).ledger() if each["event"] == "dropped"]
    assert found == [("dropped", 1)]


def test_a_resumed_loop_is_given_what_was_in_flight_and_then_the_next(tmp_path: Path) -> None:
    made = cursor(tmp_path)
    groups = sampled([made.next(1) for _ in range(6)])
    for group in groups[:3]:
        made.sampled(group)
    made.trained(1, groups[:2])
    state = json.loads(json.dumps(made.state()))
    made.close()
    assert state["open"] == [2, 3, 4, 5]
    resumed = cursor(tmp_path / "again", state)
    again = [resumed.next(2) for _ in range(5)]
    assert [prompt.id for prompt in again] == [2, 3, 4, 5, 6]
    assert [prompt.text for prompt in again[:4]] == [group.prompt.text for group in groups[2:]]
    resumed.close()


def test_a_group_is_trained_on_twice_without_a_second_visit(tmp_path: Path) -> None:
    made = cursor(tmp_path)
    groups = sampled([made.next(1) for _ in range(2)])
    made.trained(1, groups)
    made.trained(2, groups)
    assert made.state()["open"] == []
    made.close()
