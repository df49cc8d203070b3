"""Plain Python functions as tools: a JSON schema from the signature and the docstring, and checked calls.

    def multiply(a: int, b: int) -> int:
        '''Multiply two numbers.

        Args:
            a: The first factor.
            b: The second one.
        '''

A call that cannot be made, or that raises, is an observation: the policy reads the error.
"""

import inspect
import json
import re
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from titan_rl.tasks.user_code import call_user, shortened
from titan_rl.wire.errors import SandboxRefused

Schema = dict[str, Any]
Tool = Callable[..., Any]
Result = str | list[dict[str, Any]]

TYPES: dict[Any, str] = {str: "string", int: "integer", float: "number", bool: "boolean", list: "array", dict: "object"}
IMAGE_PARTS = ("image", "image_url", "input_image")
"""Types of the parts of a message that are images."""
UNKNOWN = "unknown"
"""Tool name under which calls of tools that do not exist are counted."""


@dataclass(frozen=True, slots=True)
class ToolCall:
    name: str
    arguments: Mapping[str, Any]
    id: str = ""


class ToolFailed(Exception):
    """A call that was not answered. The policy reads the text."""


class Toolbox:
    """The tools of one rollout, and counts of their calls."""

    def __init__(self, tools: Iterable[Tool]) -> None:
        self._tools = {tool.__name__: tool for tool in tools}
        self.schemas = [schema(tool) for tool in self._tools.values()]
        self._parameters = {each["function"]["name"]: each["function"]["parameters"] for each in self.schemas}
        self._counts: Counter[str] = Counter()
        self._seconds: defaultdict[str, float] = defaultdict(float)

    def __bool__(self) -> bool:
        return bool(self._tools)

    async def call(self, call: ToolCall) -> Result:
        """Return the result, or the error."""
        try:
            return await self.result(call)
        except ToolFailed as error:
            return f"error: {error}"

    async def result(self, call: ToolCall) -> Result:
        """Return the result as text, or as parts if it has an image. Raise ToolFailed if there is none."""
        name = call.name if call.name in self._tools else UNKNOWN
        began = time.perf_counter()
        self._counts[f"tools/{name}/calls"] += 1
        try:
            if name == UNKNOWN:
                raise ToolFailed(f"expected one of the tools {', '.join(self._tools)}, found {call.name!r}")
            if problems := list(check_arguments(self._parameters[name], call.arguments)):
                raise ToolFailed(f"{name}: {'; '.join(problems)}")
            try:
                result = await call_user(self._tools[name], **call.arguments)
            except SandboxRefused:
                raise  # no fault of the policy
            except Exception as error:
                raise ToolFailed(f"{name}: {type(error).__name__}: {error}") from error
            if isinstance(result, str) or shows_images(result):
                return result
            return json.dumps(result, default=str, ensure_ascii=False)
        except ToolFailed:
            self._counts[f"tools/{name}/failures"] += 1
            raise
        finally:
            self._seconds[f"tools/{name}/seconds"] += time.perf_counter() - began

    def metrics(self) -> dict[str, float]:
        return {**{name: float(count) for name, count in self._counts.items()}, **self._seconds}


def shows_images(content: object) -> bool:
    """Return True if this is a list of a message's parts that has an image."""
    if not isinstance(content, list):
        return False
    return any(isinstance(part, Mapping) and part.get("type") in IMAGE_PARTS for part in content)


def schema(tool: Tool) -> Schema:
    """Return the tool's schema, as chat templates and the OpenAI API take it. Cached: every rollout has its tools. One
    that has a `json_schema` needs no other."""
    if (own := getattr(tool, "json_schema", None)) is not None:
        return own
    inner = getattr(tool, "__func__", None)
    return _schema(tool if inner is None else inner, bound=inner is not None)


@lru_cache(maxsize=1024)
def _schema(tool: Tool, *, bound: bool) -> Schema:
    described, arguments = _documented(inspect.getdoc(tool) or "")
    hints = get_type_hints(tool)
    properties: dict[str, Schema] = {}
    required: list[str] = []
    for name, parameter in list(inspect.signature(tool).parameters.items())[bound:]:
        if parameter.kind not in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY):
            raise TypeError(f"tool {tool.__name__}: expected named parameters only, found {parameter}")
        about = {"description": arguments[name]} if name in arguments else {}
        properties[name] = {**type_schema(hints.get(name, Any)), **about}
        if parameter.default is parameter.empty:
            required.append(name)
    parameters = {"type": "object", "properties": properties, "required": required}
    function = {"name": tool.__name__, "description": described, "parameters": parameters}
    return {"type": "function", "function": function}


def type_schema(hint: Any) -> Schema:
    """Return the schema of a type. An unknown type accepts any value."""
    origin, inner = get_origin(hint), get_args(hint)
    if origin in (Union, UnionType):
        kinds = [type_schema(each) for each in inner if each is not NoneType]
        kinds += [{"type": "null"}] if NoneType in inner else []
        return {"anyOf": kinds} if len(kinds) > 1 else kinds[0]
    if origin is Literal:
        return {"enum": list(inner)}
    base = origin or hint
    if base in (list, tuple, set) or base is Sequence:
        return {"type": "array", **({"items": type_schema(inner[0])} if inner else {})}
    if base is Mapping:
        base = dict
    return {"type": TYPES[base]} if base in TYPES else {}


def check_arguments(parameters: Schema, arguments: object) -> Iterable[str]:
    """Yield each problem of the arguments of a call."""
    if not isinstance(arguments, Mapping):
        yield f"expected an object of arguments, found {shortened(arguments)}"
        return
    known = parameters["properties"]
    for name in parameters["required"]:
        if name not in arguments:
            yield f"missing argument {name}"
    for name, value in arguments.items():
        if name not in known:
            yield f"expected the arguments {', '.join(known) or 'none'}, found {name}"
        elif not fits(known[name], value):
            yield f"{name}: expected {_expected(known[name])}, found {shortened(value)}"


def fits(kind: Schema, value: object) -> bool:
    """Return True if the value is of this type. Every integer is a number, and no boolean is."""
    if "anyOf" in kind:
        return any(fits(each, value) for each in kind["anyOf"])
    if "enum" in kind:
        return any(value == each and type(value) is type(each) for each in kind["enum"])
    match kind.get("type"):
        case "string":
            return isinstance(value, str)
        case "integer":
            return isinstance(value, int) and not isinstance(value, bool)
        case "number":
            return isinstance(value, int | float) and not isinstance(value, bool)
        case "boolean":
            return isinstance(value, bool)
        case "null":
            return value is None
        case "object":
            return isinstance(value, Mapping)
        case "array":
            return isinstance(value, list) and all(fits(kind.get("items", {}), each) for each in value)
    return True


def _expected(kind: Schema) -> str:
    if "anyOf" in kind:
        return " or ".join(map(_expected, kind["anyOf"]))
    if "enum" in kind:
        return "one of " + ", ".join(map(repr, kind["enum"]))
    name = kind.get("type", "any value")
    return f"an array of which each is {_expected(kind['items'])}" if kind.get("items") else str(name)


def _documented(doc: str) -> tuple[str, dict[str, str]]:
    """Return a Google docstring's text before its sections, and the descriptions under "Args:"."""
    head, *sections = re.split(r"(?m)^(Args|Arguments|Returns|Raises|Yields|Examples?):[ ]*$", doc)
    arguments: dict[str, str] = {}
    for title, body in zip(sections[::2], sections[1::2], strict=True):
        if title.startswith("Arg"):
            entries = re.findall(r"(?m)^ +(\w+)(?: *\([^)]*\))?: *(.+(?:\n {6,}.+)*)", body)
            arguments |= {name: " ".join(text.split()) for name, text in entries}
    return " ".join(head.split()), arguments
