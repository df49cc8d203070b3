"""The teacher's samples: another prompt before the same sampled tokens, in every kind of conversation."""

import json
import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from support.agent_rollouts import chatting
from titan_rl.batch.experience import samples_of
from titan_rl.config.algorithms import PRESETS
from titan_rl.config.sections import AlgorithmSection, Config, TeacherSection
from titan_rl.ext.agents.episodes import Step
from titan_rl.ext.agents.play import Score
from titan_rl.ext.kept_sets.kept_sets import KeptSets
from titan_rl.ext.teachers.privileged import PrivilegedPrompts, aligned, exchanged, template_of
from titan_rl.tasks.reward_shapes import component
from titan_rl.tasks.rewards import Answered
from titan_rl.text.template import Message
from titan_rl.text.tokenizer import TextTokenizer
from titan_rl.wire.types import Branch, Completion, Group, Prompt, Rollout, Sample, Turn

SHOWN = "{prompt} {context} {prompt}"
TOOLS: list[dict[str, Any]] = [
    {"type": "function", "function": {"name": "add", "description": "Add.", "parameters": {"type": "object"}}}
]


def privileged(tokenizer: TextTokenizer, *kinds: str, template: str = SHOWN) -> PrivilegedPrompts:
    preset: dict[str, Any] = {**PRESETS["sdpo"], "teacher_context": list(kinds)}
    config = Config(algorithm=AlgorithmSection(**preset), teacher=TeacherSection(template=template))
    return PrivilegedPrompts(config, tokenizer)


def sampled(tokens: Sequence[int]) -> Completion:
    return Completion([*tokens], [-0.5] * len(tokens), [0] * len(tokens), "stop")


def played(reward: float, *branches: list[tuple[list[int], list[int]]], **facts: Any) -> Rollout:
    made = [Branch([Turn(read, sampled(tokens)) for read, tokens in turns]) for turns in branches]
    return Rollout(made, "", reward, **facts)


def teachers(prompts: PrivilegedPrompts, group: Group) -> list[tuple[Sample, Sample | None]]:
    """The policy's samples and the teacher's. All sampled tokens are the same, in the same places from the end."""
    samples = samples_of([group], AlgorithmSection(**PRESETS["sdpo"]))
    found = list(zip(samples, prompts.samples([group], samples), strict=True))
    for sample, teacher in found:
        if teacher is not None:
            own = len(sample.tokens) - sample.prompt
            assert list(teacher.tokens[-own:]) == list(sample.tokens[-own:])
            assert list(teacher.mask[-own:]) == list(sample.mask[-own:])
            assert not any(teacher.mask[:-own])
            assert teacher.prompt == len(teacher.tokens) - own
    return found


def test_a_sibling_over_several_turns_in_plain_text(text: TextTokenizer) -> None:
    tokens, call, result = text.prompt("3*4=", "plain"), text.encode("?3*4"), text.encode("12=")
    group = Group(
        Prompt(0, "3*4=", tokens, "12"),
        [
            played(0.0, [(tokens, text.encode("9"))]),
            played(1.0, [(tokens, call), (result, text.encode("12"))]),
            played(math.nan, [(tokens, call)]),
            played(1.0, [(tokens, text.encode("12"))]),
        ],
    )
    read = [text.decode(t.tokens) if t is not None else "" for _, t in teachers(privileged(text, "sibling"), group)]
    assert read == ["3*4= ?3*412=12 3*4=9", "3*4= 12 3*4=?3*412=12", "3*4= ?3*412=12 3*4=12"]


def test_an_answer_without_a_right_sibling_has_feedback_or_nothing(text: TextTokenizer) -> None:
    tokens = text.prompt("1+2=", "plain")
    wrong = played(0.0, [(tokens, text.encode("4"))])
    group = Group(Prompt(0, "1+2=", tokens, "3"), [wrong, replace(wrong, feedback="too large")])
    assert [t for _, t in teachers(privileged(text, "sibling"), group)] == [None, None]
    (_, nothing), (_, corrected) = teachers(privileged(text, "sibling", "feedback"), group)
    assert nothing is None
    assert corrected is not None
    assert text.decode(corrected.tokens) == "1+2= too large 1+2=4"


def test_a_demonstration_or_the_rows_answer(text: TextTokenizer) -> None:
    tokens = text.prompt("1+2=", "plain")
    shown = [("1", "and"), ("2", [{"role": "user", "content": "so"}]), ("3", "")]
    for demonstration, expected in (((), "3"), (shown, "1\nand\n2\nso\n3")):
        prompt = Prompt(0, "1+2=", tokens, "3", demonstration=demonstration)
        ((_, teacher),) = teachers(
            privileged(text, "demonstration", "answer"), Group(prompt, [played(0.0, [(tokens, [9, 9])])])
        )
        assert teacher is not None
        assert text.decode(teacher.tokens[: teacher.prompt]) == f"1+2= {expected} 1+2="


@pytest.mark.parametrize("template", ["hermes", "header", "mistral", "phi3", "qwen3", "coder"])
def test_a_chat_with_tools_an_observation_and_a_second_branch(template: str, tmp_path: Path) -> None:
    """Only the last user's message differs in the teacher's first context, also in a branch."""
    renderer = chatting(tmp_path, template)
    chat = renderer.chat
    messages: list[Message] = [{"role": "user", "content": "What is 1+2?"}]
    other: list[Message] = [{"role": "user", "content": "What is 1+2? 3 What is 1+2?"}]
    later: list[Message] = [{"role": "assistant", "content": "Hm"}, {"role": "user", "content": "What?"}]
    for tools, observed in ((None, []), (TOOLS, []), (None, later), (TOOLS, later)):
        read = chat.prompt([*messages, *observed], tools)
        prompt = Prompt(0, "What is 1+2?", chat.prompt(messages), "3", messages=messages)
        answer = renderer.tokenizer.encode("Three")
        rollout = played(0.0, [(read, answer), ([7, 8], answer)], [(read, answer[::-1])])
        prompts = privileged(renderer.tokenizer, "answer")
        for _, teacher in teachers(prompts, Group(prompt, [rollout])):
            assert teacher is not None
            assert list(teacher.tokens[: teacher.prompt]) == chat.prompt([*other, *observed], tools)


def test_a_prompt_of_an_agents_own_has_no_context(tmp_path: Path) -> None:
    renderer = chatting(tmp_path)
    chat = renderer.chat
    messages: list[Message] = [{"role": "user", "content": "What is 1+2?"}]
    prompt = Prompt(0, "", chat.prompt(messages), "3", messages=messages)
    own = chat.prompt([{"role": "user", "content": "Solve it"}])
    prompts = privileged(renderer.tokenizer, "answer")
    assert [t for _, t in teachers(prompts, Group(prompt, [played(0.0, [(own, [5])])]))] == [None]


@given(st.integers(1, 9), st.integers(1, 9), st.integers(1, 9), st.integers(0, 2**32 - 1))
def test_log_probs_return_to_their_tokens(first: int, read: int, later: int, seed: int) -> None:
    draw = np.random.default_rng(seed)
    kept = KeptSets.of([b""] * first + [np.array([i, i + 1], "<u4").tobytes() for i in range(later)])
    mask = np.r_[np.zeros(first, int), draw.integers(0, 2, later)]
    tokens = draw.integers(0, 9, first + later).tolist()
    sample = Sample(tokens, mask, prompt=first, sequence=3, extras={"kept": kept})
    teacher = exchanged(sample, tokens[:first], draw.integers(0, 9, read).tolist())
    assert teacher is not None
    assert teacher.sequence == 3
    assert teacher.extras["kept"].sizes.tolist() == [0] * read + [2] * later
    assert teacher.extras["kept"].words.tolist() == kept.words.tolist()
    scores = draw.normal(size=read + later)
    assert aligned(scores, sample, teacher)[first:].tolist() == scores[read:].tolist()
    with pytest.raises(AssertionError):
        aligned(scores, sample, replace(teacher, tokens=np.asarray(teacher.tokens) + 1))


def with_system(messages: list[Message], context: str) -> list[Message]:
    return [{"role": "system", "content": context}, *messages]


def test_a_template_is_a_text_or_a_function() -> None:
    messages: list[Message] = [{"role": "system", "content": "s"}, {"role": "user", "content": "{context}"}]
    assert template_of("{prompt}-{context}-{braces}")(messages, "{prompt}")[1:] == [
        {"role": "user", "content": "{context}-{prompt}-{braces}"}
    ]
    assert template_of(f"{__name__}:with_system")(messages[1:], "c") == [
        {"role": "system", "content": "c"},
        messages[1],
    ]
    for wrong in ("", "{prompt}", "{context}", "Answer", "{prompt}: now", "no_such:function", "json:dumps"):
        with pytest.raises((ValueError, TypeError), match=r"^teacher\.template"):
            template_of(wrong)(messages, "c")


# -- feedback ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("function", ["of_dict", "of_verl", "of_trl"])
def test_a_reward_function_returns_feedback(function: str) -> None:
    part = component(f"support.feedback_rewards:{function}")
    prompt, answer = Prompt(0, "1+2=", [], "3"), Answered("4")
    value = part.read(part.call(prompt, [answer] if part.at_once else answer))
    score = value[0] if part.at_once else value
    assert (score.value, score.feedback) == (0.5, "not 4")
    assert "feedback" not in score.more


def test_an_environments_last_feedback_is_the_rollouts() -> None:
    score = Score(judged=False)
    for feedback in ("cold", "warm"):
        score.turn(Step("", 0.5, info={"feedback": feedback, "calls": 1}))
    outcome = score.outcome("completed", 2, [])
    assert (outcome.feedback, outcome.metrics) == ("warm", {"calls": 2.0})
    assert json.dumps(outcome.feedback)
