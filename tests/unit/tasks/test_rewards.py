import asyncio
import math
import re
import sys
from collections.abc import Callable, Sequence
from copy import deepcopy
from dataclasses import replace
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from support.hostile_files import NAMES
from titan_rl.tasks.judging import by_rule
from titan_rl.tasks.reward_shapes import component
from titan_rl.tasks.rewards import Answered, Messages, Reward
from titan_rl.wire.types import Prompt, Rollout

PROMPT = Prompt(7, "6*7=", [1], "42", {"level": 3})


def reward_for(name: str) -> Reward:
    found = component(name)

    def reward(prompt: Prompt, completion: str, messages: Messages = (), /) -> float:
        return found.read(found.call(prompt, Answered(completion, messages=messages))).value

    return reward


@pytest.fixture
def custom(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[..., Any]], Reward]:
    def install(function: Callable[..., Any]) -> Reward:
        module = ModuleType("my_rewards")
        module.__dict__["score"] = function
        monkeypatch.setitem(sys.modules, "my_rewards", module)
        return reward_for("my_rewards:score")

    return install


def last_number(completion: str, answer: str) -> float:
    return reward_for("last_number")(Prompt(0, "", [], answer), completion)


@pytest.mark.parametrize(("completion", "reward"), [("42", 1.0), (" 42\n", 1.0), ("42.", 0.0), ("", 0.0), ("4 2", 0.0)])
def test_exact(completion: str, reward: float) -> None:
    assert reward_for("exact")(PROMPT, completion) == reward


@pytest.mark.parametrize(
    ("completion", "answer"),
    [
        ("so it is 18.", "16-3=13, then 13+5=18\n#### 18"),
        ("#### 1,234", "#### 1234"),
        ("**$1,200.00**", "1200"),
        ("it loses -$5", "-5"),
        ("it loses $-5.0", "-5"),
        ("x = -3", "-3"),
        ("1,2,3", "3"),
        ("\\boxed{.5}", "0.50"),
        ("1 000 or 7", "7"),
        ("that is 3/4", "3/4"),
        ("\\boxed{\\frac{3}{4}}", "0.75"),
        ("-6/8 of it", "-3/4"),
        ("\u22125", "-5"),
        ("$\u22125$", "-5"),
        ("1.5e3", "1500"),
        ("2E-3", "0.002"),
        ("12/3 = 4", "4"),
        ("Answer:5", "5"),
        ("x^2 = 4", "4"),
        ("\\text{so } \\mathrm{5}", "5"),
        ("5%", "5"),
        ("5 km/h", "5"),
        ("5 \\times 10^{3}", "5000"),
        ("1.5 \u00d7 10^-3", "0.0015"),
        ("{1 \\over 5}", "1/5"),
        ("1\u20445", "1/5"),
        ("\u20135", "-5"),
        ("- 5", "-5"),
        ("x = - 5", "-5"),
        ("it is minus 5", "-5"),
        ("Negative 5", "-5"),
        ("The answer is 5!", "5"),
        ("it is *5*", "5"),
        ("that is **5**.", "5"),
        ("* 5 apples", "5"),
        ("it is +5", "5"),
        ("GPT-4", "4"),
        ("4 + 3 = 7", "7"),
        ("\\left(5\\right)", "5"),
        ("(5)", "5"),
        ("\\tfrac12", "1/2"),
        ("-\\dfrac14", "-1/4"),
        ("\\frac 1 4", "1/4"),
        ("½", "1/2"),
        ("2½", "5/2"),
        ("2 1/2 cups", "5/2"),
        ("-2\\frac{1}{2}", "-5/2"),
        ("1{,}200{,}000", "1200000"),
        ("1,\\!200,\\!000", "1200000"),
        ("1\\,200\\,000", "1200000"),
        ("1\u202f200\u202f000", "1200000"),
        ("1.2 \u00d7 10⁶", "1200000"),
        ("1.2 \u00d7 10⁻²", "0.012"),
        ("5^\\circ", "5"),
        ("\\boxed{5^{\\circ}}", "5"),
        ("5 cm^2", "5"),
        ("5\\,\\text{ cm}^{3}", "5"),
        ("5 m²", "5"),
    ],
)
def test_last_number_agrees(completion: str, answer: str) -> None:
    assert last_number(completion, answer) == 1.0


@pytest.mark.parametrize(
    ("completion", "answer"),
    [
        ("1/4", "3/4"),
        ("4", "3/4"),
        ("3/0", "0"),
        ("3", "1.5e3"),
        ("\u22125", "5"),
        ("5", "\u22125"),
        ("x^2", "2"),
        ("9:30", "30"),
        ("2\\sqrt{3}", "3"),
        ("2√3", "3"),
        ("2\\pi", "2"),
        ("3/4/2020", "2020"),
        ("1/2/4", "1/2"),
        ("", "3"),
        ("no idea", "3"),
        ("3 or 4", "3"),
        ("-3", "3"),
        ("0.30", "3"),
        ("12,34", "1234"),
        ("18", "18 #### 19"),
        ("10^{2}", "2"),
        ("x_{2}", "2"),
        ("\\binom{7}{2}", "2"),
        ("\\sqrt[3]{8}", "8"),
        ("5 \\times 10^{3}", "3"),
        ("5!", "5"),
        ("= 5!", "5"),
        ("log_10(2)", "2"),
        ("4 + 3", "3"),
        ("4*3", "3"),
        ("4 * 3", "3"),
        ("8-3", "3"),
        ("17 \\cdot 3", "3"),
        ("7 ± 3", "3"),
        ("{1 \\over 5}", "5"),
        ("1\u20445", "5"),
        ("\u20135", "5"),
        ("between 3\u20135", "5"),
        ("- 5", "5"),
        ("minus 5", "5"),
        ("8 minus 3", "3"),
        ("3²", "3"),
        ("2 1/2", "1/2"),
        ("2\\frac{1}{2}", "21/2"),
        ("1{,}200{,}000", "0"),
        ("1\\,200\\,000", "0"),
        ("x2", "2"),
        ("5 x^2", "5"),
        ("5 x^2", "2"),
        ("2\\pi^2", "2"),
        ("10⁶", "10"),
        ("9" * 300_000, "9"),
    ],
)
def test_last_number_disagrees(completion: str, answer: str) -> None:
    assert last_number(completion, answer) == 0.0


@given(
    st.integers(-(10**12), 10**12),
    st.text(st.characters(categories=["L", "Zs", "Po"], exclude_characters="/"), max_size=20),
)
def test_last_number_reads_any_integer_however_written(number: int, words: str) -> None:
    for form in (f"{number}", f"{number:,}", f"{number}.0", f"${number:,}.00"):
        assert last_number(f"{words} {form} apples.", f"5 #### {number}") == 1.0
    assert last_number(f"{number}", f"#### {number + 1}") == 0.0


@given(st.text("0123456789,.$-# \n", max_size=200))
@example("-$-0")
def test_last_number_survives_any_completion(completion: str) -> None:
    assert last_number(completion, "1") in (0.0, 1.0)


@pytest.mark.parametrize("answer", ["five", "x^2", "10:30", "2\\sqrt{3}", "2\\pi", "1/0"])
def test_last_number_needs_a_number_in_the_answer(answer: str) -> None:
    with pytest.raises(ValueError, match=rf"{re.escape(repr(answer))} \(prompt 0\)"):
        last_number("5", answer)


def test_custom_gets_the_keywords_it_takes(custom: Callable[..., Reward]) -> None:
    asked, said = {"role": "user", "content": "6*7="}, {"role": "assistant", "content": "x"}
    everything = {"prompt": "6*7=", "completion": "x", "answer": "42", "row": {"level": 3}, "messages": [asked, said]}
    seen: list[dict[str, Any]] = []
    custom(lambda **kwargs: seen.append(kwargs) or 1)(PROMPT, "x")
    custom(lambda row, *, prompt="": seen.append({"row": row, "prompt": prompt}) or 1)(PROMPT, "x")
    custom(lambda answer, strict=True: seen.append({"answer": answer}) or 1)(PROMPT, "x")
    assert seen == [everything, {"row": {"level": 3}, "prompt": "6*7="}, {"answer": "42"}]


def test_custom_gets_the_whole_conversation_of_a_rollout(custom: Callable[..., Reward]) -> None:
    """Of one turn and of several, with a chat template and without. What the function changes is its own."""
    seen: list[list[dict[str, Any]]] = []

    def score(messages: list[dict[str, Any]]) -> float:
        seen.append(deepcopy(messages))
        messages[-1]["content"] = "changed"
        return float(len(messages))

    async def judged(prompt: Prompt, done: Rollout) -> Sequence[float]:
        return await by_rule(custom(score), 30)(prompt, [done])

    system, asked = {"role": "system", "content": "Count."}, {"role": "user", "content": "6*7?"}
    said, tool, answer = ({"role": role, "content": role} for role in ("assistant", "tool", "assistant"))
    plain, chat = PROMPT, replace(PROMPT, text="<s>...", messages=(system, asked))
    first = {"role": "user", "content": PROMPT.text}
    played = [said, tool, answer]
    rollouts = [
        (plain, (), [first, {"role": "assistant", "content": "x"}]),
        (plain, played, [first, *played]),
        (chat, (), [system, asked, {"role": "assistant", "content": "x"}]),
        (chat, [system, asked, *played], [system, asked, *played]),
    ]
    before = deepcopy(rollouts)
    for prompt, messages, _ in rollouts:
        done = Rollout([], "x", math.nan, messages=messages)
        (reward,) = asyncio.run(judged(prompt, done))
        assert reward == len(seen[-1])
    assert seen == [whole for *_, whole in rollouts]
    assert rollouts == before


@pytest.mark.parametrize(
    ("value", "reward"),
    [
        (True, 1.0),
        (0, 0.0),
        (0.25, 0.25),
        (-2, -2.0),
        (np.float32(0.25), 0.25),
        (np.float64(0.25), 0.25),
        (np.int64(-2), -2.0),
        (np.bool_(True), 1.0),
    ],
)
def test_custom_returns_a_float(custom: Callable[..., Reward], value: Any, reward: float) -> None:
    got = custom(lambda: value)(PROMPT, "")
    assert got == reward
    assert type(got) is float


@pytest.mark.parametrize("value", [None, "1", [1.0], {"reward": 1}, np.array([1.0]), np.str_("1")])
def test_custom_may_not_return_anything_else(custom: Callable[..., Reward], value: Any) -> None:
    with pytest.raises(TypeError, match=r"my_rewards:score.*to return a float.*found"):
        custom(lambda: value)(PROMPT, "")


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf"), np.float32("nan")])
def test_custom_rewards_are_finite(custom: Callable[..., Reward], value: float) -> None:
    with pytest.raises(ValueError, match=r"my_rewards:score.*finite"):
        custom(lambda: value)(PROMPT, "")


def test_custom_rewards_fit_into_float32(custom: Callable[..., Reward]) -> None:
    """Their sums overflow even a double otherwise, and end the run."""
    assert custom(lambda: -3e38)(PROMPT, "") == -3e38
    with pytest.raises(ValueError, match=r"my_rewards:score.*float32's range, found 1e\+308"):
        custom(lambda: 1e308)(PROMPT, "")


def test_custom_may_require_nothing_else(custom: Callable[..., Reward]) -> None:
    with pytest.raises(TypeError, match=r"my_rewards:score.*found tools"):
        custom(lambda completion, tools: 1.0)
    with pytest.raises(TypeError, match=r"found answer"):
        custom(lambda answer, /: 1.0)


def test_custom_error_is_the_users_own(custom: Callable[..., Reward]) -> None:
    with pytest.raises(ZeroDivisionError):
        custom(lambda: 1 / 0)(PROMPT, "")


@pytest.mark.parametrize("name", ["exakt", "model", "math:", "no_such_module:f", "math:no_such_function", *NAMES])
def test_a_reward_that_is_not_there_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match=r"task\.reward"):
        reward_for(name)
