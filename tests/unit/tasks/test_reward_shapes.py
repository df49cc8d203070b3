"""Reward functions of other libraries' users, unchanged, and the arguments that each gets."""

import asyncio
import math
import re
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest

from titan_rl.tasks.reward_shapes import component
from titan_rl.tasks.rewards import Answered
from titan_rl.tasks.rubric import GRADER, Rubric, Scorer
from titan_rl.wire.types import Judgement, Prompt

TEXT = Prompt(7, "What is 6*7?", [1], "42", {"question": "What is 6*7?", "answer": "42", "ground_truth": "42"})
CHAT = Prompt(
    7, "<|user|>What is 6*7?", [1], "42", {"level": 3}, messages=({"role": "user", "content": "What is 6*7?"},)
)
ANSWERS = [Answered(r"so \boxed{42}", [5, 6], 3), Answered("41", [7], 2), Answered("", [], 0)]


@pytest.fixture
def module(monkeypatch: pytest.MonkeyPatch) -> Callable[..., ModuleType]:
    def install(**functions: Any) -> ModuleType:
        made = ModuleType("theirs")
        made.__dict__.update(functions)
        monkeypatch.setitem(sys.modules, "theirs", made)
        return made

    return install


def verdicts(rubric: Rubric, prompt: Prompt = TEXT, rows: tuple[int, ...] = (0, 1, 2)) -> list[Judgement]:
    return [verdict for _, verdict in Scorer(rubric).verdicts(prompt, ANSWERS, rows)]


def rewards(name: str, prompt: Prompt = TEXT) -> list[float]:
    return [verdict.reward for verdict in verdicts(Rubric(((f"theirs:{name}", 1.0),)), prompt)]


# -- TRL: the examples of its documentation (GRPO Trainer, "Using a custom reward function"), as they are there --------


def reward_func(completions: Any, ground_truth: Any, **kwargs: Any) -> Any:
    # Regular expression to capture content inside \boxed{}
    matches = [re.search(r"\\boxed\{(.*?)\}", completion) for completion in completions]
    contents = [match.group(1) if match else "" for match in matches]
    # Reward 1 if the content is the same as the ground truth, 0 otherwise
    return [1.0 if c == gt else 0.0 for c, gt in zip(contents, ground_truth)]  # noqa: B905


def reward_len(completion_ids: Any, completions: Any, **kwargs: Any) -> Any:
    """Reward function that assigns higher scores to longer completions (in terms of token count)."""
    return [float(len(ids)) for ids in completion_ids]


def format_reward_func(completions: Any, **kwargs: Any) -> Any:
    """Reward function that checks if the completion has a specific format."""
    pattern = r"^<think>.*?</think><answer>.*?</answer>$"
    completion_contents = [completion[0]["content"] for completion in completions]
    matches = [re.match(pattern, content) for content in completion_contents]
    return [1.0 if match else 0.0 for match in matches]


def math_reward_func(prompts: Any, completions: Any, task: Any, **kwargs: Any) -> Any:
    rewards = []
    for _prompt, completion, t in zip(prompts, completions, task):  # noqa: B905
        if t == "math":
            rewards.append(1.0 if "4" in completion else -1.0)
        else:
            # Return None for non-math tasks
            rewards.append(None)
    return rewards


def coding_reward_func(prompts: Any, completions: Any, task: Any, **kwargs: Any) -> Any:
    return [0.5 if t == "coding" else None for t in task]


async def async_reward_func(prompts: Any, completions: Any, **kwargs: Any) -> Any:
    await asyncio.sleep(0.01)
    return [float(len(completion)) for completion in completions]


def test_a_stock_reward_of_trl(module: Callable[..., ModuleType]) -> None:
    module(reward_func=reward_func, reward_len=reward_len, later=async_reward_func)
    assert rewards("reward_func") == [1.0, 0.0, 0.0]
    assert rewards("reward_len") == [2.0, 1.0, 0.0]
    assert rewards("later") == [13.0, 2.0, 0.0]


def test_trls_completions_of_a_chat_are_messages(module: Callable[..., ModuleType]) -> None:
    seen: list[dict[str, Any]] = []

    def spy(**kwargs: Any) -> list[float]:
        seen.append(kwargs)
        return [0.0] * len(kwargs["completions"])

    def asks(prompts: Any, completions: Any, **columns: Any) -> list[float]:
        return spy(prompts=prompts, completions=completions, **columns)

    module(format_reward_func=format_reward_func, spy=asks)
    assert rewards("format_reward_func", CHAT) == [0.0, 0.0, 0.0]
    rewards("spy", CHAT)
    (given,) = seen
    assert given["prompts"] == [[{"role": "user", "content": "What is 6*7?"}]] * 3
    assert given["completions"][1] == [{"role": "assistant", "content": "41"}]
    assert given["level"] == [3] * 3
    assert given["answer"] == ["42"] * 3
    assert given["completion_ids"] == [[5, 6], [7], []]
    assert given["trainer_state"].global_step == 3


def test_none_means_that_a_function_does_not_apply(module: Callable[..., ModuleType]) -> None:
    module(math=math_reward_func, code=coding_reward_func)
    both = Rubric((("theirs:math", 1.0), ("theirs:code", 2.0)))
    of = {task: Prompt(0, "", [], "", {"task": task}) for task in ("math", "coding", "poetry")}
    assert verdicts(both, of["math"])[:2] == [Judgement(1.0, {"math": 1.0}), Judgement(1.0, {"math": 1.0})]
    assert verdicts(both, of["coding"])[0] == Judgement(1.0, {"code": 0.5})
    verdict = verdicts(both, of["poetry"])[0]
    assert math.isnan(verdict.reward), "never silently 0"
    assert verdict.error == "no reward function applies to this answer: all returned None"


def test_trls_extra_columns_and_metrics_are_logged(module: Callable[..., ModuleType]) -> None:
    def rewarded(completions: Any, log_extra: Any = None, log_metric: Any = None, **kwargs: Any) -> Any:
        log_extra("length", [len(c) for c in completions])
        log_extra("text", list(completions))
        log_metric("accuracy", 0.5)
        return [1.0] * len(completions)

    module(f=rewarded)
    found = verdicts(Rubric((("theirs:f", 1.0),)))
    assert [dict(verdict.parts) for verdict in found] == [{"accuracy": 0.5, "length": n} for n in (13.0, 2.0, 0.0)]


@pytest.mark.parametrize("value", [[1.0, 2.0], 1.0, "abc", [1.0, "x", 2.0]])
def test_a_batch_of_rewards_that_is_none_fails_every_answer(module: Callable[..., ModuleType], value: Any) -> None:
    module(f=lambda completions, **columns: value)
    for verdict in verdicts(Rubric((("theirs:f", 1.0),))):
        assert math.isnan(verdict.reward)
        assert "theirs:f" in verdict.error


def test_one_nan_of_a_batch_fails_its_answer_alone(module: Callable[..., ModuleType]) -> None:
    module(f=lambda completions, **columns: [1.0, math.nan, 2.0])
    one, lost, two = verdicts(Rubric((("theirs:f", 1.0),)))
    assert (one, two) == (Judgement(1.0), Judgement(2.0))
    assert "expected 'theirs:f' to return finite numbers" in lost.error


# -- verl: reward_score/gsm8k.py, and the custom function of its documentation ----------------------------------------

_SOLUTION_CLIP_CHARS = 300


def extract_solution(solution_str: Any, method: Any = "strict") -> Any:
    assert method in ["strict", "flexible"]
    if len(solution_str) > _SOLUTION_CLIP_CHARS:
        solution_str = solution_str[-_SOLUTION_CLIP_CHARS:]
    solutions = re.findall("#### (\\-?[0-9\\.\\,]+)", solution_str)
    return None if len(solutions) == 0 else solutions[-1].replace(",", "").replace("$", "")


def compute_score(
    solution_str: Any, ground_truth: Any, method: Any = "strict", format_score: Any = 0.0, score: Any = 1.0
) -> Any:
    answer = extract_solution(solution_str=solution_str, method=method)
    if answer is None:
        return 0
    return score if answer == ground_truth else format_score


def my_reward_fn(data_source: Any, solution_str: Any, ground_truth: Any, extra_info: Any = None) -> Any:
    return {
        "score": len(solution_str) / 100,
        "acc": solution_str == ground_truth,
        "pred": solution_str,
        "i": extra_info["index"],
    }


def test_a_stock_compute_score_of_verl(module: Callable[..., ModuleType]) -> None:
    module(gsm8k=compute_score, mine=my_reward_fn)
    row = {
        "data_source": "openai/gsm8k",
        "reward_model": {"style": "rule", "ground_truth": "42"},
        "extra_info": {"index": 5},
    }
    prompt = Prompt(0, "", [], "no", row)
    scorer = Scorer(Rubric((("theirs:gsm8k", 1.0),)))
    answers = [Answered("#### 42"), Answered("#### 41"), Answered("42")]
    assert [v.reward for _, v in scorer.verdicts(prompt, answers, [0, 1, 2])] == [1.0, 0.0, 0.0]
    ((_, verdict),) = Scorer(Rubric((("theirs:mine", 1.0),))).verdicts(prompt, [Answered("42")], [0])
    assert verdict == Judgement(0.02, {"acc": 1.0, "i": 5.0})


def test_an_async_compute_score(module: Callable[..., ModuleType]) -> None:
    async def later(
        data_source: str, solution_str: str, ground_truth: str, extra_info: Any = None, **kwargs: Any
    ) -> float:
        await asyncio.sleep(0)
        return float(ground_truth in solution_str)

    module(f=later)
    assert rewards("f") == [1.0, 0.0, 0.0]


# -- ours -------------------------------------------------------------------------------------------------------------


def test_a_function_of_all_answers_to_a_prompt(module: Callable[..., ModuleType]) -> None:
    def shortest(prompt: str, completions: list[str], answer: str, row: dict[str, Any]) -> list[float]:
        assert (prompt, answer, row["question"]) == (TEXT.text, "42", TEXT.text)
        return [float(len(text) == min(map(len, completions))) for text in completions]

    module(shortest=shortest)
    assert component("theirs:shortest").at_once
    assert rewards("shortest") == [0.0, 0.0, 1.0]
    (second,) = verdicts(Rubric((("theirs:shortest", 1.0),)), rows=(1,))
    assert second.reward == 0.0, "the others are seen though only one is judged"


def test_weighted_components_are_added_and_each_is_logged(module: Callable[..., ModuleType]) -> None:
    module(short=lambda completion: 1 / (1 + len(completion)), grade=lambda completion: 5)
    rubric = Rubric((("last_number", 2.0), ("theirs:short", -0.5)), grader="theirs:grade")
    found = verdicts(rubric)
    assert [v.reward for v in found] == [2 - 0.5 / 14, -0.5 / 3, -0.5]
    assert found[1].parts == {"last_number": 0.0, "short": 1 / 3, GRADER: 5.0}


def test_two_functions_of_one_name_keep_their_modules() -> None:
    assert Rubric((("a:f", 1.0), ("b:f", 1.0), ("b:g", 1.0), ("c:grader", 1.0))).labels == [
        "a:f",
        "b:f",
        "g",
        "c:grader",
    ]


def test_a_component_that_fails_fails_the_answer(module: Callable[..., ModuleType]) -> None:
    module(f=lambda completion: 1 / len(completion))
    good, _, lost = verdicts(Rubric((("exact", 1.0), ("theirs:f", 1.0))))
    assert good.reward == 1 / 13
    assert math.isnan(lost.reward)
    assert lost.error.startswith("theirs:f: ZeroDivisionError: division by zero at ")
    assert lost.parts == {"exact": 0.0}
