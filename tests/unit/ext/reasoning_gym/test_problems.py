"""Endless problems of reasoning-gym: drawn by the seed, mixed by weights, held out, scored by the package."""

import random
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from titan_rl.config.choices import NestedTables
from titan_rl.config.sections import TaskSection
from titan_rl.ext.reasoning_gym.checks import _endless_sets
from titan_rl.ext.reasoning_gym.problems import ENDLESS, Problems, Unfit, procedural, set_problems
from titan_rl.preflight import child
from titan_rl.tasks.prompts import PromptSource
from titan_rl.tasks.rewards import Answered
from titan_rl.tasks.task import load_task
from titan_rl.tasks.verifiers import VERIFIERS
from titan_rl.text.tokenizer import TextTokenizer, build
from titan_rl.wire.types import Prompt

SUMS: dict[str, Any] = {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1}
SETS: NestedTables = {"chain_sum": SUMS | {"weight": 3}, "gcd": {"max_value": 20}}
TASK = TaskSection(name="reasoning_gym", datasets=SETS)


def test_problems_depend_on_the_seed_and_their_number_only() -> None:
    first, heldout = procedural(TASK, 7, 16)
    again, _ = procedural(TASK, 7, 16)
    other, other_heldout = procedural(TASK, 8, 16)
    order = [40, 3, 0, 3]
    assert [first[k] for k in order] == [again[k] for k in order] == [first[:41][k] for k in order]
    assert [first[k].prompt for k in range(20)] != [other[k].prompt for k in range(20)]
    assert heldout != other_heldout
    assert first[ENDLESS - 1].answer  # there is no last problem that a run could reach


def test_a_seed_gives_these_problems() -> None:
    train, heldout = procedural(replace(TASK, datasets={"chain_sum": SUMS}), 0, 1)
    shown = [(str(example.prompt).rpartition(": ")[2], example.answer) for example in [*train[:3], *heldout]]
    assert shown == [("9 - 2 =", "7"), ("9 + 5 =", "14"), ("9 + 6 =", "15"), ("8 - 6 =", "2")]


def test_data_sets_are_drawn_by_their_weights() -> None:
    train, _ = procedural(TASK, 0, 0)
    names = [example.row["dataset"] for example in train[:2000]]
    assert abs(names.count("chain_sum") / 2000 - 0.75) < 0.04  # four standard deviations


def test_held_out_and_long_problems_are_passed_over() -> None:
    train, heldout = procedural(replace(TASK, datasets={"chain_sum": SUMS}), 0, 32)  # 162 different ones exist
    shown = {str(example.prompt) for example in heldout}
    unfit = Unfit(train, heldout, lambda example: len(example.prompt) < 70)
    passed = [k for k in range(200) if k in unfit]
    assert passed == [k for k in range(200) if train[k].prompt in shown or len(train[k].prompt) >= 70]
    assert 0 < len(passed) < 200


def test_a_source_of_prompts_continues_where_it_was(tmp_path: Path) -> None:
    build(tmp_path)
    tokenizer = TextTokenizer.load(tmp_path)
    task = load_task(TASK, seed=3, eval_size=8)
    assert isinstance(task.train, Problems)
    task = replace(task, unfit=Unfit(task.train, task.heldout, lambda example: True))
    source = PromptSource(task, tokenizer, seed=5)
    for _ in range(4):
        source.next()
    state = source.state_dict()
    following = [source.next() for _ in range(6)]
    resumed = PromptSource(task, tokenizer, seed=5)
    resumed.load_state_dict(state)
    assert [resumed.next() for _ in range(6)] == following


def test_answers_are_scored_by_the_package() -> None:
    score = VERIFIERS["reasoning_gym"]({})
    example = procedural(replace(TASK, datasets={"chain_sum": SUMS}), 0, 0)[0][0]
    prompt = Prompt(0, str(example.prompt), [], example.answer, example.row)
    assert score(prompt, Answered(f" {example.answer}\n")) == 1
    assert score(prompt, Answered(f"I add.<answer>{example.answer}</answer>")) == 1
    assert 0 < score(prompt, Answered(f"The answer is {example.answer}, I think.")) < 0.2
    assert score(prompt, Answered("")) == 0
    by_number = VERIFIERS["reasoning_gym"]({"extract": "number"})
    assert by_number(prompt, Answered(f"9 and 2 make {example.answer}, I think.")) == 1
    assert by_number(prompt, Answered("none")) == by_number(prompt, Answered("7 or 8")) == 0
    with pytest.raises(ValueError, match=r'expected extract to be "tag" or "number", found'):
        VERIFIERS["reasoning_gym"]({"extract": "last"})
    with pytest.raises(ValueError, match=r'judges only problems of task\.name = "reasoning_gym"'):
        score(Prompt(0, "", [], ""), Answered("1"))


@pytest.mark.parametrize(
    ("datasets", "problem"),
    [
        ({}, r"task\.datasets: expected a table \[task\.datasets\.NAME\]"),
        ({"chain_sums": {}}, r'no data set "chain_sums"; did you mean .chain_sum.\?'),
        ({"chain_sum": {"min_term": 2}}, r'chain_sum: there is no key "min_term"; did you mean .min_terms.\?; it has '),
        ({"chain_sum": {"weight": 0}}, r"chain_sum\.weight: expected a number above 0"),
        ({"chain_sum": {"weight": "much"}}, r"chain_sum\.weight: expected a number above 0"),
    ],
)
def test_wrong_tables_are_named(datasets: dict, problem: str) -> None:
    (found,) = set_problems(replace(TASK, datasets=datasets))
    assert re.search(problem, found), found


def test_sound_tables_have_no_problems() -> None:
    lists = {"complex_arithmetic": {"operations": ["+"], "operations_weights": [1.0]}}
    for task in (TASK, replace(TASK, datasets=lists)):
        assert not list(set_problems(task))
        assert not list(_endless_sets(task))


BOUNDLESS: list[tuple[str, dict[str, Any]]] = [  # time, or memory, without end
    ("chain_sum", {"min_digits": 10**8, "max_digits": 10**8}),
    ("chain_sum", {"min_terms": 10**7, "max_terms": 10**7}),
    ("tower_of_hanoi", {"min_disks": 60, "max_disks": 60}),
]


def test_settings_without_a_bound_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """The process that tries them ends, whichever of the sets it is at."""
    draw, run = (
        random.Random(20261128),
        "import titan_rl.ext.reasoning_gym.problems as p; p.CPU_SECONDS, p.MEMORY_BYTES = 1, 2**29; ",
    )
    monkeypatch.setattr(child, "PROGRAM", child.PROGRAM.replace("respond({", run + "respond({"))
    for name, settings in draw.sample(BOUNDLESS, k=2):
        sets = {"basic_arithmetic": {}, name: settings, "leg_counting": {}}
        (found,) = list(_endless_sets(replace(TASK, datasets=sets)))[:1]
        assert found.startswith(f"task.datasets.{name}: expected settings "), found


def test_settings_that_the_package_refuses_are_named() -> None:
    sets = {"leg_counting": {}, "chain_sum": {"min_terms": 3, "max_terms": 2}}
    (found,) = _endless_sets(replace(TASK, datasets=sets))
    assert found.startswith("task.datasets.chain_sum: expected settings that reasoning-gym accepts, found Assertion")
