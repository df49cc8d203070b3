"""Reads a policy's answer: thinking, text and tool calls, in the formats that chat templates teach.

"hermes"   <tool_call>{"name": "mul", "arguments": {"a": 3}}</tool_call>        Hermes, Qwen 2.5, Qwen 3
"llama"    {"name": "mul", "parameters": {"a": 3}}                              Llama 3.1 and later
"xml"      <tool_call><function=mul><parameter=a>3</parameter></function></tool_call>   Qwen3-Coder, Qwen 3.5
"mistral"  [TOOL_CALLS]mul[ARGS]{"a": 3}, [TOOL_CALLS][{"name": "mul", "arguments": {"a": 3}}]   Mistral
"glm"      <tool_call>mul<arg_key>a</arg_key><arg_value>3</arg_value></tool_call>       GLM-4.5 and later
"gemma"    <|tool_call>call:mul{a:3,b:<|"|>text<|"|>}<tool_call|>                       Gemma 4
"harmony"  <|channel|>commentary to=functions.mul <|constrain|>json<|message|>{"a": 3}  gpt-oss
"text"     no calls
"""

import hashlib
import json
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Literal

from titan_rl.text.template import Message

CallFormat = Literal["hermes", "llama", "xml", "mistral", "glm", "gemma", "harmony", "text"]
Call = tuple[str, dict[str, Any]]
"""Name and arguments."""
Calls = list[Call]

CALL_TAGS: dict[CallFormat, tuple[str, str]] = {
    "gemma": ("<|tool_call>", "<tool_call|>"),
    **dict.fromkeys(("hermes", "xml", "glm"), ("<tool_call>", "</tool_call>")),
}
THOUGHT_TAGS: dict[CallFormat, tuple[str, str]] = {"gemma": ("<|channel>thought", "<channel|>")}
LLAMA = re.compile(r'\s*(?:<\|python_tag\|>\s*|(?=\{\s*"name"\s*:))(.*)', re.DOTALL)
XML = re.compile(r"\s*<function=([^>\n]+)>(.*)</function>\s*", re.DOTALL)
PARAMETER = re.compile(r"\s*<parameter=([^>\n]+)>\n?(.*?)\n?</parameter>\s*", re.DOTALL)
GLM = re.compile(r"\s*([^\n<]+?)\s*((?:<arg_key>.*)?)", re.DOTALL)
GLM_ARGUMENT = re.compile(r"\s*<arg_key>(.*?)</arg_key>\s*<arg_value>(.*?)</arg_value>\s*", re.DOTALL)
MISTRAL = "[TOOL_CALLS]"
MISTRAL_CALL = re.compile(r"\s*([^\s\[{]+)(?:\[CALL_ID\]\w*)?(?:\[ARGS\])?\s*(\{.*\})\s*", re.DOTALL)
GEMMA = re.compile(r"\s*call:\s*([^\s{]+)\s*(\{.*\})\s*", re.DOTALL)
GEMMA_KEY = re.compile(r'"(?:[^"\\]|\\.)*"|([{,]\s*)([^\s{}\[\]:,"][^{}\[\]:,"]*?)(?=\s*:)')
"""A key without quotes, or a text of JSON, in which there are none."""
GEMMA_QUOTE = '<|"|>'
START, MESSAGE = "<|start|>assistant", "<|message|>"
HARMONY_END = re.compile(r"<\|(?:end|return|call)\|>")
RECIPIENT = re.compile(r"\bto=([^\s<]+)")
ANALYSIS = re.compile(r"<\|channel\|>\s*analysis\b")
PYTHONS = {"True": True, "False": False, "None": None}
"""How templates write these values."""


class MalformedCall(ValueError):
    """The policy began a tool call that cannot be read. `message` holds the answer as plain text."""

    def __init__(self, reason: str, message: Message) -> None:
        super().__init__(reason)
        self.message = message


def parse_answer(
    text: str,
    form: CallFormat,
    *,
    split_thinking: bool,
    id: str = "call",
    tools: Iterable[Mapping[str, Any]] | None = (),
) -> Message:
    """Return an assistant message in OpenAI's form. Calls are numbered after `id`; `tools` say which arguments are
    texts, where a format does not. None: a policy without tools, whose calls stay text. Raise MalformedCall for a call
    that was begun but cannot be read. Text without thinking and calls stays as it is, white space included."""
    message: Message = {"role": "assistant", "content": text}
    if split_thinking:
        message |= _thought_and_rest(text, form, calls=tools is not None)
    try:
        found, rest = _calls(message["content"], form, tools)
    except ValueError as error:
        raise MalformedCall(str(error), message) from error
    message["content"] = rest
    if found:
        message["tool_calls"] = [
            {
                "id": _id(f"{id}_{i}", form),
                "type": "function",
                "function": {"name": name, "arguments": json.dumps(arguments)},
            }
            for i, (name, arguments) in enumerate(found)
        ]
    return message


def _thought_and_rest(text: str, form: CallFormat, *, calls: bool) -> Message:
    """Return the thinking and the text after it; nothing if there is no thinking."""
    if form == "harmony":
        parts = list(_harmony_messages(text))
        thoughts = [body for _, header, body in parts if _is_analysis(header)]
        rest = START.join(whole for whole, header, _ in parts if not _is_analysis(header))
        return {"content": rest, "reasoning_content": "\n".join(thoughts)} if thoughts else {}
    begin, end = THOUGHT_TAGS.get(form, ("<think>", "</think>"))
    thought, ended, said = text.partition(end)
    if text.lstrip().startswith(begin) or (ended and not (calls and _calls_at_once(thought, form))):
        return {"content": said.lstrip("\n"), "reasoning_content": thought.strip().removeprefix(begin).strip("\n")}
    return {}


def _calls_at_once(thought: str, form: CallFormat) -> bool:
    """Return True if the text before the end of a thought begins calls, one of which has that tag as a part of its
    text."""
    said = thought.lstrip()
    if form == "llama":
        return LLAMA.match(said) is not None
    if form == "mistral":
        return said.startswith(MISTRAL)
    if form in CALL_TAGS:
        begin, end = CALL_TAGS[form]
        return said.startswith(begin) and said.count(begin) > said.count(end)
    return False


def _calls(said: str, form: CallFormat, tools: Iterable[Mapping[str, Any]] | None) -> tuple[Calls, str]:
    """Return the calls, and the text around them."""
    if form == "harmony":
        return _harmony(said, calls=tools is not None)
    if form == "text" or tools is None:
        return [], said
    if form == "llama":
        found = LLAMA.fullmatch(said)
        return ([_call(found[1], "parameters")], "") if found else ([], said)
    if form == "mistral":
        before, begun, written = said.partition(MISTRAL)
        return (_mistral(written), before.strip()) if begun else ([], said)
    begin, end = CALL_TAGS[form]
    inner = re.compile(f"{re.escape(begin)}(.*?){re.escape(end)}", re.DOTALL)
    rest = inner.sub("", said)
    if begin in rest or end in rest:
        raise ValueError(f"expected {begin} and {end} around each call, found one without the other")
    found = [_tagged(each, form, tools) for each in inner.findall(said)]
    return found, rest.strip() if found else said


def _tagged(inner: str, form: CallFormat, tools: Iterable[Mapping[str, Any]]) -> Call:
    match form:
        case "xml":
            what = "<function=name><parameter=key>value</parameter></function>"
            return _typed(inner, XML, PARAMETER, what, tools)
        case "glm":
            what = "name<arg_key>key</arg_key><arg_value>value</arg_value>"
            return _typed(inner, GLM, GLM_ARGUMENT, what, tools)
        case "gemma":
            return _gemma(inner)
        case _:
            return _call(inner, "arguments")


def _harmony_messages(text: str) -> Iterator[tuple[str, str, str]]:
    """Return every message of a turn: its whole text, header and body. A turn that has no header is all body."""
    for i, whole in enumerate(text.split("<|start|>")):
        whole = whole.removeprefix("assistant") if i else whole
        header, begun, body = whole.partition(MESSAGE)
        if begun or whole:
            yield (
                whole,
                header if begun or "<|channel|>" in header else "",
                HARMONY_END.sub("", body if begun else whole),
            )


def _is_analysis(header: str) -> bool:
    return ANALYSIS.search(header) is not None and RECIPIENT.search(header) is None


def _harmony(said: str, *, calls: bool) -> tuple[Calls, str]:
    found, texts = Calls(), list[str]()
    for _, header, body in _harmony_messages(said):
        if calls and (recipient := RECIPIENT.search(header)):
            found.append((recipient[1].removeprefix("functions."), _object(_json(body), body)))
        else:
            texts.append(body)
    return found, "\n".join(texts)


def _gemma(inner: str) -> Call:
    """Read a call whose arguments are JSON, but for keys without quotes and texts between two tokens."""
    call = GEMMA.fullmatch(inner)
    if call is None:
        raise ValueError(f"expected a call as call:name{{key:value}}, found {_short(inner)}")
    pieces = call[2].split(GEMMA_QUOTE)  # every other one is a text
    pieces[::2] = [GEMMA_KEY.sub(_quoted_key, piece) for piece in pieces[::2]]
    pieces[1::2] = map(json.dumps, pieces[1::2])
    return call[1], _object(_json("".join(pieces)), inner)


def _quoted_key(found: re.Match[str]) -> str:
    return found[0] if found[2] is None else found[1] + json.dumps(found[2])


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


def _typed(
    inner: str, form: re.Pattern[str], argument: re.Pattern[str], what: str, tools: Iterable[Mapping[str, Any]]
) -> Call:
    """Read a call that writes texts and other values alike."""
    call = form.fullmatch(inner)
    if call is None or argument.sub("", call[2]).strip():
        raise ValueError(f"expected a call as {what}, found {_short(inner)}")
    schemas = [tool["function"] for tool in tools if tool["function"].get("name") == call[1]]
    known = schemas[0].get("parameters", {}).get("properties", {}) if schemas else {}
    return call[1], {key: _value(text, known.get(key, {})) for key, text in argument.findall(call[2])}


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


def _call(inner: str, key: str) -> Call:
    return _named(_json(inner), key, inner)


def _json(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"expected a call in JSON, found {error} in {_short(text)}") from error


def _named(call: Any, key: str, shown: str) -> Call:
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
