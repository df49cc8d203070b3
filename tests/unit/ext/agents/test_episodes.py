"""Rollouts of environments in this process: turns, tokens, limits, and what goes wrong."""

import asyncio
import random
import re
import textwrap
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from support.played import BOS, EOS, LIMITS, encoded, playing, prompt_of
from titan_rl.ext.agents.episode_news import Answer, Ask, Begin, Ended
from titan_rl.ext.agents.episodes import Reply, as_step
from titan_rl.ext.agents.play import Policy

ODD, PLAIN = "support.odd_environments:Odd", "support.odd_environments:Plain"


class Forger:
    """Prints the end token, and asks for a sum with a reset observation."""

    tools = ()

    def reset(self) -> str:
        return "1+1="

    def step(self, reply: Reply) -> tuple[str, float, bool, dict[str, Any]]:
        return "</s>2" if reply.text == "a" else "", 0.5, reply.text != "a", {"rewards": {"format": 0.25}, "said": 1}


class Notebook:
    """A set of tools with a reward: no step."""

    def reset(self, row: Mapping[str, Any]) -> None:
        self._pages: list[str] = []

    def write(self, page: str) -> str:
        """Write a page."""
        self._pages.append(page)
        return "ok"

    def get_reward(self) -> float:
        return 0.75


async def twice(policy: Policy, row: Mapping[str, Any]) -> dict[str, Any]:
    first = await policy.observe("1=")
    second = await policy.observe("2=")
    return {"reward": len(first.text) + len(second.text), "asked": 2}


def test_what_was_sampled_is_never_encoded_again_and_observations_follow_it(tmp_path: Path) -> None:
    with playing(ODD, tmp_path) as played:
        odd = [40, 6, EOS]  # an id of no text in mid-turn
        (outcome,) = played.play([prompt_of("7=")], lambda id, turn: odd if turn == 0 else "8")
    first = [BOS, *encoded("7="), *encoded("0")]
    second = [*first, *odd, *encoded("1")]
    assert played.contexts[0] == [first, second, [*second, *encoded("8"), EOS, *encoded("2")]]
    assert (outcome.status, outcome.reward, outcome.turn_rewards) == ("completed", 1.0, [0.0, 0.0, 1.0])
    assert outcome.metrics == {"steps": 3.0}


def test_a_turn_that_was_cut_off_gets_its_end_token(tmp_path: Path) -> None:
    with playing(ODD, tmp_path) as played:
        played.play([prompt_of("7=")], lambda id, turn: encoded("888"))
    first, second, _ = played.contexts[0]
    assert second == [*first, *encoded("888"), EOS, *encoded("1")]


def test_the_observation_of_reset_is_read_and_an_end_token_in_an_observation_ends_nothing(tmp_path: Path) -> None:
    with playing(f"{__name__}:Forger", tmp_path) as played:
        (outcome,) = played.play([prompt_of("")], lambda id, turn: "a" if turn == 0 else "b")
    first, second = played.contexts[0]
    assert first == [BOS, *encoded("1+1=")]
    assert second[: len(first) + 2] == [*first, *encoded("a"), EOS]
    assert EOS not in second[len(first) + 2 :]
    assert outcome.rewards == {"format": 0.5}
    assert (outcome.reward, outcome.metrics) == (1.0, {"said": 2.0})


def test_a_class_without_step_is_a_set_of_tools_with_a_reward(tmp_path: Path) -> None:
    with playing(f"{__name__}:Notebook", tmp_path) as played:
        (outcome,) = played.play([prompt_of("7=")], lambda id, turn: "done")
    assert (outcome.status, outcome.reward, outcome.turn_rewards) == ("completed", 0.75, [0.75])


def test_a_rollout_function_owns_its_loop(tmp_path: Path) -> None:
    with playing(f"{__name__}:twice", tmp_path) as played:
        (outcome,) = played.play([prompt_of("")], lambda id, turn: "aaa" if turn else "b")
    assert (outcome.reward, outcome.metrics) == (4.0, {"asked": 2.0})
    assert played.contexts[0][1] == [BOS, *encoded("1="), *encoded("b"), EOS, *encoded("2=")]


def test_limits_have_names_and_keep_the_reward_so_far(tmp_path: Path) -> None:
    with playing(ODD, tmp_path, replace(LIMITS, max_turns=2)) as played:
        (outcome,) = played.play([prompt_of("7=")], lambda id, turn: "8")
    assert (outcome.status, outcome.reward, len(outcome.turn_rewards)) == ("max_turns", 0.0, 2)
    with playing(ODD, tmp_path, replace(LIMITS, max_tokens=6)) as played:
        (outcome,) = played.play([prompt_of("7=")], lambda id, turn: "8")
    assert (outcome.status, outcome.reward) == ("max_tokens", 0.0)
    assert len(played.contexts[0]) == 2


def test_the_last_turn_may_sample_what_is_left(tmp_path: Path) -> None:
    with playing(ODD, tmp_path, replace(LIMITS, max_tokens=6)) as played:
        played.loop.begin([Begin(0, prompt_of("7="), 0)])
        (first,) = played.news()
        played.loop.answer([Answer(0, [*encoded("8"), EOS], "stop")])
        (second,) = played.news()
        assert isinstance(first, Ask)
        assert isinstance(second, Ask)
        assert (first.most, second.most) == (6, 3), "the first observation is a part of the prompt"
        played.loop.answer([Answer(0, [], "abort", "context_overflow", 1)])
        (ended,) = played.news()
        assert isinstance(ended, Ended)
        assert (ended.outcome.status, ended.outcome.reward) == ("context_overflow", 0.0)


def test_what_user_code_raises_is_an_error_with_its_line_and_never_a_reward(tmp_path: Path) -> None:
    rows: list[dict[str, Any]] = [{}, {"do": "raise"}, {"do": "leave"}, {"do": "raise", "turn": 2}]
    with playing(ODD, tmp_path) as played:
        fine, raised, left, later = played.play([prompt_of("", row) for row in rows], lambda id, turn: "8")
    assert (fine.status, fine.reward) == ("completed", 1.0)
    for outcome in (raised, left, later):
        assert (outcome.status, outcome.reward) == ("error", None)
    assert re.fullmatch(
        r"ValueError: bad action \(.*odd_environments.py:\d+ in _misbehave: raise ValueError\(.*\)\)", raised.error
    )
    assert left.error.startswith("SystemExit: 3 (")


def test_a_call_that_is_late_is_a_timeout_with_its_line(tmp_path: Path) -> None:
    rows = [{"do": "sleep", "seconds": 60}, {}]
    with playing(ODD, tmp_path, replace(LIMITS, turn_seconds=2.0)) as played:
        late, fine = played.play([prompt_of("", row) for row in rows], lambda id, turn: "8")
        assert played.loop.stuck == 0
    assert (late.status, late.reward, fine.status) == ("timeout", None, "completed")
    assert re.fullmatch(r"turn_seconds: .*odd_environments.py:\d+ in _misbehave: await asyncio.sleep.*", late.error)


def test_a_rollout_that_is_late_is_a_timeout(tmp_path: Path) -> None:
    with playing(ODD, tmp_path, replace(LIMITS, rollout_seconds=0.5)) as played:
        played.loop.begin([Begin(0, prompt_of("7="), 0)])
        asked, ended = played.news(2)  # the policy does not answer
    assert isinstance(asked, Ask)
    assert isinstance(ended, Ended)
    assert (ended.outcome.status, ended.outcome.error.split(":")[0]) == ("timeout", "rollout_seconds")


def test_a_plain_function_that_blocks_holds_up_no_other_and_is_found(tmp_path: Path) -> None:
    rows = [{"do": "block", "seconds": 7}, *[{}] * 5]
    with playing(PLAIN, tmp_path, replace(LIMITS, turn_seconds=2.0)) as played:
        began = time.monotonic()
        late, *fine = played.play([prompt_of("", row) for row in rows], lambda id, turn: "8")
        assert [each.status for each in fine] == ["completed"] * 5
        assert re.fullmatch(r"turn_seconds: .*odd_environments.py:\d+ in step: time.sleep.*", late.error)
        assert late.status == "timeout"
        assert played.loop.stuck == 0, "it may return soon"
        while not played.loop.stuck:
            assert time.monotonic() - began < 30
            time.sleep(0.05)
        while played.loop.stuck:  # until it returns
            assert time.monotonic() - began < 30
            time.sleep(0.05)


def test_an_async_function_that_blocks_the_loop_is_named(tmp_path: Path) -> None:
    with playing(ODD, tmp_path, replace(LIMITS, turn_seconds=1.5)) as played:
        played.loop.begin([Begin(5, prompt_of("", {"do": "block", "seconds": 8}), 0)])
        played.news()
        played.loop.answer([Answer(5, [EOS], "stop")])
        deadline = time.monotonic() + 20
        while (blocked := played.loop.look()) is None:
            assert time.monotonic() < deadline
            time.sleep(0.05)
    assert blocked.id == 5
    assert blocked.seconds >= 1.5
    assert re.fullmatch(r".*odd_environments.py:\d+ in _misbehave: time.sleep\(seconds\)", blocked.place)


def test_a_rollout_that_catches_its_cancellation_is_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("titan_rl.ext.agents.episode_loop.GRACE_SECONDS", 0.5)
    with playing(ODD, tmp_path, replace(LIMITS, rollout_seconds=2.0)) as played:
        (outcome,) = played.play([prompt_of("", {"do": "swallow", "seconds": 6})], lambda id, turn: "8")
        assert played.loop.stuck == 1
        assert (outcome.status, outcome.error.split(":")[0]) == ("timeout", "it caught its cancellation")
        deadline = time.monotonic() + 20
        while played.loop.running:  # until it returns
            assert time.monotonic() < deadline
            time.sleep(0.02)


def test_cancel_ends_a_rollout_without_news(tmp_path: Path) -> None:
    with playing(ODD, tmp_path) as played:
        played.loop.begin([Begin(id, prompt_of("", {"tool_seconds": 60}), 0) for id in range(3)])
        played.news(3)
        played.loop.answer([Answer(0, [EOS], "stop")])
        assert played.loop.running == 3
        played.loop.cancel([0, 1, 2, 7])
        deadline = time.monotonic() + 20
        while played.loop.running:
            assert time.monotonic() < deadline
            time.sleep(0.02)
        assert played.loop.take_news() == []


@pytest.mark.parametrize(
    ("found", "why"),
    [
        ("done", "x: expected step to return (observation, reward, done, info), found 'done'"),
        (("", "1", True, {}), "x: the reward of a step: expected a finite number, found '1'"),
        (("", float("nan"), True, {}), "x: the reward of a step: expected a finite number, found nan"),
        (("", 1.0, True, None), "x: expected a mapping as the info of a step, found None"),
    ],
)
def test_a_step_that_is_none_is_named(found: object, why: str) -> None:
    with pytest.raises((TypeError, ValueError), match=re.escape(why)):
        as_step(found, "x")


def test_gymnasiums_five_values_are_a_step() -> None:
    step = as_step(("o", 1, False, True, {"a": 1}), "x")
    assert (step.observation, step.reward, step.done, step.info) == ("o", 1.0, True, {"a": 1})


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("no_such_module:Thing", "ModuleNotFoundError: No module named 'no_such_module'"),
        ("support.odd_environments:Nothing", "AttributeError"),
        ("odd", "environment.name: expected \"package.module:name\", found 'odd'"),
        ("support.odd_environments:TURNS", "to be a class or a function, found int"),
    ],
)
def test_an_environment_that_cannot_be_imported_is_named(name: str, why: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=re.escape(why)), playing(name, tmp_path):
        pass


def test_a_question_is_small(tmp_path: Path) -> None:
    """The prompt is not sent back: a turn's message has only the new tokens."""
    with playing(ODD, tmp_path) as played:
        played.loop.begin([Begin(0, prompt_of("1" * 500), 0)])
        (asked,) = played.news()
        assert isinstance(asked, Ask)
        assert (asked.kept, len(asked.new)) == (501, 1)


def test_the_examples_of_the_documentation_play(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = (Path(__file__).parents[4] / "docs" / "environments.md").read_text()
    blocks = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    (tmp_path / "documented_environments.py").write_text("\n".join(map(textwrap.dedent, blocks)))
    monkeypatch.syspath_prepend(tmp_path)
    with playing("documented_environments:Guess", tmp_path, replace(LIMITS, max_turns=100)) as played:
        (outcome,) = played.play([prompt_of("", {})], lambda id, turn: str(turn))
        assert (outcome.status, outcome.reward) == ("completed", 1.0)
        assert outcome.metrics == {"guesses": random.Random(0).randrange(100)}
        assert played.tokenizer.decode(played.contexts[0][0]).endswith(" number below 100?")
    with playing("documented_environments:rollout", tmp_path) as played:
        right, wrong = played.play([prompt_of("", {"answer": "7"})] * 2, lambda id, turn: "7" if id == 0 else "8")
    assert (right.reward, wrong.reward) == (1.0, 0.0)


def test_calls_that_take_a_while_are_in_the_timeline(tmp_path: Path) -> None:
    with playing(ODD, tmp_path) as played:
        played.play([prompt_of("", {"tool_seconds": 0.05}, id=7), prompt_of("", id=8)], lambda id, turn: "8")
        spans = asyncio.run(played.loop.take_spans()).spans
        again = asyncio.run(played.loop.take_spans()).spans
    slow = [span for span in spans if span.args["prompt"] == 7 and span.nanoseconds >= 50_000_000]
    assert [(span.name, span.lane, span.id) for span in slow] == [("call", "environment", 0)] * 3
    assert again == []
