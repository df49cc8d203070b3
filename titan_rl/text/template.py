"""A chat template, rendered as transformers renders it, but without importing transformers (4 s).

It is Jinja in an immutable sandbox, with the filters and functions that transformers adds. Templates come with models
that somebody else made: loop steps and calls are counted, so one that does not end is an error and not a hang.
"""

import json
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from functools import cached_property, lru_cache, wraps
from pathlib import Path
from typing import Any, Literal

from titan_rl.config.plain_files import text_of

Message = dict[str, Any]
"""One chat message: {"role": "user", "content": "..."}."""
Tools = Sequence[Mapping[str, Any]] | None
"""JSON schemas of the functions that the policy may call."""
Thinking = Literal["keep", "template"]

MOST_STEPS = 1_000_000
"""Loop steps and calls of one rendering. A conversation of 1,000 messages takes about 20,000."""
MOST_SECONDS = 10.0  # CPU time of one rendering: a filter of a list takes long within one step
ITEMS, CHARACTERS = 16, 1024  # that a filter reads in the time of a loop step, about
MOST_REPEATED = 100_000  # as `"x" * n` in a template
MOST_POWER = 1_000
DAY = "\ue006"  # instead of today's date, to see where a template writes it
MORE_TEMPLATES = "additional_chat_templates"  # folder of a tokenizer that has several
NAMED_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


class TemplateStuck(Exception):
    """A chat template loops without end, or computes something enormous."""


@dataclass(frozen=True, slots=True)
class ChatSettings:
    """How a run renders chats."""

    template: str = ""  # Jinja; empty: the tokenizer folder's own
    kwargs: Mapping[str, Any] = field(default_factory=dict, hash=False)
    thinking: Thinking = "keep"
    stop_token_ids: tuple[int, ...] = ()  # at which sampling stops, besides EOS


def is_inline(template: str) -> bool:
    """Return True if a text is a template, and not the path of one."""
    return "{{" in template or "{%" in template


class ChatTemplate:
    """Renders messages to text. `named` holds the special tokens that templates refer to, such as bos_token."""

    def __init__(self, source: str, named: Mapping[str, str], kwargs: Mapping[str, Any], with_tools: str = "") -> None:
        self.source = source
        self._sources = (source, with_tools or source)
        self._named = {**named, **kwargs}

    @cached_property
    def thinking_key(self) -> str:
        """The key of a message under which the template reads its thinking, or "". gpt-oss has another one."""
        if "reasoning_content" in self.source:
            return "reasoning_content"
        return "thinking" if "message.thinking" in self.source else ""

    def depends_on_date(self, messages: Sequence[Message]) -> bool:
        """Return True if the text holds today's date, unless date_string pins it."""
        return DAY in self.render(messages, opened=True, today=DAY)

    def render(self, messages: Sequence[Message], tools: Tools = None, *, opened: bool, today: str = "") -> str:
        """Return the conversation as text; `opened`: up to the start of the assistant's next answer."""
        if not messages:
            raise ValueError("expected at least one message, found none")
        compiled = _compiled(self._sources[bool(tools)])
        compiled.environment.begin()
        try:
            return self._rendered(compiled, messages, tools, opened, today)
        except TypeError:  # some templates join a call's arguments to text, others read them as a table
            if not any(message.get("tool_calls") for message in messages):
                raise
            return self._rendered(
                compiled, [_with_text_arguments(message) for message in messages], tools, opened, today
            )

    def _rendered(self, compiled: Any, messages: Sequence[Message], tools: Tools, opened: bool, today: str) -> str:
        day = self._named.get("date_string", today)

        def strftime_now(form: str) -> str:
            return day or datetime.now().strftime(form)

        given = {"tools": tools, "documents": None, "add_generation_prompt": opened, "strftime_now": strftime_now}
        return compiled.render(messages=messages, **{**given, **self._named})


def own_template(folder: Path, settings: Mapping[str, Any]) -> tuple[str, str]:
    """Return the template of a tokenizer folder, and the one for conversations with tools, "" if it is the same. Look
    where transformers looks: chat_template.jinja and its folder of further ones, else tokenizer_config.json."""
    files = {"default": folder / "chat_template.jinja"} if (folder / "chat_template.jinja").exists() else {}
    files |= {path.stem: path for path in sorted((folder / MORE_TEMPLATES).glob("*.jinja"))}
    found = {name: _text(path) for name, path in files.items()}
    listed = settings.get("chat_template")
    if not found and isinstance(listed, str):
        found = {"default": listed}
    elif not found and isinstance(listed, list):
        for entry in listed:
            if not (isinstance(entry, dict) and all(isinstance(entry.get(key), str) for key in ("name", "template"))):
                expected = "texts as name and template of every chat_template"
                raise ValueError(f"{entry!r:.80} in {folder}'s tokenizer_config.json, where {expected} were expected")
            found[entry["name"]] = entry["template"]
    return found.get("default", ""), found.get("tool_use", "")


def _text(path: Path) -> str:
    try:
        return text_of(path)
    except (OSError, ValueError) as error:
        raise ValueError(f"{error} in {path}, where a template in UTF-8 was expected") from error


def named_tokens(settings: Mapping[str, Any]) -> dict[str, str]:
    """Return the special tokens by the names that templates use."""
    extra = settings.get("extra_special_tokens")
    named = {name: settings.get(name) for name in NAMED_TOKENS} | (extra if isinstance(extra, dict) else {})
    named = {name: token.get("content") if isinstance(token, dict) else token for name, token in named.items()}
    return {name: token for name, token in named.items() if isinstance(token, str)}


def _with_text_arguments(message: Message) -> Message:
    calls = [
        {**call, "function": {**call["function"], "arguments": json.dumps(call["function"].get("arguments", {}))}}
        for call in message.get("tool_calls") or []
        if "function" in call
    ]
    return {**message, "tool_calls": calls} if calls else message


@lru_cache(maxsize=16)
def _compiled(source: str) -> Any:
    return _sandbox().from_string(source)


def _tojson(
    value: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, sort_keys: bool = False
) -> str:
    form: dict[str, Any] = {"indent": indent, "separators": separators, "sort_keys": sort_keys}
    return json.dumps(value, ensure_ascii=ensure_ascii, **form)


@lru_cache(maxsize=1)
def _sandbox() -> Any:
    """Return Jinja as transformers configures it. jinja2 is imported late: most runs render no chats."""
    from jinja2 import TemplateError, nodes
    from jinja2.ext import Extension, loopcontrols
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class Generation(Extension):
        """Reads {% generation %}, with which templates mark what the assistant said, as the text inside it."""

        tags = {"generation"}  # noqa: RUF012 (as jinja2 declares it)

        def parse(self, parser: Any) -> Any:
            line = next(parser.stream).lineno
            return nodes.Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True)).set_lineno(line)

    class CountingSandbox(ImmutableSandboxedEnvironment):
        intercepted_binops = frozenset(("*", "**"))
        steps, until = 0, 0.0

        def begin(self) -> None:
            """Give a rendering all of its steps and seconds."""
            self.steps, self.until = 0, time.thread_time() + MOST_SECONDS

        def _generate(self, source: Any, *args: Any, **kwargs: Any) -> str:
            for loop in list(source.find_all(nodes.For)):
                arguments = [loop.iter, nodes.Const(loop.lineno)]
                counted = nodes.EnvironmentAttribute("counted")
                loop.iter = nodes.Call(counted, arguments, [], None, None).set_lineno(loop.lineno)
                loop.iter.set_environment(self)
            return super()._generate(source, *args, **kwargs)

        def counted(self, items: Iterable[Any], line: int) -> Iterator[Any]:
            for item in items:
                self.count_step(f"in the loop of line {line}")
                yield item

        def call(self, context: Any, called: Any, /, *args: Any, **kwargs: Any) -> Any:
            self.count_step("in a call")
            return super().call(context, called, *args, **kwargs)

        def count_step(self, where: str, count: int = 1) -> None:
            self.steps += count
            if self.steps > MOST_STEPS or time.thread_time() > self.until:
                most = f"{MOST_STEPS:,} steps" if self.steps > MOST_STEPS else f"{MOST_SECONDS:g} s"
                raise TemplateStuck(f"expected a chat template that ends, found one that takes over {most}, {where}")

        def counting(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
            """Return a filter that counts the sizes of its arguments."""

            @wraps(function)
            def counted(*arguments: Any, **keywords: Any) -> Any:
                self.count_step(f"in the filter {name}", 1 + sum(map(_size, arguments)))
                return function(*arguments, **keywords)

            return counted

        def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
            number = right if isinstance(right, int) else left
            most = MOST_POWER if operator == "**" else MOST_REPEATED
            numeric = operator == "*" and isinstance(left, int | float) and isinstance(right, int | float)
            if isinstance(number, int) and abs(number) > most and not numeric:
                raise TemplateStuck(f"expected at most {most:,} in a chat template's `{operator}`, found {number}")
            return super().call_binop(context, operator, left, right)

    def raise_exception(message: str) -> None:
        raise TemplateError(message)

    sandbox = CountingSandbox(trim_blocks=True, lstrip_blocks=True, extensions=[Generation, loopcontrols])
    sandbox.filters["tojson"] = _tojson
    sandbox.filters |= {name: sandbox.counting(name, each) for name, each in sandbox.filters.items()}
    sandbox.globals["raise_exception"] = raise_exception
    return sandbox


def _size(value: Any) -> int:
    """Return the loop steps that a filter of a value takes as long as."""
    return len(value) // (CHARACTERS if isinstance(value, str) else ITEMS) if hasattr(value, "__len__") else 0
