"""Reads what a policy said: thinking, text and tool calls, in the formats that chat templates teach.

"hermes"  <tool_call>{"name": "mul", "arguments": {"a": 3}}</tool_call>     Hermes, Qwen 2.5, Qwen 3
"llama"   {"name": "mul", "parameters": {"a": 3}}                           Llama 3.1 and later
"text"    no calls
"""

import json
import re
from typing import Any, Literal

from titan_rl.text.template import Message

CallFormat = Literal["hermes", "llama", "text"]

HERMES = re.compile(r"<tool_call>(.*?)</tool_call>", re.DOTALL)
LLAMA = re.compile(r'\s*(?:<\|python_tag\|>\s*|(?=\{\s*"name"\s*:))(.*)', re.DOTALL)


class MalformedCall(ValueError):
    """The policy began a tool call that cannot be read. `message` holds the answer as plain text."""

    def __init__(self, reason: str, message: Message) -> None:
        super().__init__(reason)
        self.message = message


def parse_answer(text: str, form: CallFormat, *, split_thinking: bool, id: str = "call") -> Message:
    """Return an assistant message in OpenAI's form. Calls are numbered after `id`. Raise MalformedCall for a call that
    was begun but cannot be read. Text without thinking and calls stays as it is, white space included."""
    message: Message = {"role": "assistant", "content": text}
    if split_thinking and ("</think>" in text or text.lstrip().startswith("<think>")):
        thought, _, said = text.partition("</think>")
        message["content"] = said.lstrip("\n")
        message["reasoning_content"] = thought.strip().removeprefix("<think>").strip("\n")
    said = message["content"]
    try:
        found, rest = _hermes(said) if form == "hermes" else _llama(said) if form == "llama" else ([], said)
    except ValueError as error:
        raise MalformedCall(str(error), message) from error
    if found:
        message["content"] = rest
        message["tool_calls"] = [
            {"id": f"{id}_{i}", "type": "function", "function": {"name": name, "arguments": json.dumps(arguments)}}
            for i, (name, arguments) in enumerate(found)
        ]
    return message


def _hermes(said: str) -> tuple[list[tuple[str, Any]], str]:
    calls = [_call(inner, "arguments") for inner in HERMES.findall(said)]
    rest = HERMES.sub("", said)
    if "<tool_call>" in rest or "</tool_call>" in rest:
        raise ValueError("expected <tool_call> and </tool_call> around each call, found one without the other")
    return calls, rest.strip() if calls else said


def _llama(said: str) -> tuple[list[tuple[str, Any]], str]:
    found = LLAMA.fullmatch(said)
    return ([_call(found[1], "parameters")], "") if found else ([], said)


def _call(inner: str, key: str) -> tuple[str, dict[str, Any]]:
    try:
        call = json.loads(inner)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"expected a call in JSON, found {error} in {_short(inner)}") from error
    if not isinstance(call, dict) or not isinstance(call.get("name"), str):
        raise ValueError(f'expected a call with a "name", found {_short(inner)}')
    arguments = call.get(key, call.get("parameters", call.get("arguments", {})))
    if not isinstance(arguments, dict):
        raise ValueError(f'expected "{key}" to be an object, found {_short(inner)}')
    return call["name"], arguments


def _short(text: str) -> str:
    text = text.strip()
    return repr(text if len(text) <= 80 else f"{text[:77]}...")
