"""Tasksets of verifiers v1 as an agent: task.agent = "verifiers:TASKSET".

    this process ── EnvClient ──> verifiers' environment server, a child ── its program ──> its interception server
                                        TrainClient: token ids in and out ──> the rollout's own URL at our endpoint

A row of the task is the TaskData of a task. It runs where verifiers 0.4 is installed: environment.python.
"""

import asyncio
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

SERVER = """
import json, os, sys, threading
from verifiers.v1.serve.pool import serve_env

def end():
    sys.stdin.read()
    os._exit(0)

threading.Thread(target=end, daemon=True).start()
serve_env(max_workers=1, address=sys.argv[1], config_data=json.loads(sys.argv[2]))
"""
"""It ends when the pipe to the process that started it does. Its socket is in that process's temporary folder, which
the supervisor removes."""
START_SECONDS = 300.0
SEAT: Mapping[str, Any] = {"runtime": {"type": "subprocess"}, "harness": {"id": "null"}}
"""Default settings of each seat: its program runs here, and asks for chat completions, the only dialect whose tokens
verifiers trains on."""


class EpisodeFailed(Exception):
    """verifiers recorded an error instead of a reward."""


class EnvServed:
    """verifiers' environment server, started by the first rollout."""

    def __init__(self, config: Mapping[str, Any], seats: Sequence[str], *, several: bool) -> None:
        """The policy plays `seats`: one or `several`."""
        self._config, self._seats, self._several = config, seats, several
        self._starting = asyncio.Lock()
        self._client: Any = None

    async def play(self, task: Mapping[str, Any], url: str, key: str, model: str, tokenizer: str) -> dict[str, Any]:
        from verifiers.v1.configs.client import TrainClientConfig  # pyright: ignore[reportMissingImports]
        from verifiers.v1.types import SamplingConfig  # pyright: ignore[reportMissingImports]

        async with self._starting:
            if self._client is None:
                self._client = await self._started()
        client = TrainClientConfig(
            base_url=url,
            api_key_var="TITAN_RL_UNUSED",  # the key of a rollout is in its header
            headers={"Authorization": f"Bearer {key}"},
            renderer_model_name=tokenizer,
        )
        episode = await self._client.run(
            client=client,
            model=model,
            sampling=SamplingConfig(),
            task_data=dict(task),
        )
        return outcome_of_seats(episode, self._seats) if self._several else outcome_of(episode, self._seats[0])

    async def _started(self) -> Any:
        from verifiers.v1.serve.client import EnvClient  # pyright: ignore[reportMissingImports]

        folder = tempfile.mkdtemp(prefix="titan_rl-verifiers-")
        address = f"ipc://{folder}/server"  # no other user reaches it
        process = subprocess.Popen(
            [sys.executable, "-c", SERVER, address, json.dumps(self._config)],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            start_new_session=True,  # to clean up after a parent that is killed
            env={**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)},
        )
        client = EnvClient(address)
        waiting = asyncio.ensure_future(client.wait_for_server_startup(timeout=START_SECONDS, interval=0.2))
        while not waiting.done():
            if process.poll() is not None:
                waiting.cancel()
                raise RuntimeError(f"verifiers' environment server ended with exit code {process.returncode}")
            await asyncio.sleep(0.1)
        await waiting
        return client


def verifiers_agent(
    taskset: str, args: Mapping[str, Any], seats: Sequence[str] = ()
) -> Callable[..., Awaitable[dict[str, Any]]]:
    """Return an agent that plays tasks of a taskset. Raise if there is none of that name. `seats`:
    environment.seats."""
    from verifiers.v1.serve.pool import env_config_data  # pyright: ignore[reportMissingImports]
    from verifiers.v1.utils.loaders import task_type  # pyright: ignore[reportMissingImports]

    config = env_config(taskset, args, seats)
    served = EnvServed(env_config_data(config), policy_seats(taskset, config, seats), several=bool(seats))
    known = task_type(taskset).data_type().model_fields  # a row may have more columns

    async def run(row: Mapping[str, Any], base_url: str, api_key: str, model: str, tokenizer: str) -> dict[str, Any]:
        task = {name: value for name, value in row.items() if name in known}
        return await served.play(task, base_url, api_key, model, tokenizer)

    return run


def env_config(taskset: str, args: Mapping[str, Any], seats: Sequence[str]) -> Any:
    """Return the EnvConfig of a taskset. Keys of `args` may have dots: {"taskset.split" = "train"}. Agents that are
    `seats` call the policy by their names."""
    from verifiers.v1.configs.agent import AgentConfig  # pyright: ignore[reportMissingImports]
    from verifiers.v1.utils.loaders import env_config_type, resolve_env_config  # pyright: ignore[reportMissingImports]

    raw: dict[str, Any] = {"taskset": {"id": taskset}}
    for key, value in args.items():
        *path, last = key.split(".")
        table = raw
        for part in path:
            table = table.setdefault(part, {})
        table[last] = value
    for seat, field in env_config_type(taskset, raw.get("id", "")).model_fields.items():
        if isinstance(field.default, AgentConfig):
            named = {"model": seat} if seat in seats else {}
            raw[seat] = {**SEAT, **named, **raw.get(seat, {})}
    return resolve_env_config(raw)


def policy_seats(taskset: str, config: Any, seats: Sequence[str]) -> list[str]:
    """Return the seats that ask this run for its tokens. Raise unless they are `seats`; without those only one may ask,
    because several could not be told apart."""
    from verifiers.v1.configs.agent import AgentConfig  # pyright: ignore[reportMissingImports]

    agents = {name: agent for name, agent in dict(config).items() if isinstance(agent, AgentConfig)}
    ours = [name for name, agent in agents.items() if getattr(agent, "client", None) is None]
    if seats and set(seats) != set(ours):
        raise ValueError(f"environment.seats: expected {ours}, the agents of taskset {taskset}, found {[*seats]}")
    if len(ours) != 1 and not seats:
        found, one = ", ".join(ours) or "none", ours[-1] if ours else "user"
        raise ValueError(
            f"expected one seat of taskset {taskset} that the policy plays, found {found}: list them in "
            f'environment.seats, or give every other one an endpoint, like args = {{"{one}.client.base_url" = "http://..."}}'
        )
    return ours


def traces_of(episode: Any) -> list[Any]:
    """Return the traces of an episode. Raise if it failed."""
    traces = list(episode.traces)
    if not (episode.ok and traces):
        errors = [error for each in (episode, *traces) for error in each.errors]
        raise EpisodeFailed("; ".join(f"{error.type}: {error.message}" for error in errors) or "it has no trace")
    return traces


def outcome_of_seats(episode: Any, seats: Sequence[str]) -> dict[str, Any]:
    """Return the mean reward of each seat's traces, None if they may not be trained on, and their metrics."""
    traces = traces_of(episode)
    rewards: dict[str, float | None] = {}
    metrics: dict[str, float] = {}
    for seat in seats:
        if own := [trace for trace in traces if trace.agent.name == seat]:
            trained = all(trace.agent.trainable for trace in own)
            rewards[seat] = sum(trace.reward for trace in own) / len(own) if trained else None
            names = {name for trace in own for name, value in trace.metrics.items() if value is not None}
            metrics |= {f"{seat}/{n}": sum(trace.metrics.get(n) or 0.0 for trace in own) / len(own) for n in names}
    return {**metrics, "seats": rewards}


def outcome_of(episode: Any, seat: str) -> dict[str, Any]:
    """Return an episode's mean reward over the policy's traces, and their metrics. Raise if it failed."""
    traces = traces_of(episode)
    own = [trace for trace in traces if trace.agent.name == seat]
    if not own or not all(trace.agent.trainable for trace in own):
        found = ", ".join(f"{each.agent.name}{'' if each.agent.trainable else ' (not trainable)'}" for each in traces)
        raise EpisodeFailed(f"expected traces of seat {seat} that may be trained on, found {found}")
    names = {name for trace in own for name, value in trace.metrics.items() if value is not None}
    metrics = {name: sum(trace.metrics.get(name) or 0.0 for trace in own) / len(own) for name in names}
    return {**metrics, "reward": sum(trace.reward for trace in own) / len(own)}
