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
from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Any

from tokenizers import Tokenizer

from titan_rl.text.answers import CallFormat, MalformedCall, parse_answer
from titan_rl.text.outside import OutsideText
from titan_rl.text.template import ChatTemplate, Message, Thinking, Tools

OPENING: Message = {"role": "user", "content": "u"}
ROLES = frozenset(("system", "developer", "user", "assistant", "tool", "function", "ipython"))
PROBED: tuple[CallFormat, ...] = ("hermes", "llama", "xml", "mistral")
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
        readable = [_readable(message) for message in messages]
        for role in {message["role"] for message in messages} - ROLES:
            if any(role in token for token in self.outside.control):  # templates write '<|' + role + '|>'
                raise ValueError(f"expected a role among {', '.join(sorted(ROLES))}, found {role!r}")
        return self.template.render(self.outside.masked(readable), self.outside.masked(tools), opened=opened)

    def prompt(self, messages: Sequence[Message], tools: Tools = None) -> list[int]:
        """Return the tokens of a conversation up to the start of the assistant's answer."""
        return self.outside.encode(self.render(messages, tools))

    def extend(self, tokens: Sequence[int], messages: Sequence[Message], tools: Tools = None) -> list[int] | None:
        """Return the tokens that `messages` add to `tokens`, which end in a sampled turn. They begin with the end token
        if the turn was cut off. None if the template cannot extend its own text: begin a branch with `prompt`. (Some
        templates put a tool's answer into the turn that called it, and some drop it.)"""
        if not tokens or not messages or any(message["role"] == "assistant" for message in messages):
            return None
        answers_tool = messages[0]["role"] == "tool"
        if self.thinking == "template" and not (self._keeps_after_tool if answers_tool else self._keeps_after_user):
            return None
        if not all(self._shows(message["role"]) for message in messages):
            return None
        dummy, text = self._after_dummy(messages, tools)
        if not text or self.dropped(text, messages):
            return None
        added = self.outside.encode(text)
        closed = tokens[-1] == added[0] or (tokens[-1] in self.eos_ids and self._closes(dummy, tools))
        return added[closed:] if added[0] in self.eos_ids else None

    def parse(self, tokens: Sequence[int], tools: Tools = None, id: str = "") -> Message:
        """Return the assistant's message that these sampled tokens mean. Raise MalformedCall for a call that cannot be
        read. Without tools there are no calls. Calls are numbered after `id`, or else named by their tokens."""
        said = list(tokens[:-1] if tokens and tokens[-1] in self.eos_ids else tokens)
        form: CallFormat = self.call_format if tools else "text"
        id = id or f"call_{hashlib.blake2b(repr(said).encode(), digest_size=6).hexdigest()}"
        return parse_answer(
            self._decode(said), form, split_thinking=self.template.names_thinking, id=id, tools=tools or ()
        )

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

    def _after_dummy(self, messages: Sequence[Message], tools: Tools = None) -> tuple[Message, str]:
        """Return a dummy of the sampled turn, and the text that follows it, from its end token on; "" if there is none.
        Before a tool's answer the dummy made the calls; some templates take one at a time."""
        ids = [message.get("tool_call_id") or DUMMY_ID for message in messages if message["role"] == "tool"]
        dummy: Message = {"role": "assistant", "content": self._mark}
        for count in dict.fromkeys((len(ids), min(len(ids), 1))):
            calls = {"tool_calls": [_dummy_call(id, self._mark, {}) for id in ids[:count]]} if ids else {}
            try:
                text = self.render([OPENING, dummy | calls, *messages], tools)
            except Exception:  # a template may raise anything; if it means the messages, `prompt` will raise too
                continue
            if found := self._end_of_dummy(text):
                return dummy | calls, text[found.start() :]
        return dummy, ""

    def _shows(self, role: str) -> bool:
        """Return True if the template writes what messages of this role say."""
        if role not in self._shown:
            probe = {"role": role, "content": self._probe, "tool_call_id": DUMMY_ID}
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
    def _keeps_after_user(self) -> bool:
        return self._keeps_thinking([{"role": "user", "content": "v"}], {})

    @cached_property
    def _keeps_after_tool(self) -> bool:
        called = {"tool_calls": [_dummy_call(DUMMY_ID, "f", {})]}
        return self._keeps_thinking([{"role": "tool", "tool_call_id": DUMMY_ID, "name": "f", "content": "v"}], called)

    def _keeps_thinking(self, later: list[Message], called: Message) -> bool:
        thought = {"role": "assistant", "content": "said", "reasoning_content": self._mark}
        if not self.template.names_thinking:
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


def _readable(message: Message) -> Message:
    """Return a message as templates want it: text instead of text parts, calls' arguments as a table."""
    content, calls = message.get("content"), message.get("tool_calls")
    if isinstance(content, list) and all(isinstance(part, dict) and part.get("type") == "text" for part in content):
        message = {**message, "content": "".join(part["text"] for part in content)}
    return {**message, "tool_calls": [_with_table(call) for call in calls]} if calls else message


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
