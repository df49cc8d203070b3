"""Messages to tokens and back, for one tokenizer and one chat template.

    prompt(messages) -> tokens ──> the policy samples ──> parse(sampled) -> the assistant's message
                          ^                                       │ the environment answers with messages
                          └── tokens + extend(tokens, messages) <─┘

Sampled tokens are never rendered again. `extend` renders only the new messages: it puts a dummy in place of the sampled
turn, and cuts after that turn's end token. So the cost of a turn does not depend on the length of the conversation.
Text in messages never becomes a control token (outside.py).
"""

import hashlib
import json
import re
import secrets
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property
from types import MappingProxyType
from typing import Any

from tokenizers import Tokenizer

from titan_rl.text.answers import CallFormat, MalformedCall, parse_answer
from titan_rl.text.outside import OutsideText
from titan_rl.text.template import ChatTemplate, Message, Thinking, Tools

OPENING: Message = {"role": "user", "content": "u"}
ROLES = frozenset(("system", "developer", "user", "assistant", "tool", "function", "ipython"))
PROBED: tuple[CallFormat, ...] = ("hermes", "llama", "xml", "mistral", "glm", "gemma", "harmony")
DUMMY_ID = "000000000"  # id of a dummy call; Mistral's templates refuse any other length


class ChatRenderer:
    """Renders conversations for a policy. `thinking`: whether turns keep the thinking that the template would strip
    from the past ("keep"), or begin a branch without it ("template")."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        template: ChatTemplate,
        *,
        decode: Callable[[Sequence[int]], str],
        eos_ids: Sequence[int],
        thinking: Thinking = "keep",
    ) -> None:
        self.template, self.eos_ids, self.thinking = template, tuple(eos_ids), thinking
        self.outside = OutsideText(tokenizer)
        self._decode = decode
        ends = [token for id in eos_ids if (token := tokenizer.id_to_token(id))]
        self.end_of_turn = re.compile("|".join(map(re.escape, sorted(ends, key=len, reverse=True))) or "(?!)")
        self._mark, self._probe = (
            f"\ue004{secrets.randbits(64)}\ue005" for _ in range(2)
        )  # no text from outside has these
        self._shown: dict[str, bool] = {}

    def render(self, messages: Sequence[Message], tools: Tools = None, *, opened: bool = True) -> str:
        """Return the conversation as text; control tokens in messages appear as marks, which `outside` reads."""
        readable = [_readable(message, self.template.thinking_key) for message in messages]
        for role in {message["role"] for message in messages} - ROLES:
            if any(role in token for token in self.outside.control):  # templates write '<|' + role + '|>'
                raise ValueError(f"expected a role among {', '.join(sorted(ROLES))}, found {role!r}")
        readable = [_in_parts(message) for message in readable] if self._reads_parts else readable
        return self.template.render(self.outside.masked(readable), self.outside.masked(tools), opened=opened)

    def prompt(self, messages: Sequence[Message], tools: Tools = None) -> list[int]:
        """Return the tokens of a conversation up to the start of the assistant's answer."""
        return self.outside.encode(self.render(messages, tools))

    def extend(
        self,
        tokens: Sequence[int],
        messages: Sequence[Message],
        tools: Tools = None,
        calls: Sequence[Mapping[str, Any]] = (),
    ) -> list[int] | None:
        """Return the tokens that `messages` add to `tokens`, which end in a sampled turn. They begin with the end token
        if the turn was cut off. None if the template cannot extend its own text: begin a branch with `prompt`. (Some
        templates put a tool's answer into the turn that called it, and some drop it.) `calls`: the turn's, if the
        tools' answers do not name the tools."""
        if not tokens or not messages or any(message["role"] == "assistant" for message in messages):
            return None
        answers_tool = messages[0]["role"] == "tool"
        if self.thinking == "template" and not (self._keeps_after_tool if answers_tool else self._keeps_after_user):
            return None
        if not all(self._shows(message["role"]) for message in messages):
            return None
        names = {str(call.get("id")): str(call.get("function", call).get("name", "")) for call in calls}
        dummy, text = self._after_dummy(messages, tools, names)
        if not text or self.dropped(text, messages):
            return None
        added = self.outside.encode(text)
        if added[0] not in self.eos_ids:
            return None
        if tokens[-1] == added[0] or tokens[-1] not in self.eos_ids or not self._closes(dummy, tools):
            return added[tokens[-1] == added[0] :]
        return None if tokens[-1] in self._ends else added[1:]  # None: the end of another kind of turn

    def parse(self, tokens: Sequence[int], tools: Tools = None, id: str = "") -> Message:
        """Return the assistant's message that these sampled tokens mean. Raise MalformedCall for a call that cannot be
        read. Without tools there are no calls. Calls are numbered after `id`, or else named by their tokens."""
        said = list(tokens[:-1] if tokens and tokens[-1] in self.eos_ids else tokens)
        id = id or f"call_{hashlib.blake2b(repr(said).encode(), digest_size=6).hexdigest()}"
        text, thinks = self.outside.decode(said, self._decode), bool(self.template.thinking_key)
        try:
            message = parse_answer(text, self.call_format, split_thinking=thinks, id=id, tools=tools or None)
        except MalformedCall as error:
            raise MalformedCall(self.outside.unmasked(str(error)), self.outside.unmasked(error.message)) from error
        for call in message.get("tool_calls", ()):
            arguments = json.loads(call["function"]["arguments"])
            call["function"]["arguments"] = json.dumps(self.outside.unmasked(arguments))
        return self.outside.unmasked(message)

    def dropped(self, text: str, messages: Sequence[Message]) -> list[Message]:
        """Return the messages that a rendered text lacks. Templates may trim a text, or write it as JSON."""
        found = [(message, self.outside.masked(_readable(message).get("content"))) for message in messages]
        return [
            message
            for message, content in found
            if isinstance(content, str)
            and content.strip() not in text
            and json.dumps(content, ensure_ascii=False)[1:-1] not in text
        ]

    @cached_property
    def call_format(self) -> CallFormat:
        """How this template writes a tool call."""
        call = {"role": "assistant", "content": "", "tool_calls": [_dummy_call(DUMMY_ID, self._mark, {"a": 1})]}
        try:
            opened = self.render([OPENING])
            whole = self.render([OPENING, call], opened=False)
        except Exception:
            return "text"
        written = whole[common_length(opened, whole) :]
        end = self.end_of_turn.search(written)
        for form in PROBED:
            try:
                parsed = parse_answer(written[: end.start()] if end else written, form, split_thinking=True)
            except MalformedCall:
                continue
            calls = parsed.get("tool_calls", ())
            if any(c["function"] == {"name": self._mark, "arguments": '{"a": 1}'} for c in calls):
                return form
        return "text"

    @cached_property
    def _reads_parts(self) -> bool:
        """Return True if the template writes a text only as a part of a list, as templates of vision models do."""

        def written(content: Any) -> bool:
            try:
                return self._probe in self.template.render([{"role": "user", "content": content}], opened=True)
            except Exception:  # a template may raise anything
                return False

        return not written(self._probe) and written([{"type": "text", "text": self._probe}])

    def _after_dummy(
        self, messages: Sequence[Message], tools: Tools = None, names: Mapping[str, str] = MappingProxyType({})
    ) -> tuple[Message, str]:
        """Return a dummy of the sampled turn, and the text that follows it, from its end token on; "" if there is none.
        Before a tool's answer the dummy made the calls."""
        for dummy in self._dummies([message for message in messages if message["role"] == "tool"], names):
            try:
                text = self.render([OPENING, dummy, *messages], tools)
            except Exception:  # a template may raise anything; if it means the messages, `prompt` will raise too
                continue
            if found := self._end_of_dummy(text):
                return dummy, text[found.start() :]
        return {"role": "assistant", "content": self._mark}, ""

    def _dummies(self, answers: Sequence[Message], names: Mapping[str, str]) -> Iterator[Message]:
        """Return turns that tools answered like this: with all calls or, as some templates want it, with one. Templates
        differ in where they write calls and content, and some repeat a call's name before its answer."""
        dummy: Message = {"role": "assistant", "content": self._mark}
        if not answers:
            yield dummy
        for count in sorted({len(answers), min(len(answers), 1)} - {0}, reverse=True):
            ids = [(each.get("tool_call_id") or DUMMY_ID, each.get("name")) for each in answers[:count]]
            named = [_dummy_call(id, name or names.get(id) or self._mark, {"a": self._mark}) for id, name in ids]
            yield {**dummy, "content": "", "tool_calls": named}
            yield {**dummy, "tool_calls": [_dummy_call(id, self._mark, {}) for id, _ in ids]}

    def _shows(self, role: str) -> bool:
        """Return True if the template writes what messages of this role say."""
        if role not in self._shown:
            probe = {"role": role, "content": self._probe, "tool_call_id": DUMMY_ID, "name": "f"}
            self._shown[role] = self._probe in self._after_dummy([probe])[1]
        return self._shown[role]

    def _end_of_dummy(self, text: str) -> re.Match[str] | None:
        at = text.rfind(self._mark)
        return self.end_of_turn.search(text, at) if at >= 0 else None

    def _closes(self, dummy: Message, tools: Tools) -> bool:
        """Return True if the template ends a turn itself. Others let the next turn's first token end it, which must
        then be the one that fits."""
        return self._end_of_dummy(self.render([OPENING, dummy], tools, opened=False)) is not None

    @cached_property
    def _ends(self) -> frozenset[int]:
        """The tokens with which the template ends an answer and a call."""
        after = [self._after_dummy([{"role": role, "content": "v"}])[1] for role in ("user", "tool")]
        return frozenset(self.outside.encode(text)[0] for text in after if text)

    @cached_property
    def _keeps_after_user(self) -> bool:
        return self._keeps_thinking([{"role": "user", "content": "v"}], {})

    @cached_property
    def _keeps_after_tool(self) -> bool:
        called = {"tool_calls": [_dummy_call(DUMMY_ID, "f", {})]}
        return self._keeps_thinking([{"role": "tool", "tool_call_id": DUMMY_ID, "name": "f", "content": "v"}], called)

    def _keeps_thinking(self, later: list[Message], called: Message) -> bool:
        thought = {"role": "assistant", "content": "said", "reasoning_content": self._mark}
        if not self.template.thinking_key:
            thought = {"role": "assistant", "content": f"<think>\n{self._mark}\n</think>\n\nsaid"}
        try:
            return self._mark in self.render([OPENING, thought | called, *later])
        except Exception:
            return False


def common_length(a: Sequence[Any], b: Sequence[Any]) -> int:
    """Return how many elements two sequences begin with in common."""
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


def _dummy_call(id: str, name: str, arguments: dict[str, Any]) -> dict[str, Any]:
    return {"id": id, "type": "function", "function": {"name": name, "arguments": arguments}}


def _readable(message: Message, thinking_key: str = "") -> Message:
    """Return a message as templates want it: text instead of text parts, calls' arguments as a table."""
    message = _with_thinking(message) if thinking_key == "thinking" and message.get("reasoning_content") else message
    content, calls = message.get("content"), message.get("tool_calls")
    if isinstance(content, list) and all(isinstance(part, dict) and part.get("type") == "text" for part in content):
        message = {**message, "content": "".join(part["text"] for part in content)}
    if calls and content is None:  # as OpenAI's clients send it; templates would write "None"
        message = {**message, "content": ""}
    return {**message, "tool_calls": [_with_table(call) for call in calls]} if calls else message


def _in_parts(message: Message) -> Message:
    content = message.get("content")
    return {**message, "content": [{"type": "text", "text": content}]} if isinstance(content, str) else message


def _with_thinking(message: Message) -> Message:
    """Return a message as gpt-oss's template wants it, which allows no content between a thought and a call."""
    message = dict(message)
    thought, content = message.pop("reasoning_content"), message.get("content")
    if message.get("tool_calls") and isinstance(content, str) and content:
        return {**message, "thinking": f"{thought}\n\n{content}", "content": ""}
    return {**message, "thinking": thought}


def _with_table(call: dict[str, Any]) -> dict[str, Any]:
    function = call.get("function", call)
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments or "{}")
        except ValueError:
            return call
    function = {**function, "arguments": arguments}
    return {**call, "function": function} if "function" in call else function
