"""A model as judge, against a server of this process."""

import json
import math
from collections.abc import Callable
from typing import Any

import pytest
from aiohttp import web

from support.chat_endpoint import answering
from titan_rl.tasks.rewards import Answered
from titan_rl.tasks.rubric import Rubric, Scorer
from titan_rl.tasks.verifiers import VERIFIERS
from titan_rl.wire.types import Judgement, Prompt

KEY = "sk-very-secret-7"


def judged(
    monkeypatch: pytest.MonkeyPatch,
    reply: Callable[[dict[str, Any]], Any],
    texts: list[str],
    seconds: float = 30,
    name: str = "judge",
    **more: Any,
) -> tuple[list[Judgement], list[dict[str, Any]]]:
    """Have answers judged by a server whose reply is made from the request."""
    monkeypatch.setenv("MY_JUDGE", KEY)
    with answering(reply) as (url, seen):
        arguments = {"judge_url": f"{url}/", "judge_model": "m", "judge_key": "MY_JUDGE"} | more
        scorer = Scorer(Rubric(((name, 1.0),), arguments=tuple(arguments.items())))
        prompt, answers = Prompt(0, "the question {answer}", [], "the reference"), [Answered(text) for text in texts]
        return [v for _, v in scorer.verdicts(prompt, answers, range(len(texts)), seconds=seconds)], seen


def test_a_judge_is_asked_about_each_answer_and_its_number_is_the_reward(monkeypatch: pytest.MonkeyPatch) -> None:
    found, seen = judged(
        monkeypatch, lambda body: "**10**" if "good" in str(body) else "I say 3.", ["good {scale}", "bad"]
    )
    assert found == [Judgement(1.0), Judgement(0.3)]
    assert {each["key"] for each in seen} == {f"Bearer {KEY}"}
    asked = sorted(each["body"]["messages"][0]["content"] for each in seen)[1]
    assert "the question {answer}" in asked, "no text can name a field"
    assert "good {scale}" in asked
    assert "the reference" in asked
    assert seen[0]["body"]["model"] == "m"


@pytest.mark.parametrize(
    ("reply", "error"),
    [
        (lambda body: "no idea", "expected the judge to reply with a number from 0 to 10, found 'no idea'"),
        (lambda body: "11", "expected the judge to reply with a number from 0 to 10, found '11'"),
        (lambda body: web.Response(status=429, text=f"slow down, {KEY}"), "answered 429: slow down, ***"),
        (
            lambda body: web.Response(text="<html>"),
            "expected the judge to reply with a number from 0 to 10, found '<html>'",
        ),
        (lambda body: None, "judge did not return within 1 s"),
    ],
)
def test_a_judge_that_fails_is_named_and_gives_no_reward(
    monkeypatch: pytest.MonkeyPatch, reply: Callable[[dict[str, Any]], Any], error: str
) -> None:
    (verdict,), _ = judged(monkeypatch, reply, ["x"], seconds=1.0)
    assert math.isnan(verdict.reward)
    assert error in verdict.error
    assert KEY not in verdict.error


GROUP = ["four", "[5]", 'say {answers} and 3"', "four", "no"]
"""Two answers are equal."""


def test_a_group_is_judged_in_one_call_and_equal_answers_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    found, seen = judged(monkeypatch, lambda body: "[1] is fine. [8, 10.0,\n2.5, 0]", GROUP, name="judge_group")
    assert found == [Judgement(reward) for reward in (0.8, 1.0, 0.25, 0.8, 0.0)]
    (request,) = seen
    asked = request["body"]["messages"][0]["content"]
    assert "the question {answer}" in asked
    assert "the reference" in asked
    assert "end with a JSON list of 4 numbers" in asked
    listed = asked.partition("4 strings:\n")[2].partition("\n\nGive")[0]
    assert json.loads(listed) == list(dict.fromkeys(GROUP)), "no text can pose as another answer"


def test_a_groups_judge_may_have_another_prompt_and_scale(monkeypatch: pytest.MonkeyPatch) -> None:
    more = {"judge_prompt": "{count} of {answers} in 0..{scale}", "judge_scale": 4}
    found, seen = judged(monkeypatch, lambda body: "[1, 4]", ["a", "b"], name="judge_group", **more)
    assert [verdict.reward for verdict in found] == [0.25, 1.0]
    assert seen[0]["body"]["messages"][0]["content"] == '2 of [\n"a",\n"b"\n] in 0..4'
    with pytest.raises(ValueError, match=r"expected \{answers\} in judge_prompt, found none"):
        VERIFIERS["judge_group"]({"judge_url": "http://x", "judge_model": "m", "judge_prompt": "{answer}"})


@pytest.mark.parametrize(
    "reply",
    ["no idea", "[1]", "[1, 2, 3]", "[1, 11]", "[1, -1]", "[1, NaN]", "[1, true]", '["1", "2"]', "[1, 2", "[1, 2] [1]"],
)
def test_a_groups_judge_that_ranks_too_few_or_too_high_gives_no_reward(
    monkeypatch: pytest.MonkeyPatch, reply: str
) -> None:
    found, seen = judged(monkeypatch, lambda body: reply, ["a", "b"], name="judge_group")
    assert len(seen) == 1
    expected = f"expected the judge to reply with a JSON list of 2 numbers from 0 to 10, found {reply!r}"
    assert all(math.isnan(verdict.reward) and expected in verdict.error for verdict in found)
