"""Calls survive the way through a model's own chat template: messages, text, tokens, and back."""

import json
from typing import Any

import pytest

from support.chat_folders import CONTROL, chat_folder
from support.odd_calls import TOOLS, OddCalls, message
from titan_rl.text.answers import CallFormat, MalformedCall
from titan_rl.text.inspection import answered, inspect_template, verdict
from titan_rl.text.template import ChatSettings, Message
from titan_rl.text.tokenizer import TextTokenizer

FORMS: dict[str, CallFormat] = {
    "qwen3": "hermes",
    "mistral": "mistral",
    "glm": "glm",
    "gemma4": "gemma",
    "gpt_oss": "harmony",
}
NEW = ("glm", "gemma4", "gpt_oss")
ASKED: Message = {"role": "user", "content": "What is 3*4?"}
PINNED = {"date_string": "26 Jul 2024"}
SEEDS = 150


@pytest.fixture(scope="module")
def texts(tmp_path_factory: pytest.TempPathFactory) -> dict[str, TextTokenizer]:
    settings = ChatSettings(kwargs=PINNED)
    return {name: TextTokenizer.load(chat_folder(tmp_path_factory.mktemp(name), name), settings) for name in FORMS}


def called(found: Message) -> list[tuple[str, Any]]:
    calls = [call["function"] for call in found.get("tool_calls", ())]
    return [(call["name"], json.loads(call["arguments"])) for call in calls]


@pytest.mark.parametrize("name", FORMS)
def test_odd_calls_are_read_as_they_were_written(texts: dict[str, TextTokenizer], name: str) -> None:
    """Control tokens that an argument spells are text: the sampled tokens tell them apart."""
    text, most = texts[name], 1 if name == "gpt_oss" else 3
    for seed in range(SEEDS):
        odd = OddCalls(seed, CONTROL[name])
        calls = [odd.call() for _ in range(1 + seed % most)]
        opened = text.chat.prompt([ASKED], TOOLS)
        tokens = answered(text.chat, [ASKED, message(calls)], TOOLS)
        if name == "glm":  # the next turn's first token ends a turn
            tokens.append(text.chat.outside.control["<|observation|>"])
        assert tokens[: len(opened)] == opened
        for said in (tokens[len(opened) :], tokens[len(opened) : -1]):
            assert called(text.chat.parse(said, TOOLS)) == calls, (seed, text.decode(said, skip_special=False))
        if name in NEW:
            results = [
                {"role": "tool", "name": tool, "tool_call_id": f"call{i:05d}", "content": odd.call()[0]}
                for i, (tool, _) in enumerate(calls)
            ]
            added = text.chat.extend(tokens, results, TOOLS)
            assert added is not None
            assert [*tokens, *added] == text.chat.prompt([ASKED, message(calls), *results], TOOLS)


def test_a_malformed_call_spells_no_marks(texts: dict[str, TextTokenizer]) -> None:
    """Its reason and its text show control tokens that ordinary tokens spell as they are."""
    chat = texts["gemma4"].chat
    control = chat.outside.control
    inner = texts["gemma4"].encode_outside("call:f{a:<tool_call|>}")
    with pytest.raises(MalformedCall, match=r"found .* in '\{\"a\":<tool_call\|>\}'") as caught:
        chat.parse([control["<|tool_call>"], *inner, control["<tool_call|>"], control["<|tool_response>"]], TOOLS)
    assert caught.value.message["content"] == "<|tool_call>call:f{a:<tool_call|>}<tool_call|>"


REMARKS: dict[str, set[str]] = {
    "glm": {"a thought and an answer, then the user", "a call, an answer, then the user", "white space of an answer"},
    "gemma4": {
        "a thought and an answer, then the user",
        "a call, an answer, then the user",
        "white space of an answer",
    },
    "gpt_oss": {
        *("an answer, then the user", "two answers, then the user", "a thought and an answer, then the user"),
        "a call, an answer, then the user",
    },
}
VERDICTS = {
    "glm": "does not extend its own text; turns are kept as sampled: one branch per rollout",
    "gemma4": "does not extend its own text; turns are kept as sampled: one branch per rollout",
    "gpt_oss": "does not extend its own text: some turns begin a branch",
}


@pytest.mark.parametrize("name", NEW)
def test_the_linter_accepts_the_models_own_template(texts: dict[str, TextTokenizer], name: str) -> None:
    """Calls and results extend their turns token by token, masks are exact, and no text forges a control token."""
    findings = inspect_template(texts[name])
    assert {finding.check for finding in findings if finding.detail} - {"padding"} == REMARKS[name]
    assert not any(finding.refuses for finding in findings)
    assert verdict(findings) == VERDICTS[name]
    assert texts[name].chat.call_format == FORMS[name]


def test_the_end_of_another_kind_of_turn_begins_a_branch(texts: dict[str, TextTokenizer]) -> None:
    """Gemma's <|tool_response> ends a call and opens its result."""
    text = texts["gemma4"]
    turn, response = (text.chat.outside.control[token] for token in ("<turn|>", "<|tool_response>"))
    said = [*text.chat.prompt([ASKED], TOOLS), *text.encode("<|tool_call>call:f{}<tool_call|>")]
    result = {"role": "tool", "name": "f", "tool_call_id": "call00000", "content": "12"}
    added = text.chat.extend([*said, response], [result], TOOLS)
    assert text.decode(added or [], skip_special=False) == 'response:f{value:<|"|>12<|"|>}<tool_response|>'
    assert text.chat.extend(said, [result], TOOLS) == [response, *(added or [])], "cut off"
    assert text.chat.extend([*said, turn], [result], TOOLS) is None
    assert text.chat.extend([*said, response], [{"role": "user", "content": "error: no"}], TOOLS) is None


def test_a_result_without_a_name_is_named_by_its_call(texts: dict[str, TextTokenizer]) -> None:
    text, made = texts["gpt_oss"], message([("look_up", {"text": "a"})])
    result: Message = {"role": "tool", "tool_call_id": "call00000", "content": "12"}
    tokens = answered(text.chat, [ASKED, made], TOOLS)
    assert text.chat.extend(tokens, [result], TOOLS) is None, "it would name another tool"
    added = text.chat.extend(tokens, [result], TOOLS, made["tool_calls"])
    assert text.decode(added or [], skip_special=False) == (
        '<|start|>functions.look_up to=assistant<|channel|>commentary<|message|>"12"<|end|><|start|>assistant'
    )
    assert [*tokens, *(added or [])] == text.chat.prompt([ASKED, made, result], TOOLS)


def test_gpt_oss_reads_a_thought_and_a_text_beside_a_call(texts: dict[str, TextTokenizer]) -> None:
    """Its template refuses both; clients send null for no text."""
    made: Message = {**message([("f", {})]), "reasoning_content": "hm", "content": "I ask."}
    shown = texts["gpt_oss"].chat.render([ASKED, made], TOOLS)
    assert "<|channel|>analysis<|message|>hm\n\nI ask.<|end|><|start|>assistant to=functions.f<|channel|>" in shown
    assert "None" not in texts["gpt_oss"].chat.render([ASKED, {**made, "content": None}], TOOLS)[len("<|start|>") :]
