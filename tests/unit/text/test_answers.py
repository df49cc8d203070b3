"""What a policy said becomes a message with calls, or a named error."""

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from support.chat_folders import chat_folder
from titan_rl.text.answers import CallFormat, MalformedCall, parse_answer
from titan_rl.text.tokenizer import TextTokenizer

TOOLS = [{"type": "function", "function": {"name": "mul", "parameters": {}}}]
WRITTEN: dict[CallFormat, str] = {
    "hermes": '<tool_call>\n{{"name": {name}, "arguments": {arguments}}}\n</tool_call>',
    "llama": '{{"name": {name}, "parameters": {arguments}}}',
}


@pytest.mark.parametrize("form", WRITTEN)
def test_every_call_round_trips(form: CallFormat) -> None:
    values = st.recursive(st.none() | st.booleans() | st.integers() | st.text(), lambda v: st.lists(v, max_size=3))

    @given(st.text(min_size=1), st.dictionaries(st.text(), values, max_size=3))
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
    ],
)
def test_a_malformed_call_is_named_and_its_text_is_kept(form: CallFormat, said: str, reason: str) -> None:
    with pytest.raises(MalformedCall, match=reason) as caught:
        parse_answer(said, form, split_thinking=True)
    assert caught.value.message == {"role": "assistant", "content": said}


def test_an_answer_without_calls_stays_as_it_is() -> None:
    cases: list[tuple[CallFormat, str]] = [("hermes", "  12\n"), ("llama", '{"a": 1}'), ("llama", "12")]
    for form, said in [*cases, ("text", "<tool_call>")]:
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
