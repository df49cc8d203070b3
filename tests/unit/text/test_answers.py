"""What a policy said becomes a message with calls, or a named error."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from support.chat_folders import chat_folder
from titan_rl.ext.agents.tools import schema
from titan_rl.text.answers import CallFormat, MalformedCall, parse_answer
from titan_rl.text.tokenizer import TextTokenizer

TOOLS = [{"type": "function", "function": {"name": "mul", "parameters": {}}}]
WRITTEN: dict[CallFormat, str] = {
    "hermes": '<tool_call>\n{{"name": {name}, "arguments": {arguments}}}\n</tool_call>',
    "llama": '{{"name": {name}, "parameters": {arguments}}}',
    "mistral": '[TOOL_CALLS][{{"name": {name}, "arguments": {arguments}, "id": "abcdefghi"}}]',
}


@pytest.mark.parametrize("form", WRITTEN)
def test_every_call_round_trips(form: CallFormat) -> None:
    values = st.recursive(st.none() | st.booleans() | st.integers() | st.text(), lambda v: st.lists(v, max_size=3))

    @given(st.text(min_size=1), st.dictionaries(st.text(), values, max_size=3))
    @example("</think>", {})
    @example("f", {"text": "</think>"})
    def survives(name: str, arguments: dict[str, object]) -> None:
        if "<tool_call>" in f"{name}{arguments}" or "</tool_call>" in f"{name}{arguments}":
            return
        said = WRITTEN[form].format(name=json.dumps(name), arguments=json.dumps(arguments))
        message = parse_answer(said, form, split_thinking=True)
        (call,) = message["tool_calls"]
        assert (call["function"]["name"], json.loads(call["function"]["arguments"])) == (name, arguments)

    survives()


def test_text_between_calls_is_kept() -> None:
    said = 'I ask.\n<tool_call>{"name": "f"}</tool_call>\n<tool_call>{"name": "g", "arguments": {"a": 1}}</tool_call>'
    message = parse_answer(said, "hermes", split_thinking=True, id="x")
    assert message["content"] == "I ask."
    assert [(c["id"], c["function"]) for c in message["tool_calls"]] == [
        ("x_0", {"name": "f", "arguments": "{}"}),
        ("x_1", {"name": "g", "arguments": '{"a": 1}'}),
    ]


def calls(said: str, form: CallFormat, tools: Sequence[Any] = ()) -> list[tuple[str, Any]]:
    found = parse_answer(said, form, split_thinking=True, tools=tools)["tool_calls"]
    return [(call["function"]["name"], json.loads(call["function"]["arguments"])) for call in found]


@pytest.mark.parametrize(
    "said",
    [
        '[TOOL_CALLS][{"name": "f", "arguments": {"a": 1}}, {"name": "g", "arguments": {}}]',
        '[TOOL_CALLS] [{"name": "f", "arguments": {"a": 1}, "id": "abcdefghi"}, {"name": "g"}]',
        '[TOOL_CALLS]f[ARGS]{"a": 1}[TOOL_CALLS]g[ARGS]{}',
        '[TOOL_CALLS]f[CALL_ID]abcdefghi[ARGS]{"a": 1}[TOOL_CALLS]g[CALL_ID]bcdefghij[ARGS]{}',
        '[TOOL_CALLS]f{"a": 1}[TOOL_CALLS] g {}',
    ],
)
def test_all_of_mistrals_ways_to_write_calls_are_read(said: str) -> None:
    assert calls(f" I ask.{said}", "mistral") == [("f", {"a": 1}), ("g", {})]
    message = parse_answer(f" I ask.{said}", "mistral", split_thinking=True, id="call_7")
    ids = [call["id"] for call in message["tool_calls"]]
    assert message["content"] == "I ask."
    assert all(len(id) == 9 and id.isalnum() for id in ids), "its templates refuse others"
    assert len(set(ids)) == 2


def test_arguments_without_quotes_have_the_types_that_the_tool_declares() -> None:
    """XML calls write 12 for the number and for the text."""

    def find(
        name: str, code: str, count: int, exact: bool, unit: Literal["m", "km"], note: str | None, more: dict[str, Any]
    ) -> None:
        """Find."""

    values = {
        "name": "12",
        "code": " a\n<b>\n",
        "count": 12,
        "exact": True,
        "unit": "km",
        "note": "3",
        "more": {"x": [1]},
    }
    written = {**values, "exact": "True", "more": '{"x": [1]}'}
    said = "".join(f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in written.items())
    whole = f"<tool_call>\n<function=find>\n{said}</function>\n</tool_call>"
    assert calls(f"Well.\n{whole}", "xml", [schema(find)]) == [("find", values)]
    guessed = {**values, "name": 12, "note": 3}
    assert calls(whole, "xml") == [("find", guessed)], "without a schema"
    assert calls(f"{whole}{whole}", "xml", [schema(find)]) == [("find", values)] * 2


@pytest.mark.parametrize(
    ("form", "said", "reason"),
    [
        ("hermes", '<tool_call>{"name": "f"', "one without the other"),
        ("hermes", "</tool_call>", "one without the other"),
        ("hermes", "<tool_call>f(1)</tool_call>", "expected a call in JSON"),
        ("hermes", "<tool_call>[1]</tool_call>", 'a call with a "name"'),
        ("hermes", '<tool_call>{"name": "f", "arguments": "1"}</tool_call>', '"arguments" to be an object'),
        ("hermes", "<tool_call>" + "[" * 100_000 + "</tool_call>", "expected a call in JSON"),
        ("llama", '{"name": "f", "parameters": {', "expected a call in JSON"),
        ("llama", '{"name": "f", "parameters": 3}', '"parameters" to be an object'),
        ("llama", "<|python_tag|>print(1)", "expected a call in JSON"),
        ("xml", "<tool_call><function=f>", "one without the other"),
        ("xml", '<tool_call>{"name": "f"}</tool_call>', "expected a call as <function=name>"),
        ("xml", "<tool_call><function=f>1</function></tool_call>", "expected a call as <function=name>"),
        ("xml", "<tool_call><function=f><parameter=a>1</function></tool_call>", "expected a call as <function=name>"),
        ("mistral", "[TOOL_CALLS]", "expected a call as name"),
        ("mistral", "[TOOL_CALLS]f[ARGS]", "expected a call as name"),
        ("mistral", "[TOOL_CALLS]f[ARGS]{1}", "expected a call in JSON"),
        ("mistral", "[TOOL_CALLS] []", "expected a list of calls"),
        ("mistral", '[TOOL_CALLS] [{"name": "f"}', "expected a call in JSON"),
        ("mistral", '[TOOL_CALLS] [{"name": "f", "arguments": 3}]', '"arguments" to be an object'),
        ("mistral", "[TOOL_CALLS][3]", 'a call with a "name"'),
        ("glm", "<tool_call>f\n<arg_key>a</arg_key>", "one without the other"),
        ("glm", '<tool_call>{"name": "f"}<b></tool_call>', "expected a call as name<arg_key>"),
        ("glm", "<tool_call>\n</tool_call>", "expected a call as name<arg_key>"),
        ("glm", "<tool_call>f<arg_key>a</arg_key></tool_call>", "expected a call as name<arg_key>"),
        ("glm", "<tool_call>f<arg_key>a</arg_key><arg_value>1</tool_call>", "expected a call as name<arg_key>"),
        ("gemma", "<|tool_call>call:f{a:1}", "one without the other"),
        ("gemma", "<|tool_call>f{a:1}<tool_call|>", "expected a call as call:name"),
        ("gemma", "<|tool_call>call:f{a:b}<tool_call|>", "expected a call in JSON"),
        ("gemma", '<|tool_call>call:f{a:<|"|>b}<tool_call|>', "expected a call in JSON"),
        ("gemma", "<|tool_call>call:f{a:1,}<tool_call|>", "expected a call in JSON"),
        ("gemma", "<|tool_call>call:f{a:" + "[" * 100_000 + "}<tool_call|>", "expected a call in JSON"),
        ("harmony", "<|channel|>commentary to=functions.f", "expected a call in JSON"),
        ("harmony", '<|channel|>commentary to=functions.f json<|message|>{"a": ', "expected a call in JSON"),
        ("harmony", "<|channel|>commentary to=functions.f<|message|>3", '"arguments" to be an object'),
        ("harmony", "<|channel|>analysis to=python code<|message|>print(1)<|call|>", "expected a call in JSON"),
    ],
)
def test_a_malformed_call_is_named_and_its_text_is_kept(form: CallFormat, said: str, reason: str) -> None:
    with pytest.raises(MalformedCall, match=reason) as caught:
        parse_answer(said, form, split_thinking=True)
    assert caught.value.message == {"role": "assistant", "content": said}


def test_an_answer_without_calls_stays_as_it_is() -> None:
    cases: list[tuple[CallFormat, str]] = [
        *(("hermes", "  12\n"), ("llama", '{"a": 1}'), ("llama", "12"), ("text", "<tool_call>"), ("xml", " 12\n")),
        *(("mistral", " [ARGS]{}\n"), ("glm", " 12\n"), ("gemma", "call:f{}\n"), ("harmony", " to=functions.f 12\n")),
    ]
    for form, said in cases:
        assert parse_answer(said, form, split_thinking=True) == {"role": "assistant", "content": said}


def test_without_tools_calls_stay_text() -> None:
    cases: list[tuple[CallFormat, str, str]] = [
        ("hermes", '<tool_call>{"name": "f"}</tool_call>', '<tool_call>{"name": "f"}</tool_call>'),
        ("gemma", "<|tool_call>call:f{}<tool_call|>", "<|tool_call>call:f{}<tool_call|>"),
        ("harmony", "<|channel|>commentary to=functions.f json<|message|>{}<|call|>", "{}"),
    ]
    for form, said, content in cases:
        assert parse_answer(said, form, split_thinking=True, tools=None) == {"role": "assistant", "content": content}


def test_thinking_is_split_off() -> None:
    for said, thought, content in (
        ("<think>\na\n</think>\n\nb", "a", "b"),
        ("a\n</think>\n\nb", "a", "b"),  # the prompt opened it
        ("<think>\na", "a", ""),  # cut off
    ):
        message = parse_answer(said, "text", split_thinking=True)
        assert (message["reasoning_content"], message["content"]) == (thought, content)
        assert parse_answer(said, "text", split_thinking=False)["content"] == said


def test_gemmas_thinking_is_split_off() -> None:
    called = '<|tool_call>call:f{a:<|"|><channel|><|"|>}<tool_call|>'
    for said, thought, content, count in (
        ("<|channel>thought\na\n<channel|>b", "a", "b", 0),
        ("a\n<channel|>b", "a", "b", 0),  # the prompt opened it
        ("<|channel>thought\na", "a", "", 0),  # cut off
        (f"<|channel>thought\na\n<channel|>b{called}", "a", "b", 1),
        (called, None, "", 1),
    ):
        message = parse_answer(said, "gemma", split_thinking=True)
        assert (message.get("reasoning_content"), message["content"]) == (thought, content)
        assert len(message.get("tool_calls", ())) == count


def test_harmonys_channels_are_thinking_text_and_calls() -> None:
    """The model writes a recipient before or after the channel, and gives content types."""
    thinking = "<|channel|>analysis<|message|>a<b<|end|>"
    for said, thought, content, found in (
        ("<|channel|>final<|message|> 12\n", None, " 12\n", []),
        (f"{thinking}<|start|>assistant<|channel|>final<|message|>12<|return|>", "a<b", "12", []),
        (thinking, "a<b", "", []),  # cut off
        (f"{thinking}{thinking.replace('<|ch', '<|start|>assistant<|ch', 1)}", "a<b\na<b", "", []),
        (" to=functions.f<|channel|>commentary json<|message|>{}", None, "", [("f", {})]),
        (
            f"{thinking}<|start|>assistant<|channel|>commentary<|message|>I ask.<|end|><|start|>assistant<|channel|>"
            'commentary to=functions.f.g <|constrain|>json<|message|>{"a": "to=b"}<|call|>'
            "<|start|>assistant to=functions.h<|channel|>commentary<|message|>{}",
            "a<b",
            "I ask.",
            [("f.g", {"a": "to=b"}), ("h", {})],
        ),
    ):
        message = parse_answer(said, "harmony", split_thinking=True)
        assert (message.get("reasoning_content"), message["content"]) == (thought, content), said
        made = [call["function"] for call in message.get("tool_calls", ())]
        assert [(call["name"], json.loads(call["arguments"])) for call in made] == found


def test_all_of_gemmas_and_glms_ways_to_write_calls_are_read() -> None:
    written = '<|tool_call>call:f{ a : 1 , <|"|>b c<|"|>:[true,{d:<|"|>{x:"y"}<|"|>}], e:"g:h"}<tool_call|>'
    assert calls(written, "gemma") == [("f", {"a": 1, "b c": [True, {"d": '{x:"y"}'}], "e": "g:h"})]
    arguments = "<arg_key>a</arg_key><arg_value>1</arg_value><arg_key>b</arg_key><arg_value> c</arg_value>"
    later = f"<tool_call>f{arguments}</tool_call>"
    for said in (later, later.replace("><arg", ">\n<arg").replace("f<", "f\n<").replace("></t", ">\n</t")):
        assert calls(f"{said}\n{said}", "glm") == [("f", {"a": 1, "b": " c"})] * 2
    assert calls("<tool_call>f</tool_call>", "glm") == [("f", {})]


@pytest.mark.parametrize(
    ("name", "form", "said"),
    [
        (
            "qwen3",
            "hermes",
            '<think>\nhm\n</think>\n\n<tool_call>\n{"name": "mul", "arguments": {"a": 3}}\n</tool_call>',
        ),
        ("hermes", "hermes", '<tool_call>{"name": "mul", "arguments": {"a": 3}}</tool_call>'),
        ("header", "llama", '{"name": "mul", "parameters": {"a": 3}}'),
        ("mistral", "mistral", '[TOOL_CALLS] [{"name": "mul", "arguments": {"a": 3}}]'),
        ("mistral", "mistral", '[TOOL_CALLS]mul[ARGS]{"a": 3}'),
        ("coder", "xml", "<tool_call>\n<function=mul>\n<parameter=a>\n3\n</parameter>\n</function>\n</tool_call>"),
        (
            "glm",
            "glm",
            "<think>hm</think>\n<tool_call>mul\n<arg_key>a</arg_key>\n<arg_value>3</arg_value>\n</tool_call>",
        ),
        ("gemma4", "gemma", "<|channel>thought\nhm\n<channel|><|tool_call>call:mul{a:3}<tool_call|>"),
        (
            "gpt_oss",
            "harmony",
            "<|channel|>analysis<|message|>hm<|end|><|start|>assistant<|channel|>commentary to=functions.mul "
            '<|constrain|>json<|message|>{"a": 3}',
        ),
        ("phi3", "text", ""),
        ("open_ended", "text", ""),
    ],
)
def test_a_renderer_knows_its_templates_calls(tmp_path: Path, name: str, form: CallFormat, said: str) -> None:
    text = TextTokenizer.load(chat_folder(tmp_path, name))
    assert text.chat.call_format == form
    if said:
        tokens = [*text.encode(said), text.eos]
        message = text.chat.parse(tokens, TOOLS)
        assert message["tool_calls"][0]["function"] == {"name": "mul", "arguments": '{"a": 3}'}
        assert message.get("reasoning_content") == ("hm" if "hm" in said else None)
        assert text.chat.parse(tokens, TOOLS) == message
        assert text.chat.parse(tokens[:-1], TOOLS)["tool_calls"] == message["tool_calls"]
        assert "tool_calls" not in text.chat.parse(tokens)
