"""The HTTP server that Tinker's SDK talks to: /api/v1/..."""

import hmac
import socket
from collections.abc import Awaitable, Callable, Mapping
from functools import partial
from http import HTTPStatus
from typing import Any

import orjson
from aiohttp import web

from titan_rl.ext.agents.openai_endpoint import SILENT, json_body
from titan_rl.ext.tinker.messages import BadInput, address
from titan_rl.ext.tinker.service import Answer, Failed, NotFound, Service
from titan_rl.wire.errors import RunError

MOST_BYTES = 256 << 20  # in a request
WAITING_CONNECTIONS = 4096
POLL_SECONDS = 20.0  # the SDK gives up after 45
SHUTDOWN_SECONDS = 5.0
PROTOBUF, JSON = "application/x-protobuf", "application/json"
CLIENT_CONFIG = {
    "pjwt_auth_enabled": False,
    "parallel_fwdbwd_chunks": False,
    "proto_compress_fwdbwd": False,
    "sample_use_retrieve_futures": False,
    "custom_loss_server_side": False,
    "sample_join_sampling_session": False,
    "use_pyqwest_transport": False,
}
"""Features of the SDK that it uses only where a server has them."""

Body = Mapping[str, Any]


class TinkerEndpoint:
    def __init__(self, service: Service, key: str) -> None:
        self._service, self._key = service, key.encode()
        app = web.Application(client_max_size=MOST_BYTES, middlewares=[self._checked])
        run = "/api/v1/training_runs/{run}"
        for path, answer in {
            "healthz": lambda _: {"status": "ok"},
            "get_server_capabilities": self._capabilities,
            "samplers/{sampler}": self._sampler,
            "training_runs/{run}": lambda request: service.training_run(request.match_info["run"]),
            "training_runs/{run}/checkpoints": self._checkpoints,
        }.items():
            app.router.add_get(f"/api/v1/{path}", plain(answer))
        app.router.add_delete(f"{run}/checkpoints/{{kind}}/{{name}}", plain(self._delete))
        for path, answer in {
            "client/config": lambda _: {**CLIENT_CONFIG, "fwdbwd_max_chunk_bytes_count": service.chunk_bytes},
            "client/dynamic_config": lambda _: {"sample_cancel_enabled": False},
            "telemetry": lambda _: {"status": "accepted"},
            "create_session": lambda _: {"type": "create_session", "session_id": service.open_session().id},
            "session_heartbeat": self._heartbeat,
            "create_model": promised(service.create_model),
            "get_info": self._info,
            "optim_step": promised(partial(service.call, service.optim_step)),
            "save_weights": promised(partial(service.call, service.save_weights)),
            "save_weights_for_sampler": promised(partial(service.call, service.save_weights_for_sampler)),
            "load_weights": promised(self._load),
            "weights_info": self._weights_info,
            "create_sampling_session": self._create_sampler,
            "asample": self._sample,
        }.items():
            app.router.add_post(f"/api/v1/{path}", of_body(answer))
        app.router.add_post("/api/v1/forward_backward", self._forward_backward)
        app.router.add_post("/api/v1/retrieve_future", self._fetch)
        app.router.add_post("/api/v1/sessions/{session}/finish", self._finish)
        self._runner = web.AppRunner(app, access_log=None, shutdown_timeout=SHUTDOWN_SECONDS, logger=SILENT)

    async def listen(self, bound: socket.socket) -> None:
        await self._runner.setup()
        await web.SockSite(self._runner, bound, backlog=WAITING_CONNECTIONS).start()

    async def close(self) -> None:
        await self._runner.cleanup()

    @web.middleware
    async def _checked(
        self, request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
    ) -> web.StreamResponse:
        """Refuse requests without the key, and answer errors with a status and a text."""
        scheme, _, bearer = request.headers.get("Authorization", "").partition(" ")
        sent = request.headers.get("X-API-Key") or (bearer.strip() if scheme.lower() == "bearer" else "")
        if not hmac.compare_digest(sent.encode(errors="replace"), self._key):
            return refused(HTTPStatus.UNAUTHORIZED, "X-API-Key: expected the key that this server printed")
        try:
            return await handler(request)
        except BadInput as error:
            return refused(HTTPStatus.BAD_REQUEST, str(error))
        except NotFound as error:
            return refused(HTTPStatus.NOT_FOUND, str(error))
        except web.HTTPException as error:  # a call that is not offered, or a request that is too large
            return refused(HTTPStatus(error.status), f"{request.method} {request.path}: {error.reason}")
        except Exception as error:  # not 5xx, which the SDK tries again for minutes
            return refused(HTTPStatus.FAILED_DEPENDENCY, f"{type(error).__name__}: {error}")

    async def _forward_backward(self, request: web.Request) -> web.Response:
        if request.content_type != PROTOBUF or request.headers.get("Content-Encoding"):
            raise BadInput(f"Content-Type: expected {PROTOBUF}, not compressed, found {request.content_type}")
        message = await request.read()
        model, seq = address(message)
        return replied({"request_id": self._service.call(self._service.forward_backward, message, model, seq)})

    async def _fetch(self, request: web.Request) -> web.Response:
        body = json_body(await request.read(), BadInput)
        try:
            answer = await self._service.fetch(body.get("request_id"), POLL_SECONDS)
        except (BadInput, Failed) as error:
            return replied({"error": str(error), "category": "user"})
        except RunError as error:
            return replied({"error": f"the server ends: {error}", "category": "server"})
        if answer is None:
            return replied({"queue_state": "active"}, HTTPStatus.REQUEST_TIMEOUT)  # the SDK asks again
        return replied(answer)

    async def _finish(self, request: web.Request) -> web.Response:
        await self._service.end_session(self._service.session(request.match_info["session"]))
        return replied({})

    def _capabilities(self, _: Any) -> Body:
        service = self._service
        model = {"model_name": service.base, "max_context_length": service.context}
        return {"supported_models": [{**model, "trainable": True, "sampleable": True}]}

    def _heartbeat(self, body: Body) -> Body:
        self._service.session(body.get("session_id"))
        return {"type": "session_heartbeat"}

    def _info(self, body: Body) -> Body:
        service, model = self._service, self._service.model(body.get("model_id"))
        data = {"arch": service.family, "model_name": service.base, "tokenizer_id": service.base}
        own = {"model_id": model.id, "is_lora": True, "lora_rank": model.spec.rank, "model_name": service.base}
        return {"type": "get_info", "model_data": data, **own}

    def _load(self, body: Body) -> str:
        service = self._service
        return service.create_by_loading(body) if body.get("session_id") else service.call(service.load_weights, body)

    def _weights_info(self, body: Body) -> Body:
        _, facts = self._service.saved(str(body.get("tinker_path")))
        layers = {f"train_{name}": any(t in facts["targets"] for t in ts) for name, ts in LAYER_KINDS.items()}
        return {"base_model": facts["base_model"], "is_lora": True, "lora_rank": facts["rank"], **layers}

    def _create_sampler(self, body: Body) -> Body:
        return {"type": "create_sampling_session", "sampling_session_id": self._service.create_sampler(body)}

    def _sampler(self, request: web.Request) -> Body:
        name = request.match_info["sampler"]
        path = self._service.sampler(name).path
        return {"sampler_id": name, "base_model": self._service.base, "model_path": path or None}

    def _sample(self, body: Body) -> Body:
        id, sequences = self._service.sample(body)
        return {"request_id": id, "sample_sequence_ids": sequences}

    def _checkpoints(self, request: web.Request) -> Body:
        run = request.match_info["run"]
        self._service.training_run(run)
        return {"checkpoints": [*self._service.checkpoints(run)]}

    def _delete(self, request: web.Request) -> Body:
        folder, _ = self._service.saved("tinker://{run}/{kind}/{name}".format(**request.match_info))
        self._service.remove(folder)
        return {}


LAYER_KINDS = {"attn": ("q", "k", "v", "o"), "mlp": ("gate", "up", "down"), "unembed": ()}


def plain(answer: Callable[[web.Request], Body]) -> Callable[[web.Request], Awaitable[web.Response]]:
    async def handled(request: web.Request) -> web.Response:
        return replied(answer(request))

    return handled


def of_body(answer: Callable[[Body], Body]) -> Callable[[web.Request], Awaitable[web.Response]]:
    async def handled(request: web.Request) -> web.Response:
        return replied(answer(json_body(await request.read(), BadInput)))

    return handled


def promised(call: Callable[[Body], str]) -> Callable[[Body], Body]:
    return lambda body: {"request_id": call(body)}


def replied(answer: Answer, status: int = HTTPStatus.OK) -> web.Response:
    if isinstance(answer, bytes):
        return web.Response(body=answer, status=status, content_type=PROTOBUF)
    return web.Response(body=orjson.dumps(answer), status=status, content_type=JSON)


def refused(status: HTTPStatus, text: str) -> web.Response:
    return replied({"detail": text}, status)
