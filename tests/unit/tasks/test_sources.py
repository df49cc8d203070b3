"""Several sources of prompts, mixed by weights: the order, its state, and the settings of each source's rows."""

import asyncio
import json
from collections import Counter
from collections.abc import Iterable, Sequence
from contextlib import aclosing
from dataclasses import replace
from itertools import accumulate
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from support.rollout_streams import Echo, ids, stream
from titan_rl.config.sections import RolloutSection, TaskSection
from titan_rl.tasks.examples import Example
from titan_rl.tasks.orders import MixedOrder
from titan_rl.tasks.prompts import PromptSource
from titan_rl.tasks.task import Task, TaskPart, load_task
from titan_rl.text.tokenizer import TextTokenizer
from titan_rl.wire.errors import RunError
from titan_rl.wire.types import Prompt

SIZES = {"few": 7, "many": 400}
PARTS = [TaskPart("few", 7, 3.0, "", "", {}), TaskPart("many", 400, 1.0, "", "", {})]
TASK = Task(
    [Example(f"{i}=", str(i), {"i": i}, source=name) for name, n in SIZES.items() for i in range(n)], [], parts=PARTS
)
DRAWS = 6000  # a chunk and a half
GOLDEN = [6, 4, 365, 3, 0, 1, 86, 5, 2, 2, 3, 4, 0, 6, 1, 5, 273, 5, 249, 276]
LATER = [5, 3, 0, 141, 6, 2, 4, 3, 5, 353]  # from place 5000 on


def drawn(parts: Sequence[TaskPart], seed: int, places: Iterable[int]) -> list[int]:
    order = MixedOrder(parts, seed)
    return [order.index_at(place) for place in places]


@pytest.fixture(scope="module")
def whole() -> list[int]:
    return drawn(PARTS, 5, range(DRAWS))


def test_sources_are_drawn_by_their_weights_and_each_epoch_has_all_of_its_rows(whole: list[int]) -> None:
    few, many = [i for i in whole if i < 7], [i for i in whole if i >= 7]
    assert len(few) / DRAWS == pytest.approx(0.75, abs=0.03)
    epochs = [tuple(few[i : i + 7]) for i in range(0, len(few) - 6, 7)]
    assert all(sorted(epoch) == list(range(7)) for epoch in epochs)
    assert len(set(epochs)) > len(epochs) / 2
    assert sorted(many[:400]) == list(range(7, 407))


def test_the_mixed_order_never_changes(whole: list[int]) -> None:
    """A run that resumes depends on these very numbers."""
    assert whole[:20] == GOLDEN
    assert whole[5000:5010] == LATER


@given(
    sizes=st.lists(st.tuples(st.integers(1, 30), st.floats(0.01, 100)), min_size=1, max_size=4),
    seed=st.integers(0, 2**62),
    place=st.integers(0, 9000),
)
def test_any_place_is_known_without_those_before_it(sizes: list[tuple[int, float]], seed: int, place: int) -> None:
    parts = [TaskPart(f"source{i}", size, weight, "", "", {}) for i, (size, weight) in enumerate(sizes)]
    places = range(place, place + 300)
    rows = drawn(parts, seed, places)
    assert rows == drawn(parts, seed, range(place + 300))[place:]
    ends = list(accumulate(size for size, _ in sizes))
    for (size, _), end in zip(sizes, ends, strict=True):
        own = [row for row in drawn(parts, seed, range(300)) if end - size <= row < end]
        for first in range(0, len(own) - size + 1, size):
            assert sorted(own[first : first + size]) == list(range(end - size, end))


def take(source: PromptSource, n: int) -> list[Prompt]:
    return [source.next() for _ in range(n)]


def test_a_source_of_prompts_resumes_in_the_middle_of_a_mixture(text: TextTokenizer) -> None:
    source, resumed = (PromptSource(TASK, text, seed=5) for _ in range(2))
    take(source, 4090)
    state = json.dumps(source.state_dict() | {"taken": [4092, 4093]})  # two have overtaken
    rest = take(source, 30)
    resumed.load_state_dict(json.loads(state))
    assert take(resumed, 28) == [*rest[:2], *rest[4:]]
    assert resumed.state_dict() == source.state_dict()
    heavier = replace(TASK, parts=[replace(PARTS[0], weight=2.0), PARTS[1]])
    for other in (replace(TASK, parts=()), heavier):
        stranger = PromptSource(other, text, seed=5)
        with pytest.raises(RunError, match=r"'sources': \{'few': \[7, 3\.0\], 'many': \[400, 1\.0\]\}"):
            stranger.load_state_dict(json.loads(state))


def test_one_that_resumes_skips_rows_that_no_longer_fit(text: TextTokenizer) -> None:
    source = PromptSource(TASK, text, seed=5)
    fewer = PromptSource(replace(TASK, unfit=frozenset({3, 4})), text, seed=5)
    rows = [prompt.row["i"] for prompt in take(source, 40) if prompt.row["i"] not in (3, 4) or prompt.row["i"] >= 7]
    assert [prompt.row["i"] for prompt in take(fewer, len(rows))] == rows


def test_a_lagging_stream_that_is_cut_resumes_with_the_prompts_that_it_had_in_flight(text: TextTokenizer) -> None:
    rollout = RolloutSection(groups_per_step=2, group_size=2, max_staleness_steps=4, overtake_steps=2)
    whole, resumed = PromptSource(TASK, text, seed=5), PromptSource(TASK, text, seed=5)

    async def cut_after(steps: int) -> tuple[list[int], dict[str, Any]]:
        echo, done = Echo([9, 0, 0, 3, 0, 30]), list[int]()
        rollouts = stream(echo, whole, text, 2000, rollout=rollout)
        async with aclosing(rollouts):
            rollouts.admit(6)
            for step in range(1, steps + 1):
                done += ids(await rollouts.take(2, step))
                echo.version = step
                rollouts.admit(2)
            return done, json.loads(json.dumps(rollouts.cut()))

    done, cut = asyncio.run(cut_after(20))
    fresh = PromptSource(TASK, text, seed=5)
    expected = [prompt for prompt in take(fresh, 100) if prompt.id not in done]
    resumed.load_state_dict(cut)
    assert take(resumed, len(expected)) == expected


def write(path: Path, *rows: dict[str, Any]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def test_each_source_has_its_own_columns_system_prompt_and_template(tmp_path: Path, text: TextTokenizer) -> None:
    (tmp_path / "loud.jinja").write_text("{% for m in messages %}{{ mark }}{{ m['content'] }}{% endfor %}")
    sources = {
        "sums": {"path": write(tmp_path / "a.jsonl", {"q": "1+1=", "a": "2"}), "prompt_key": "q", "answer_key": "a"},
        "loud": {
            "path": write(tmp_path / "b.jsonl", {"question": "1+2=", "answer": "3"}),
            "weight": 2,
            "system_prompt": "",
            "chat_template": str(tmp_path / "loud.jinja"),
            "chat_template_kwargs": {"mark": 7},
        },
    }
    section = TaskSection(name="jsonl", sources=sources, template="chat", system_prompt="add")
    task = load_task(section, seed=0, eval_size=0)
    assert [(p.name, p.count, p.weight) for p in task.parts] == [("sums", 1, 1.0), ("loud", 1, 2.0)]
    sums, loud = (task.prompt(example, i, text) for i, example in enumerate(task.train))
    assert sums.text == "<s><|system|>add</s><|user|>1+1=</s><|assistant|>"
    assert loud.text == "71+2="
    assert loud.messages == [{"role": "user", "content": "1+2="}]
    assert Counter(example.source for example in task.train) == {"sums": 1, "loud": 1}


def test_one_unweighted_file_has_the_order_that_it_always_had(tmp_path: Path, text: TextTokenizer) -> None:
    path = write(tmp_path / "a.jsonl", *({"question": f"{i}=", "answer": str(i)} for i in range(7)))
    task = load_task(TaskSection(name="jsonl", path=path), seed=0, eval_size=0)
    source = PromptSource(task, text, seed=5)
    assert [int(prompt.answer) for prompt in take(source, 14)] == [3, 2, 4, 6, 0, 5, 1, 1, 0, 6, 4, 3, 2, 5]
    assert source.state_dict() == {"seed": 5, "examples": 7, "position": 14, "taken": []}
