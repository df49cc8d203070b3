"""The GPU and environment of each rank, the order in which meshes start, and the end of a run."""

import asyncio
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from titan_rl.actors.vllm import vllm_cpu
from titan_rl.actors.vllm.engine import EngineInfo
from titan_rl.actors.vllm.vllm_params import LiveLayout
from titan_rl.config.toml import find, load, shipped
from titan_rl.meshes import deaths
from titan_rl.meshes.spawn import process_group
from titan_rl.record.terminal import Terminal
from titan_rl.train import bring_up, rank_places
from titan_rl.train.rank_places import RankPlaces, cuda_environment, resources
from titan_rl.wire import gpus

# In a separate process: the end of a run is the end of Monarch and of all ranks in the controller's process.
PROGRAM = """
import asyncio, os, subprocess, sys, time
from pathlib import Path
from titan_rl.meshes import deaths
from titan_rl.train.bring_up import shutdown

stubborn = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('up', flush=True); time.sleep(60)"
names = ["role[dp=0 tp=0]", "role[dp=1 tp=0]"]
launcher = [sys.executable, "-I", "-S", str(Path(deaths.__file__).with_name("rank_launcher.py"))]
ranks = [
    subprocess.Popen(
        [*launcher, sys.executable, "-c", stubborn],
        env={**expected, "TITAN_RL_CONTROLLER": str(os.getpid())},
        stdout=subprocess.PIPE,
    )
    for expected in deaths.follow(names).values()
]
for rank in ranks:
    rank.stdout.readline()
while not set(names) <= deaths.alive().keys():
    time.sleep(0.01)
began = time.monotonic()
asyncio.run(shutdown())
took = time.monotonic() - began
print(took < 4, *(rank.wait(5) for rank in ranks))  # below CLOSE_SECONDS: nothing had to time out
"""


@pytest.fixture(autouse=True)
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No GPU is hidden. Meetings of process groups are files, in the folder that a run takes with it."""
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setenv("TMPDIR", str(tmp_path))


def test_ranks_that_ignore_every_request_do_not_delay_the_end() -> None:
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=60)
    assert done.stdout.split() == ["True", "-9", "-9"], done.stderr


@pytest.mark.parametrize("config", [name for name in shipped() if load(find(name)).hosts.number == 1])
@pytest.mark.parametrize("given", [None, "4,5,6,7,8,9,10,11", "GPU-a,GPU-b,GPU-c,GPU-d,GPU-e,GPU-f,GPU-g,GPU-h"])
def test_every_rank_has_a_gpu_of_its_own_among_those_that_the_run_was_given(
    monkeypatch: pytest.MonkeyPatch, config: str, given: str | None
) -> None:
    """A rank takes the GPU of its LOCAL_RANK in the list that its mesh sees."""
    monkeypatch.setattr(gpus, "_present_gpus", lambda: 12)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if given:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", given)
    run = load(find(config))
    setup: Any = SimpleNamespace(config=run, device="cuda")
    host: Any = None
    rank_places = RankPlaces(setup, [host])
    meshes = [] if run.placement.kind == "colocated" else rank_places.of_model("trainer")  # generators share its GPUs
    if run.samples_rollouts:
        meshes += [rank_places.of_replica(replica) for replica in range(run.generator.replicas)]
    for role in run.roles:
        meshes += rank_places.of_model(role)
    dealt = []
    for rank_place in meshes:
        seen = rank_place.env["CUDA_VISIBLE_DEVICES"].split(",")
        dealt += [seen[int(rank["LOCAL_RANK"])] for rank in process_group(rank_place.ranks)]
    assert len(dealt) == len(set(dealt)) == sum(rank_place.ranks for rank_place in meshes)
    assert set(dealt) <= set(given.split(",") if given else map(str, range(12)))


def test_a_rank_that_was_planned_for_a_gpu_does_not_train_without_one(monkeypatch: pytest.MonkeyPatch) -> None:
    setup: Any = SimpleNamespace(config=load(find("grpo_llama")), device="cuda")
    for name, value in resources(setup, "model", ["0"]).items():
        monkeypatch.setenv(name, value)
    with pytest.raises(RuntimeError, match="planned for CUDA, found none that torch can use"):
        gpus.require_planned_device(cuda_is_available=False)
    gpus.require_planned_device(cuda_is_available=True)
    setup.device = "cpu"
    monkeypatch.setenv(gpus.PLANNED, resources(setup, "model")[gpus.PLANNED])
    gpus.require_planned_device(cuda_is_available=False)


def test_cuda_ranks_are_launched_with_what_exact_and_deterministic_products_need() -> None:
    run = load(find("grpo_llama"), [("debug.deterministic", "true"), ("generator.dtype", "float32")])
    setup: Any = SimpleNamespace(config=run, device="cuda")
    needed = {"TRITON_F32_DEFAULT": "ieee", "CUBLAS_WORKSPACE_CONFIG": ":4096:8"}
    assert needed.items() <= resources(setup, "model", ["0"]).items()
    setup.device = "cpu"
    assert not needed.keys() & resources(setup, "model").keys()
    fast = load(find("grpo_llama"), [("generator.dtype", "bfloat16")])
    assert cuda_environment(fast) == {}


class Started:
    """The two kinds of meshes, which record their start and their environment."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, device: str, **keys: Any) -> None:
        self.events: list[str] = []
        self.env: Mapping[str, str] = {}
        monkeypatch.setattr(gpus, "_present_gpus", lambda: 12)
        monkeypatch.setattr(bring_up, "verify_complete", lambda *_: None)
        monkeypatch.setattr(bring_up, "GeneratorMesh", self)
        monkeypatch.setattr(bring_up, "ModelMesh", self.model_mesh)
        shape: Any = SimpleNamespace(with_value_head=lambda: None, recurrent_heads=0)
        config = load(find("grpo_llama"), [(key.replace("__", "."), str(value)) for key, value in keys.items()])
        setup: Any = SimpleNamespace(
            config=config,
            resolved=config,
            device=device,
            shape=shape,
            role_shapes={},
            model_folder="model",
            policies={},
        )
        nothing: Any = None
        asyncio.run(bring_up._start(RankPlaces(setup, [nothing]), setup, Terminal(), nothing))

    def model_mesh(self, host: Any, role: str, *_: Any) -> Any:
        return SimpleNamespace(start=lambda: self._note(role))

    async def spawn(self, host: Any, settings: Any, *, env: Mapping[str, str], **_: Any) -> "Started":
        self.env = env
        return self

    async def start(self) -> list[EngineInfo]:
        await self._note("generator")
        return [EngineInfo(1, {}, "V2")]

    async def layouts(self) -> list[LiveLayout]:
        return []

    async def sleep(self) -> None:
        self.events.append("generator sleeps")

    async def _note(self, mesh: str) -> None:
        self.events.append(f"{mesh} starts")
        await asyncio.sleep(0.01)
        self.events.append(f"{mesh} is up")


def test_generators_that_share_gpus_measure_free_memory_before_trainers_take_any(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    trainer = ["trainer starts", "trainer is up"]
    together = Started(monkeypatch, "cuda", placement__kind="colocated").events
    assert together == ["generator starts", "generator is up", "generator sleeps", *trainer]
    assert "generator: vLLM's V2 model runner" in capsys.readouterr().out
    at_once = ["trainer starts", "generator starts", "trainer is up", "generator is up"]
    assert Started(monkeypatch, "cuda").events == at_once
    assert Started(monkeypatch, "cpu", placement__kind="colocated").events == at_once
    assert (
        Started(monkeypatch, "cuda", placement__kind="colocated", algorithm__name="sft", eval__size=0).events == trainer
    )


def test_deterministic_engines_on_gpus_are_batch_invariant(monkeypatch: pytest.MonkeyPatch) -> None:
    assert Started(monkeypatch, "cuda", debug__deterministic="true").env["VLLM_BATCH_INVARIANT"] == "1"
    assert "VLLM_BATCH_INVARIANT" not in Started(monkeypatch, "cuda").env
    for deterministic in ("true", "false"):
        assert Started(monkeypatch, "cpu", debug__deterministic=deterministic).env == vllm_cpu.ENV


@pytest.mark.parametrize(("device", "seconds"), [("cpu", 10), ("cuda", 60)])
async def test_killed_processes_on_gpus_have_longer_to_free_their_memory(
    monkeypatch: pytest.MonkeyPatch, device: str, seconds: float
) -> None:
    async def none_started(*_: Any) -> bring_up.Meshes:
        return bring_up.Meshes(SimpleNamespace(close=lambda: asyncio.sleep(0)))  # pyright: ignore[reportArgumentType]

    monkeypatch.setattr(deaths, "kill_seconds", 0.0)
    monkeypatch.setattr(rank_places, "local_host", lambda: None)
    monkeypatch.setattr(bring_up, "_start", none_started)
    setup: Any = SimpleNamespace(config=load(find("grpo_llama")), device=device)
    nothing: Any = None

    async with bring_up.launch(setup, Terminal(), nothing):
        assert deaths.kill_seconds == seconds


def test_what_outlives_a_kill_is_named_when_its_time_is_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(deaths, "_local", {os.getpid(): "stubborn[tp=0]"})
    monkeypatch.setattr(deaths.os, "kill", lambda *_: None)
    monkeypatch.setattr(deaths, "kill_seconds", 0.05)
    assert asyncio.run(deaths.kill(["stubborn[tp=0]"])) == ["stubborn[tp=0]"]


@pytest.mark.parametrize(("on_gpus", "first"), [(True, ["trainers end", "replicas are up"]), (False, [])])
def test_replicas_that_start_on_the_trainers_gpus_do_so_while_no_trainer_is_there(
    on_gpus: bool, first: list[str]
) -> None:
    events: list[str] = []

    def noted(what: str) -> Any:
        async def note() -> None:
            events.append(what)

        return note

    trainers: Any = SimpleNamespace(kill=noted("trainers end"))
    generators: Any = SimpleNamespace(settled=noted("replicas are up"))
    meshes = bring_up.Meshes(trainers, generators, colocated=True, on_gpus=on_gpus)
    asyncio.run(meshes.leave_gpus_to_trainers())
    assert events == first
