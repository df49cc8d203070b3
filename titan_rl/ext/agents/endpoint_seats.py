"""Seats of an episode that a model behind an OpenAI-compatible URL plays: a simulated user, a judge, an opponent. The
run may start the model itself (seat_models.py).

    policies["user"].observe ──> EndpointPolicy: its conversation as messages ──> POST URL/chat/completions

Its turns are none of the policy's: they have no tokens, and nothing is trained on them. One that is not answered in
environment.turn_seconds, or after RETRIES, ends the rollout without a reward, also where the user's code catches that.
A busy server that names a time (Retry-After) is asked again then, as often as the deadline allows.
"""

import asyncio
import json
import os
import re
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from titan_rl.config.named_tables import table_problems
from titan_rl.config.system_sections import EnvironmentSection
from titan_rl.config.toml import Key, as_toml
from titan_rl.ext.agents.adapters import Conversation
from titan_rl.ext.agents.episodes import EpisodeOver, Limits, Observation, Reply, messages_from
from titan_rl.ext.agents.tools import Schema, ToolCall
from titan_rl.tasks.chat_server import ChatServer, Unanswered
from titan_rl.text.template import Message
from titan_rl.wire.errors import RunError
from titan_rl.wire.seeds import derive
from titan_rl.wire.types import Prompt

RETRIES = (0.5, 2.0)  # seconds before each
UNANSWERED = "had not answered"
LEAST_WAIT = 0.5  # seconds, of a server that asks for fewer
URL = re.compile(r"https?://[^\s/@?#]+(/[^\s@?#]*)?")
VARIABLE = re.compile(r"[A-Z_][A-Z0-9_]{0,79}")
KEYS = {
    "url": Key(type=str, default="", doc=""),
    "folder": Key(type=str, default="", doc=""),
    "model": Key(type=str, default="", doc=""),
    "api_key_env": Key(type=str, default="", doc=""),
    "temperature": Key(type=float, default=1.0, doc="", ge=0, le=2),
    "max_tokens": Key(type=int, default=512, doc="", ge=1, le=2**20),
    "seed": Key(type=bool, default=True, doc=""),
}
"""Keys of a table [environment.endpoints.SEAT]."""
SENT = ("temperature", "max_tokens")
"""Keys that a request has if the table has them: some servers refuse either."""
NONE: Mapping[str, Any] = MappingProxyType({})


@dataclass(frozen=True, slots=True)
class SeatEndpoint:
    seat: str
    url: str
    model: str
    key: str = field(default="", repr=False)
    seeded: bool = True
    settings: Mapping[str, Any] = field(default_factory=dict)

    def request(self, seed: int) -> dict[str, Any]:
        """Return the settings of a request."""
        return {**self.settings, **({"seed": seed} if self.seeded else {})}

    def server(self) -> ChatServer:
        return ChatServer(self.seat, self.url, self.model, self.key, requests=0)  # environment.concurrency bounds them


def endpoints_of(e: EnvironmentSection, started: Mapping[str, tuple[str, str, str]] = NONE) -> list[SeatEndpoint]:
    """Return the endpoints of checked tables, with their keys from this process's environment. Raise RunError if it
    lacks one: commands after a run check no environment. `started`: URL, model and key of the seats that have a folder;
    without it they are left out."""
    if missing := list(keys_missing(e)):
        raise RunError(missing[0], again=True)
    return [
        SeatEndpoint(
            seat,
            *(started.get(seat) or (str(table["url"]).rstrip("/"), str(table["model"]), _key_of(table))),
            bool(table.get("seed", True)),
            {name: table[name] for name in SENT if name in table},
        )
        for seat, table in e.endpoints.items()
        if seat in started or not table.get("folder")
    ]


def _key_of(table: Mapping[str, Any]) -> str:
    return os.environ.get(str(table.get("api_key_env", "")), "")


def endpoint_problems(e: EnvironmentSection) -> Iterator[str]:
    """Yield the problems of the tables by themselves. A text that may be a secret is not shown."""
    for seat, table in e.endpoints.items():
        label = f"environment.endpoints.{seat}"
        yield from table_problems(label, table, KEYS)
        if table.get("folder"):
            if others := [name for name in ("url", "model", "api_key_env") if name in table]:
                yield f"{label}: expected a folder or the url and model of a server, found folder and {others[0]}"
            continue
        if not URL.fullmatch(str(table.get("url", ""))):
            yield f"{label}.url: expected a URL such as http://HOST/v1, without a user or a query, found another text"
        if not table.get("model"):
            yield f"{label}.model: expected the name of a model at the URL, found none"
    yield from keys_missing(e)


def keys_missing(e: EnvironmentSection) -> Iterator[str]:
    for seat, table in e.endpoints.items():
        if (variable := str(table.get("api_key_env", ""))) and not os.environ.get(variable):
            shown = variable if VARIABLE.fullmatch(variable) else "another text"
            expected = "the name of a variable in the environment"
            yield f"environment.endpoints.{seat}.api_key_env: expected {expected}, found {shown}"


async def unreached(endpoints: Sequence[SeatEndpoint], seconds: float) -> list[str]:
    """Ask each endpoint as an episode would. Return a problem for each that does not answer."""

    async def each(endpoint: SeatEndpoint) -> str:
        server = endpoint.server()
        try:
            async with asyncio.timeout(seconds):
                reply_of(await asked(server, [{"role": "user", "content": "Hello."}], endpoint.request(0)), server)
        except (OSError, ValueError) as error:  # a late answer is an OSError, too
            notes = getattr(error.__cause__ or error.__context__, "__notes__", [f"{server.name} {UNANSWERED}"])
            found = str(error) or f"{notes[0]} within {seconds:g} s"
            return f"environment.endpoints.{endpoint.seat}: expected a model that answers, found {found}"
        finally:
            await server.close()
        return ""

    return [found for found in await asyncio.gather(*map(each, endpoints)) if found]


class EndpointPolicy:
    """A player as the user's code sees it, like Policy."""

    def __init__(
        self,
        endpoint: SeatEndpoint,
        server: ChatServer,
        prompt: Prompt,
        limits: Limits,
        seed: int,
        bounded: Callable[[Awaitable[Any]], Awaitable[Any]],
        note: Callable[[Message], None],
    ) -> None:
        """`bounded` runs a call within its deadline; `note` is called with each message after the prompt."""
        self._endpoint, self._server, self._limits, self._seed = endpoint, server, limits, seed
        self._bounded, self._note = bounded, note
        self._tools: Sequence[Schema] = ()
        self.turns = 0
        self.messages: list[Message] = [*prompt.messages] or messages_from(prompt.text)
        self.failure: Exception | None = None

    async def observe(self, observation: Observation = None, tools: Sequence[Schema] = ()) -> Reply:
        """Let the model read the observation, and return its reply. `tools` are offered in the first turn."""
        if self.turns >= self._limits.max_turns:
            raise EpisodeOver("max_turns")
        self._tools = self._tools if self.turns else tools
        if isinstance(observation, Conversation):
            self.messages = []
        said = messages_from(observation)
        request = self._endpoint.request(derive(self._seed, "endpoint", self._endpoint.seat, self.turns) % 2**31)
        if self._tools:
            request["tools"] = list(self._tools)
        try:
            text = await self._bounded(asked(self._server, [*self.messages, *said], request))
            reply = reply_of(text, self._server)
        except Exception as error:
            self.failure = error
            raise
        self.turns += 1
        for message in (*said, reply.message):
            self.messages.append(message)
            self._note(message)
        return reply


async def asked(server: ChatServer, messages: Sequence[Message], settings: Mapping[str, Any]) -> str:
    """Return the body of a reply, at the first attempt or a later one. The caller has a deadline, which bounds the
    waits that the server asks for."""
    retries, late = iter(RETRIES), f"{server.name} {UNANSWERED}"
    try:
        while True:
            try:
                return await server.ask(messages, **settings)
            except Unanswered as error:
                seconds = next(retries, None) if error.wait_s is None else max(error.wait_s, LEAST_WAIT)
                if not error.passing or seconds is None:
                    raise
                if error.wait_s is not None:
                    late = f"{error}; it asked to wait {error.wait_s:g} s, and {UNANSWERED}"
            await asyncio.sleep(seconds)
    except asyncio.CancelledError as error:
        error.add_note(late)
        raise


def reply_of(body: str, server: ChatServer) -> Reply:
    """Return the turn in a reply. Raise ValueError if there is none."""
    try:
        choice = json.loads(body)["choices"][0]
        content, calls = choice["message"].get("content") or "", choice["message"].get("tool_calls") or []
        named = [(str(call["id"]), str(call["function"]["name"]), call["function"]["arguments"]) for call in calls]
        if not isinstance(content, str):
            raise TypeError
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError):
        raise ValueError(f"{server.name}: expected a chat completion, found {server.shown(body)!r}") from None
    finish, message = "length" if choice.get("finish_reason") == "length" else "stop", {"role": "assistant"}
    try:
        found = [ToolCall(name, arguments_in(text), id) for id, name, text in named]
    except ValueError as error:  # without the calls, which nothing answers
        return Reply(content, (), finish, (), str(error), {**message, "content": content})
    return Reply(
        content, (), finish, found, "", {**message, "content": content, **({"tool_calls": calls} if calls else {})}
    )


def arguments_in(text: Any) -> dict[str, Any]:
    """Return the arguments of a call. Raise ValueError if they are no JSON object."""
    arguments = json.loads(text or "{}") if isinstance(text, str | None) else text
    if not isinstance(arguments, dict):
        raise ValueError(f"expected an object of arguments, found {as_toml(arguments)[:80]}")
    return arguments
