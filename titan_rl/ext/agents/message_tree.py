"""A rollout's messages as a tree, in which the endpoint finds the turn that a request continues.

Clients send the whole conversation each time, as they have stored it: without reasoning, arguments in another order,
text as parts. So messages are compared by what every client keeps: role, text and calls.
"""

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from titan_rl.ext.agents.tools import IMAGE_PARTS, shows_images
from titan_rl.tasks.user_code import shortened
from titan_rl.text.template import Message

KEPT = ("role", "name", "tool_call_id", "reasoning_content")  # fields of a message, besides text and calls
IMAGE_NAME = re.compile("[0-9a-f]{64}")


class BadMessage(ValueError):
    """A request has a message that cannot be read. The text names the expected and the actual value."""


@dataclass(slots=True, eq=False)
class Node:
    turn: int | None = None  # that sampled this message; None: the client wrote it
    tokens: Sequence[int] = ()  # as sampled
    children: dict[str, list["Node"]] = field(default_factory=dict)  # by key; several if tokens differ, but not text


class MessageTree:
    def __init__(self) -> None:
        self.root = Node()

    def find(self, keys: Sequence[str]) -> tuple[Node, int]:
        """Return the deepest sampled message on a path with these keys, the latest one if there are several, and how
        many keys lead to it. The root and 0: none was sampled."""
        best, depths = self.root, 0
        stack = [(self.root, 0)]
        while stack:
            node, depth = stack.pop()
            if node.turn is not None and depth > depths:
                best, depths = node, depth
            if depth < len(keys):
                stack += [(child, depth + 1) for child in node.children.get(keys[depth], ())]
        return best, depths

    def grow(self, node: Node, keys: Sequence[str], reply: str, turn: int, tokens: Sequence[int]) -> None:
        """Add a reply that was sampled after a node and the messages `keys`. The same tokens find their node again."""
        for key in keys:
            nodes = node.children.setdefault(key, [])
            if not nodes:
                nodes.append(Node())
            node = nodes[-1]
        siblings = node.children.setdefault(reply, [])
        if not any(each.turn is not None and list(each.tokens) == list(tokens) for each in siblings):
            siblings.append(Node(turn, tokens))


def key_of(message: Message) -> str:
    """Return what identifies a message. White space around an answer counts for nothing: clients strip it."""
    text, sampled = message["content"], message["role"] == "assistant"
    if isinstance(text, str) and sampled:
        text = text.strip()
    calls = [call["function"] for call in message.get("tool_calls") or ()]
    named = [(call["name"], _canonical(call.get("arguments"))) for call in calls]
    return digest([message["role"], text, None if sampled else message.get("name"), named])


def digest(value: Any) -> str:
    return hashlib.blake2b(json.dumps(value, sort_keys=True).encode(), digest_size=16).hexdigest()


def readable(messages: object, *, names: bool = True) -> list[Message]:
    """Return a request's messages with their text as one string, or as parts if there is an image. Raise BadMessage if
    they are no conversation. `names`: an image may be given by its name."""
    if not isinstance(messages, list) or not messages:
        raise BadMessage(f"messages: expected a list of at least one message, found {shortened(messages)}")
    return [_readable(message, f"messages[{i}]", names) for i, message in enumerate(messages)]


def _readable(message: object, where: str, names: bool) -> Message:
    if not isinstance(message, dict) or not isinstance(message.get("role"), str):
        raise BadMessage(f'{where}: expected an object with a "role", found {shortened(message)}')
    fields = {name: message[name] for name in KEPT if isinstance(message.get(name), str)}
    fields["content"] = _content(message.get("content"), where, names)
    if message.get("tool_calls"):
        fields["tool_calls"] = [_call(call, where) for call in message["tool_calls"]]
    return fields


def _content(content: object, where: str, names: bool) -> str | list[dict[str, Any]]:
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    given = content if isinstance(content, list) else [content]
    parts = [_part(part, where, names) for part in given]
    if shows_images(parts):
        return parts
    return "".join(part["text"] for part in parts)


def _part(part: object, where: str, names: bool) -> dict[str, Any]:
    if isinstance(part, dict) and part.get("type") in IMAGE_PARTS:
        return {"type": "image", "image": _image(part, where, names)}
    text = part.get("text") if isinstance(part, dict) else part
    if not isinstance(text, str):
        raise BadMessage(f"{where}.content: expected text or parts with text, found {shortened(part)}")
    return {"type": "text", "text": text}


def _image(part: Mapping[str, Any], where: str, names: bool) -> str:
    """Return a data URL or a name. A client may not have this process read a file by its path."""
    value = part.get("image_url") or part.get("image")
    if isinstance(value, Mapping):
        value = value.get("url")
    if isinstance(value, str) and (value.startswith("data:") or (names and IMAGE_NAME.fullmatch(value))):
        return value
    expected = "an image as a data URL, or by its name in the row" if names else "an image as a data URL"
    raise BadMessage(f"{where}.content: expected {expected}, found {shortened(part)}")


def _call(call: object, where: str) -> dict[str, Any]:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(call, dict) or not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise BadMessage(f"{where}.tool_calls: expected calls of a function with a name, found {shortened(call)}")
    arguments = function.get("arguments")
    known = {"name": function["name"], "arguments": "{}" if arguments is None else arguments}
    return {"id": str(call.get("id") or ""), "type": "function", "function": known}


def _canonical(arguments: object) -> object:
    if isinstance(arguments, str):
        try:
            return json.loads(arguments or "{}")
        except (ValueError, RecursionError):
            return arguments
    return arguments
