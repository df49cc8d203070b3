"""Reads a policy's answer: thinking, text and tool calls, in the formats that chat templates teach.

"hermes"   <tool_call>{"name": "mul", "arguments": {"a": 3}}</tool_call>        Hermes, Qwen 2.5, Qwen 3
"llama"    {"name": "mul", "parameters": {"a": 3}}                              Llama 3.1 and later
"xml"      <tool_call><function=mul><parameter=a>3</parameter></function></tool_call>   Qwen3-Coder, Qwen 3.5
"mistral"  [TOOL_CALLS]mul[ARGS]{"a": 3}, [TOOL_CALLS][{"name": "mul", "arguments": {"a": 3}}]   Mistral
"text"     no calls
"""

import hashlib
import json
import re
from collections.abc import Iterable, Mapping
from typing import Any, Literal

from titan_rl.text.template import Message

CallFormat = Literal["hermes", "llama", "xml", "mistral", "text"]
Calls = list[tuple[str, dict[str, Any]]]
"""Names and arguments."""

HERMES = re.compile(r"<tool_call>(.*?)</tool_call>", re.DOTALL)
LLAMA = re.compile(r'\s*(?:<\|python_tag\|>\s*|(?=\{\s*"name"\s*:))(.*)', re.DOTALL)
XML = re.compile(r"\s*<function=([^>\n]+)>(.*)</function>\s*", re.DOTALL)
PARAMETER = re.compile(r"\s*<parameter=([^>\n]+)>\n?(.*?)\n?</parameter>\s*", re.DOTALL)
MISTRAL = "[TOOL_CALLS]"
MISTRAL_CALL = re.compile(r"\s*([^\s\[{]+)(?:\[CALL_ID\]\w*)?(?:\[ARGS\])?\s*(\{.*\})\s*", re.DOTALL)
PYTHONS = {"True": True, "False": False, "None": None}
"""How templates write these values."""


class MalformedCall(ValueError):
    """The policy began a tool call that cannot be read. `message` holds the answer as plain text."""

    def __init__(self, reason: str, message: Message) -> None:
        super().__init__(reason)
        self.message = message


def parse_answer(
    text: str, form: CallFormat, *, split_thinking: bool, id: str = "call", tools: Iterable[Mapping[str, Any]] = ()
) -> Message:
    """Return an assistant message in OpenAI's form. Calls are numbered after `id`; `tools` say which arguments are
    texts, where a format does not. Raise MalformedCall for a call that was begun but cannot be read. Text without
    thinking and calls stays as it is, white space included."""
    message: Message = {"role": "assistant", "content": text}
    thought, ended, said = text.partition("</think>")
    if split_thinking and (text.lstrip().startswith("<think>") or (ended and not _calls_at_once(thought, form))):
        message["content"] = said.lstrip("\n")
        message["reasoning_content"] = thought.strip().removeprefix("<think>").strip("\n")
    said = message["content"]
    try:
        found, rest = _calls(said, form, tools)
    except ValueError as error:
        raise MalformedCall(str(error), message) from error
    if found:
        message["content"] = rest
        message["tool_calls"] = [
            {
                "id": _id(f"{id}_{i}", form),
                "type": "function",
                "function": {"name": name, "arguments": json.dumps(arguments)},
            }
            for i, (name, arguments) in enumerate(found)
        ]
    return message


def _calls_at_once(thought: str, form: CallFormat) -> bool:
    """Return True if the text before "</think>" begins calls, one of which has that tag as a part of its text."""
    said = thought.lstrip()
    match form:
        case "llama":
            return LLAMA.match(said) is not None
        case "mistral":
            return said.startswith(MISTRAL)
        case "hermes" | "xml":
            return said.startswith("<tool_call>") and said.count("<tool_call>") > said.count("</tool_call>")
        case "text":
            return False


def _calls(said: str, form: CallFormat, tools: Iterable[Mapping[str, Any]]) -> tuple[Calls, str]:
    """Return the calls, and the text around them."""
    match form:
        case "llama":
            found = LLAMA.fullmatch(said)
            return ([_call(found[1], "parameters")], "") if found else ([], said)
        case "mistral":
            before, begun, written = said.partition(MISTRAL)
            return (_mistral(written), before.strip()) if begun else ([], said)
        case "hermes" | "xml":
            rest = HERMES.sub("", said)
            if "<tool_call>" in rest or "</tool_call>" in rest:
                raise ValueError("expected <tool_call> and </tool_call> around each call, found one without the other")
            inner = HERMES.findall(said)
            if not inner:
                return [], said
            calls = [_call(each, "arguments") if form == "hermes" else _xml(each, tools) for each in inner]
            return calls, rest.strip()
        case "text":
            return [], said


def _mistral(written: str) -> Calls:
    if not written.lstrip().startswith("["):
        calls = [MISTRAL_CALL.fullmatch(each) or each for each in written.split(MISTRAL)]
        if bad := [call for call in calls if isinstance(call, str)]:
            raise ValueError(f"expected a call as name[ARGS]{{...}}, found {_short(bad[0])}")
        return [(call[1], _object(_json(call[2]), call[2])) for call in calls if not isinstance(call, str)]
    listed = _json(written)
    if not isinstance(listed, list) or not listed:
        raise ValueError(f"expected a list of calls, found {_short(written)}")
    return [_named(call, "arguments", json.dumps(call)) for call in listed]


def _xml(inner: str, tools: Iterable[Mapping[str, Any]]) -> tuple[str, dict[str, Any]]:
    call = XML.fullmatch(inner)
    if call is None or PARAMETER.sub("", call[2]).strip():
        what = "<function=name><parameter=key>value</parameter></function>"
        raise ValueError(f"expected a call as {what}, found {_short(inner)}")
    schemas = [tool["function"] for tool in tools if tool["function"].get("name") == call[1]]
    known = schemas[0].get("parameters", {}).get("properties", {}) if schemas else {}
    return call[1], {key: _value(text, known.get(key, {})) for key, text in PARAMETER.findall(call[2])}


def _value(text: str, schema: Mapping[str, Any]) -> Any:
    """Return an argument: a text if the schema asks for one, or if it is no other value."""
    kinds = [schema, *schema.get("anyOf", ())]
    texts = any(isinstance(value, str) for kind in kinds for value in kind.get("enum", ()))
    if texts or any(kind.get("type") == "string" for kind in kinds):
        return text
    try:
        return PYTHONS[text] if text in PYTHONS else json.loads(text)
    except (ValueError, RecursionError):
        return text


def _call(inner: str, key: str) -> tuple[str, dict[str, Any]]:
    return _named(_json(inner), key, inner)


def _json(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"expected a call in JSON, found {error} in {_short(text)}") from error


def _named(call: Any, key: str, shown: str) -> tuple[str, dict[str, Any]]:
    if not isinstance(call, dict) or not isinstance(call.get("name"), str):
        raise ValueError(f'expected a call with a "name", found {_short(shown)}')
    return call["name"], _object(call.get(key, call.get("parameters", call.get("arguments", {}))), shown, key)


def _object(arguments: Any, shown: str, key: str = "arguments") -> dict[str, Any]:
    if not isinstance(arguments, dict):
        raise ValueError(f'expected "{key}" to be an object, found {_short(shown)}')
    return arguments


def _id(id: str, form: CallFormat) -> str:
    """Return the id of a call. Mistral's templates take ids of nine letters and digits only."""
    return hashlib.blake2b(id.encode(), digest_size=8).hexdigest()[:9] if form == "mistral" else id


def _short(text: str) -> str:
    text = text.strip()
    return repr(text if len(text) <= 80 else f"{text[:77]}...")
