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
    ],
)
def test_a_malformed_call_is_named_and_its_text_is_kept(form: CallFormat, said: str, reason: str) -> None:
    with pytest.raises(MalformedCall, match=reason) as caught:
        parse_answer(said, form, split_thinking=True)
    assert caught.value.message == {"role": "assistant", "content": said}


def test_an_answer_without_calls_stays_as_it_is() -> None:
    cases: list[tuple[CallFormat, str]] = [("hermes", "  12\n"), ("llama", '{"a": 1}'), ("llama", "12")]
    for form, said in [*cases, ("text", "<tool_call>"), ("xml", " 12\n"), ("mistral", " [ARGS]{}\n")]:
        assert parse_answer(said, form, split_thinking=True) == {"role": "assistant", "content": said}


def test_thinking_is_split_off() -> None:
    for said, thought, content in (
        ("<think>\na\n</think>\n\nb", "a", "b"),
        ("a\n</think>\n\nb", "a", "b"),  # the prompt opened it
        ("<think>\na", "a", ""),  # cut off
    ):
        message = parse_answer(said, "text", split_thinking=True)
        assert (message["reasoning_content"], message["content"]) == (thought, content)
        assert parse_answer(said, "text", split_thinking=False)["content"] == said


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
        assert message.get("reasoning_content") == ("hm" if name == "qwen3" else None)
        assert text.chat.parse(tokens, TOOLS) == message
        assert text.chat.parse(tokens[:-1], TOOLS)["tool_calls"] == message["tool_calls"]
        assert "tool_calls" not in text.chat.parse(tokens)
