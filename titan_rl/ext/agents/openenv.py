"""A client of OpenEnv servers: one WebSocket, and with it one session, for each rollout. It needs no package of theirs.

    GET /schema      WS /ws: {"type": "reset" | "step" | "close", "data": {...}} -> {"type", "data"}

A turn's text becomes an action: a JSON object, plain or in a fenced block; else the text is the value of the action's
only field that must be given.
"""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any

SECONDS = 10.0  # for a server to answer before a run
LARGEST = 100 << 20  # bytes of a message, the limit of OpenEnv's own client
HIDDEN = ("done", "reward", "metadata")  # fields of an observation that are not for the policy
FENCED = re.compile(r"```(?:json)?\s*\n(.*?)```", re.DOTALL)
SIMPLE: Mapping[str, Callable[[str], Any]] = {"string": str, "integer": int, "number": float}


class OpenEnvFull(Exception):
    """The server has no place for another session."""


class OpenEnvSession:
    def __init__(self, url: str, action: Mapping[str, Any], args: Mapping[str, Any]) -> None:
        self._url, self._action, self._args = url, action, args
        self._http: Any = None
        self._socket: Any = None

    async def reset(self, row: Mapping[str, Any], task_seed: int) -> str:
        answer = await self._ask("reset", {"seed": task_seed, **row, **self._args})
        return shown(answer.get("observation"))

    async def step(self, reply: Any) -> tuple[str, float, bool, dict[str, Any]]:
        try:
            action = action_from(reply.text, self._action)
        except ValueError as error:
            return f"error: {error}", 0.0, False, {"unreadable": 1}
        answer = await self._ask("step", action)
        return shown(answer.get("observation")), answer.get("reward") or 0.0, bool(answer.get("done")), {}

    async def close(self) -> None:
        if self._socket is not None:
            with suppress(Exception):  # it may be closed
                await self._socket.send_json({"type": "close"})
            await self._socket.close()
        if self._http is not None:
            await self._http.close()

    async def _ask(self, kind: str, data: Mapping[str, Any]) -> dict[str, Any]:
        import aiohttp  # 0.3 s

        if self._socket is None:
            self._http = aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(sock_connect=SECONDS))
            self._socket = await self._http.ws_connect(f"{self._url}/ws", max_msg_size=LARGEST)
        with suppress(ConnectionError):  # a server that is full answers, and closes, before it is asked
            await self._socket.send_str(json.dumps({"type": kind, "data": dict(data)}, default=str))
        message = await self._socket.receive()
        if message.type is not aiohttp.WSMsgType.TEXT:
            raise ConnectionError(f"{self._url}: expected an answer to {kind!r}, found {message.type.name}")
        answer = json.loads(message.data)
        content = answer.get("data") or {}
        if answer.get("type") == "error":
            why = f"{self._url}: {content.get('message')} ({content.get('code')})"
            raise OpenEnvFull(why) if content.get("code") == "CAPACITY_REACHED" else RuntimeError(why)
        return content


def openenv(url: str, args: Mapping[str, Any], seats: Sequence[str] = ()) -> Callable[[], OpenEnvSession]:
    """Make sessions of the server at http://HOST:PORT. Raise ConnectionError if none answers."""
    url = re.sub(r"^ws", "http", url).rstrip("/")
    action = schema_of(url)
    return lambda: OpenEnvSession(url, action, args)


def schema_of(url: str) -> Mapping[str, Any]:
    """Return the JSON schema of a server's actions."""
    import urllib.request  # 0.03 s

    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(f"{url}/schema", timeout=SECONDS) as response:
            schema = json.load(response)
        return schema["action"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        why = getattr(error, "reason", error)
        raise ConnectionError(f"expected an OpenEnv server at {url}, found {type(error).__name__}: {why}") from error


async def sessions_open(url: str, wanted: int) -> int:
    """Return how many sessions a server opens at the same time, at most `wanted`. They are closed again."""
    open_ones: list[OpenEnvSession] = []
    try:
        while len(open_ones) < wanted:
            open_ones.append(OpenEnvSession(re.sub(r"^ws", "http", url).rstrip("/"), {}, {}))
            await open_ones[-1].reset({}, 0)
    except OpenEnvFull:
        return len(open_ones) - 1
    finally:
        for each in open_ones:
            await each.close()
    return wanted


def action_from(text: str, schema: Mapping[str, Any]) -> dict[str, Any]:
    """Return the action that a text means. Raise ValueError if it means none."""
    text = text.strip()
    for candidate in [text, *reversed(FENCED.findall(text))]:
        with suppress(ValueError, RecursionError):
            value = json.loads(candidate)
            if isinstance(value, dict):
                return value
    fields = {name: kind for name, kind in (schema.get("properties") or {}).items() if name != "metadata"}
    required = [name for name in schema.get("required") or () if name in fields] or list(fields)
    if len(required) == 1 and (convert := SIMPLE.get(fields[required[0]].get("type", ""))):
        with suppress(ValueError):
            return {required[0]: convert(text)}
    raise ValueError(f"expected an action as a JSON object with the fields {', '.join(required) or 'of the schema'}")


def shown(observation: Any) -> str:
    """Return an observation as text: its only text, or else its fields as JSON."""
    if not isinstance(observation, Mapping):
        return "" if observation is None else str(observation)
    fields = {name: value for name, value in observation.items() if name not in HIDDEN and value is not None}
    texts = [value for value in fields.values() if isinstance(value, str)]
    return texts[0] if len(texts) == len(fields) == 1 else json.dumps(fields, ensure_ascii=False)
