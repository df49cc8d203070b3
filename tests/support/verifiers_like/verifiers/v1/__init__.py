"""Config types, a loader, a server that echoes requests over a socket, and its client."""

import json
import socket
import sys
import time
from types import ModuleType, SimpleNamespace
from typing import Any


class AgentConfig(SimpleNamespace): ...


class Settings(SimpleNamespace): ...


class Data:
    model_fields = ("idx", "prompt", "fails", "frozen")


class EnvKind:
    model_fields = {"agent": SimpleNamespace(default=AgentConfig()), "timeout": SimpleNamespace(default=None)}  # noqa: RUF012


class UserSimKind:
    model_fields = {name: SimpleNamespace(default=AgentConfig()) for name in ("agent", "user")}  # noqa: RUF012


def trace(reward: float, seat: str = "agent", *, trainable: bool) -> Any:
    agent = SimpleNamespace(name=seat, trainable=trainable)
    return SimpleNamespace(agent=agent, reward=reward, metrics={"turns": 2.0, "odd": None}, errors=[])


class EnvClient:
    def __init__(self, address: str) -> None:
        self._path = address.removeprefix("ipc://")

    async def wait_for_server_startup(self, timeout: float, interval: float) -> None:
        deadline = time.monotonic() + timeout
        while not self._config():
            assert time.monotonic() < deadline

    async def run(self, client: Any, model: str, sampling: Any, task_data: dict[str, Any]) -> Any:
        said = {"client": vars(client), "model": model, "task": task_data, "config": self._config()}
        if task_data.get("fails"):
            error = SimpleNamespace(type="HarnessError", message="as asked")
            return SimpleNamespace(ok=False, errors=[], traces=[SimpleNamespace(errors=[error])])
        print(json.dumps(said), file=sys.stderr, flush=True)
        traces = [trace(reward, trainable=not task_data.get("frozen")) for reward in (1.0, 0.5)]
        if "user" in self._config():
            traces.append(trace(-3.0, "user", trainable=False))
        return SimpleNamespace(ok=True, errors=[], traces=traces)

    def _config(self) -> Any:
        try:
            with socket.socket(socket.AF_UNIX) as server:
                server.connect(self._path)
                return json.loads(server.makefile().readline())
        except OSError:
            time.sleep(0.02)
            return None


def serve_env(max_workers: int, address: str, config_data: dict[str, Any]) -> None:
    assert max_workers == 1
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(address.removeprefix("ipc://"))
        server.listen()
        while True:
            other, _ = server.accept()
            with other:
                other.sendall(json.dumps(config_data).encode() + b"\n")


def env_config_type(taskset: str, env: str) -> type:
    if taskset == "user_sim":
        return UserSimKind
    if taskset != "counting":
        raise ModuleNotFoundError(f"taskset {taskset!r} not found")
    return EnvKind


def resolve_env_config(raw: dict[str, Any]) -> dict[str, Any]:
    seats = env_config_type(raw["taskset"]["id"], "").model_fields
    return {key: AgentConfig(**value) if key in seats else value for key, value in raw.items()}


def env_config_data(config: dict[str, Any]) -> dict[str, Any]:
    return {key: vars(value) if isinstance(value, AgentConfig) else value for key, value in config.items()}


MODULES: dict[str, dict[str, Any]] = {
    "configs.agent": {"AgentConfig": AgentConfig},
    "configs.client": {"TrainClientConfig": Settings},
    "serve.client": {"EnvClient": EnvClient},
    "serve.pool": {"serve_env": serve_env, "env_config_data": env_config_data},
    "types": {"SamplingConfig": Settings},
    "utils.loaders": {
        "env_config_type": env_config_type,
        "resolve_env_config": resolve_env_config,
        "task_type": lambda taskset: SimpleNamespace(data_type=lambda: Data),
    },
}
for name, attributes in MODULES.items():
    for part in (name.partition(".")[0], name):
        sys.modules.setdefault(f"{__name__}.{part}", ModuleType(f"{__name__}.{part}"))
    vars(sys.modules[f"{__name__}.{name}"]).update(attributes)
