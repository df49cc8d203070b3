"""An OpenAI-compatible server inside an environment process, through which agents reach the policy unchanged.

    http://127.0.0.1:PORT/r/ROLLOUT/v1/{models,chat/completions,completions}
    http://127.0.0.1:PORT/r/ROLLOUT/inference/v1/generate      token ids in and out, as vLLM has it

Each rollout has its own URL and key, which open nothing else, and nothing once it has ended. Only the loopback device
is listened on. How the policy samples is up to the run's config; a client may lower the number of tokens.
"""

import hmac
import logging
import os
import secrets
import socket
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from http import HTTPStatus
from typing import Any

import orjson
from aiohttp import web

from titan_rl.ext.agents.agent_session import OFFERED, AgentSession, Refused, Wish
from titan_rl.ext.agents.message_tree import BadMessage, readable
from titan_rl.ext.agents.openai_replies import Replies
from titan_rl.ext.agents.play import scored
from titan_rl.ext.agents.players import Seats, outcome_of_players
from titan_rl.tasks.user_code import call_user, shortened
from titan_rl.wire.sessions import Outcome, Status
from titan_rl.wire.types import Prompt
from titan_rl.wire.user_functions import keywords_of

HOST = "127.0.0.1"
MODEL = "policy"
MOST_BYTES = 64 << 20  # request body
WAITING_CONNECTIONS = 4096
SHUTDOWN_SECONDS = 5.0

SILENT = logging.getLogger(f"{__name__}.protocol")
"""For aiohttp's words on requests that are no HTTP: a traceback each, which anybody could have the server print."""
SILENT.setLevel(logging.CRITICAL)

Body = Mapping[str, Any]
Answers = Callable[[AgentSession, Body], Awaitable[tuple[Any, list[Any]]]]
"""Answers a request: returns its reply, and the same as the chunks of a stream."""


class OpenAIEndpoint:
    root = "/r/{rollout}"

    def __init__(self, model: str = MODEL, context: int = 0) -> None:
        self._secret = secrets.token_bytes(32)
        self._sessions: dict[str, Mapping[str, AgentSession]] = {}  # by rollout, then by seat
        self._replies = Replies(model, context)
        self._port = 0
        app = web.Application(client_max_size=MOST_BYTES, middlewares=[_with_json_errors])
        app.router.add_get(f"{self.root}/v1/models", self._models)
        app.router.add_post(f"{self.root}/v1/chat/completions", self._route(self._chat))
        app.router.add_post(f"{self.root}/v1/completions", self._route(self._complete))
        app.router.add_post(f"{self.root}/inference/v1/generate", self._route(self._generate))
        # A turn whose client is gone is cancelled with its handler.
        self._runner = web.AppRunner(
            app, access_log=None, handler_cancellation=True, shutdown_timeout=SHUTDOWN_SECONDS, logger=SILENT
        )

    async def listen(self, bound: socket.socket | None = None) -> None:
        """Listen on a bound socket, or on a port that the system chooses."""
        await self._runner.setup()
        if bound is None:
            site: web.BaseSite = web.TCPSite(self._runner, HOST, 0, backlog=WAITING_CONNECTIONS)
        else:
            site = web.SockSite(self._runner, bound, backlog=WAITING_CONNECTIONS)
        await site.start()
        self._port = self._runner.addresses[0][1]
        for name in ("NO_PROXY", "no_proxy"):  # a client must not ask a proxy for its own machine
            others = [each for each in os.environ.get(name, "").split(",") if each not in ("", HOST)]
            os.environ[name] = ",".join([*others, HOST])

    async def close(self) -> None:
        await self._runner.cleanup()

    @contextmanager
    def opened(self, rollout: str, sessions: Mapping[str, AgentSession]) -> Iterator[tuple[str, str]]:
        """Open a rollout's sessions, by seat. Yield its base URL and its key."""
        self._sessions[rollout] = sessions
        try:
            yield f"http://{HOST}:{self._port}/r/{rollout}/v1", self._key(rollout)
        finally:
            del self._sessions[rollout]
            for session in sessions.values():
                session.end()

    async def run_agent(
        self,
        function: Callable[..., Any],
        name: str,
        rollout: str,
        sessions: Mapping[str, AgentSession],
        prompt: Prompt,
        seed: int,
        seats: Seats,
    ) -> Outcome:
        """Run the user's `async def run(row, base_url, api_key) -> reward | {"reward": reward, **info} | None`. If it
        raises because a limit refused a last request, its reward is 0."""
        folder = str(next(iter(sessions.values())).tokenizer.folder)
        with self.opened(rollout, sessions) as (base_url, api_key):
            own = (base_url, api_key, seats.names[0] if seats.names else MODEL, folder)
            values = (prompt.row, prompt.text, prompt.answer, seed, *own)
            keywords = keywords_of(function, dict(zip(OFFERED, values, strict=True)), name)
            try:
                result = await call_user(function, **keywords)
            except Exception:
                if not any(session.refused for session in sessions.values()):
                    raise
                result = None if seats.names else 0.0
            refused: list[Status] = [session.refused for session in sessions.values() if session.refused]
        status: Status = refused[0] if refused else "completed"
        counted = [session.metrics() for session in sessions.values()]
        metrics = {key: sum(each[key] for each in counted) for key in counted[0]}
        if seats.names:
            said = [{**each, "name": seat} for seat, session in sessions.items() for each in session.messages]
            moved = [seat for seat, session in sessions.items() if session.turns]
            outcome = outcome_of_players(result, status, moved, seats, said, name)
        elif isinstance(result, Outcome):
            outcome = result
        else:
            outcome = scored(result, status, sessions[""].turns, sessions[""].messages, name)
        return replace(outcome, metrics={**outcome.metrics, **metrics})

    def _key(self, rollout: str) -> str:
        """Return a rollout's key. Computed, so that an ended rollout's need not be kept to be known."""
        return "sk-" + hmac.digest(self._secret, rollout.encode(errors="replace"), "sha256").hex()

    def _seats(self, request: web.Request) -> Mapping[str, AgentSession]:
        """Return the sessions of a request's rollout, by seat."""
        rollout = request.match_info["rollout"]
        authorize(request, self._key(rollout))
        if (sessions := self._sessions.get(rollout)) is None:
            raise Refused(HTTPStatus.GONE, "session_ended", "this rollout has ended")
        return sessions

    def _route(self, answers: Answers) -> Callable[[web.Request], Awaitable[web.StreamResponse]]:
        async def handled(request: web.Request) -> web.StreamResponse:
            sessions, body = self._seats(request), json_body(await request.read())
            session = session_of(sessions, body.get("model"))
            if body.get("n") not in (None, 1):
                raise bad_request(f"n: expected 1, found {body['n']!r}")
            reply, chunks = await answers(session, body)
            return await replied(request, body, reply, chunks)

        return handled

    async def _models(self, request: web.Request) -> web.Response:
        return _json(self._replies.models([*filter(None, self._seats(request))]))

    async def _chat(self, session: AgentSession, body: Body) -> tuple[Any, list[Any]]:
        tools = body.get("tools") or []
        known = isinstance(tools, list) and all(
            isinstance(t, dict) and isinstance(t.get("function"), dict) for t in tools
        )
        if not known:
            raise bad_request("tools: expected a list of functions, each with its schema")
        most = "max_tokens" if body.get("max_completion_tokens") is None else "max_completion_tokens"
        wish = Wish(_positive(body, most), bool(body.get("logprobs")))
        return self._replies.chat(
            await session.chat(readable(body.get("messages")), tools, wish), session.tokenizer, body
        )

    async def _complete(self, session: AgentSession, body: Body) -> tuple[Any, list[Any]]:
        prompt = body.get("prompt")
        if isinstance(prompt, list) and len(prompt) == 1 and isinstance(prompt[0], str | list):
            (prompt,) = prompt
        if body.get("echo") or body.get("suffix"):
            raise bad_request("echo, suffix: expected neither")
        logprobs = body.get("logprobs")
        wish = Wish(_positive(body, "max_tokens"), logprobs is not None and logprobs is not False)
        if isinstance(prompt, str):
            return self._replies.text(await session.complete(prompt, wish), session.tokenizer, body)
        if not isinstance(prompt, list) or any(isinstance(each, dict) for each in prompt):
            raise bad_request(f"prompt: expected one text or one list of token ids, found {shortened(prompt)}")
        return self._replies.text(await session.generate(prompt, wish), session.tokenizer, body)

    async def _generate(self, session: AgentSession, body: Body) -> tuple[Any, list[Any]]:
        tokens, sampling = body.get("token_ids"), body.get("sampling_params") or {}
        if not isinstance(tokens, list) or not isinstance(sampling, dict):
            raise bad_request("expected a list token_ids and an object sampling_params")
        if sampling.get("n") not in (None, 1):
            raise bad_request(f"sampling_params.n: expected 1, found {sampling['n']!r}")
        wish = Wish(_positive(sampling, "max_tokens"), sampling.get("logprobs") is not None)
        return self._replies.tokens(await session.generate(tokens, wish), session.tokenizer, body)


def session_of(sessions: Mapping[str, AgentSession], model: object) -> AgentSession:
    """Return the session of the seat that a request's `model` names."""
    if single := sessions.get(""):
        single.take_model(model)
        return single
    if isinstance(model, str) and (found := sessions.get(model)):
        return found
    expected = f"model: expected one of environment.seats: {', '.join(sessions)}; found {model!r}"
    raise Refused(HTTPStatus.BAD_REQUEST, "no_such_seat", expected)


def authorize(request: web.Request, key: str) -> None:
    scheme, _, sent = request.headers.get("Authorization", "").partition(" ")
    right = hmac.compare_digest(sent.strip().encode(errors="replace"), key.encode())
    if scheme.lower() != "bearer" or not right:
        raise Refused(HTTPStatus.UNAUTHORIZED, "invalid_api_key", "expected the api_key that belongs to this URL")


@web.middleware
async def _with_json_errors(
    request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
) -> web.StreamResponse:
    """Answer what fails as OpenAI does."""
    try:
        return await handler(request)
    except BadMessage as error:
        return _failed(HTTPStatus.BAD_REQUEST, "invalid_messages", str(error))
    except Refused as error:
        return _failed(error.status, error.code, str(error))
    except web.HTTPException as error:  # a path that there is not, a request that is too large
        return _failed(HTTPStatus(error.status), error.reason.lower().replace(" ", "_"), error.reason)
    except Exception as error:
        return _failed(HTTPStatus.INTERNAL_SERVER_ERROR, "internal_error", f"{type(error).__name__}: {error}")


def _failed(status: HTTPStatus, code: str, message: str) -> web.Response:
    kind = "authentication_error" if status == HTTPStatus.UNAUTHORIZED else "invalid_request_error"
    return _json({"error": {"message": message, "type": kind, "param": None, "code": code}}, status)


def bad_request(message: str) -> Refused:
    return Refused(HTTPStatus.BAD_REQUEST, "invalid_request", message)


def json_body(raw: bytes, refused: Callable[[str], Exception] = bad_request) -> Body:
    """Return a body that is a JSON object, or raise what `refused` makes of the reason."""
    try:
        body = orjson.loads(raw)
    except ValueError as error:
        raise refused(f"expected a body in JSON, found {error}") from error
    if not isinstance(body, dict):
        raise refused(f"expected a JSON object as the body, found a {type(body).__name__}")
    return body


def _positive(body: Body, name: str) -> int | None:
    value = body.get(name)
    if value is not None and (type(value) is not int or value < 1):
        raise bad_request(f"{name}: expected a positive integer, found {value!r}")
    return value


def _json(value: Any, status: int = 200) -> web.Response:
    return web.Response(body=orjson.dumps(value), status=status, content_type="application/json")


async def replied(request: web.Request, body: Body, reply: Any, chunks: list[Any]) -> web.StreamResponse:
    return await _streamed(request, chunks) if body.get("stream") else _json(reply)


async def _streamed(request: web.Request, chunks: list[Any]) -> web.StreamResponse:
    """Send the chunks as server-sent events. They are whole already: an earlier error has its own status."""
    response = web.StreamResponse(headers={"Content-Type": "text/event-stream", "Cache-Control": "no-cache"})
    await response.prepare(request)
    for chunk in chunks:
        await response.write(b"data: " + orjson.dumps(chunk) + b"\n\n")
    await response.write(b"data: [DONE]\n\n")
    await response.write_eof()
    return response
