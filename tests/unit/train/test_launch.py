"""Which GPU each rank gets, and the end of a run."""

import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import pytest

from titan_rl.config.toml import find, load, shipped
from titan_rl.meshes.spawn import process_group
from titan_rl.train import launch
from titan_rl.wire import gpus

# In a process of its own: the end of a run is the end of Monarch and of all ranks in the controller's process.
PROGRAM = """
import asyncio, os, subprocess, sys, time
from pathlib import Path
from titan_rl.meshes import deaths
from titan_rl.train.launch import shutdown

stubborn = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('up', flush=True); time.sleep(60)"
names = ["role[dp=0 tp=0]", "role[dp=1 tp=0]"]
shim = [sys.executable, "-I", "-S", str(Path(deaths.__file__).with_name("zygote_shim.py"))]
ranks = [
    subprocess.Popen(
        [*shim, sys.executable, "-c", stubborn],
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


def test_ranks_that_ignore_every_request_do_not_delay_the_end() -> None:
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=60)
    assert done.stdout.split() == ["True", "-9", "-9"], done.stderr


@pytest.mark.parametrize("config", shipped())
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
    meshes = [(0, run.parallelism.world_size)]
    if run.placement.kind == "colocated":
        meshes.clear()  # trainers and generators share
    if run.samples_rollouts:
        tp = run.generator.tensor_parallel_degree
        meshes += [(launch._first_gpu(setup, replica), tp) for replica in range(run.generator.replicas)]
    first = max(first + count for first, count in meshes)
    for role in run.roles.values():
        meshes.append((first, role.parallelism.world_size))
        first += role.parallelism.world_size
    dealt = []
    for first, count in meshes:
        seen = launch._resources(setup, first=first, count=count)["CUDA_VISIBLE_DEVICES"].split(",")
        dealt += [seen[int(rank["LOCAL_RANK"])] for rank in process_group(count)]
    assert len(dealt) == len(set(dealt)) == sum(count for _, count in meshes)
    assert set(dealt) <= set(given.split(",") if given else map(str, range(12)))


def test_a_rank_that_was_planned_for_a_gpu_does_not_train_without_one(monkeypatch: pytest.MonkeyPatch) -> None:
    setup: Any = SimpleNamespace(config=load(find("grpo_llama")), device="cuda")
    for name, value in launch._resources(setup, first=0, count=1).items():
        monkeypatch.setenv(name, value)
    with pytest.raises(RuntimeError, match="planned for CUDA, found none that torch can use"):
        gpus.require_planned_device(cuda_is_available=False)
    gpus.require_planned_device(cuda_is_available=True)
    setup.device = "cpu"
    monkeypatch.setenv(gpus.PLANNED, launch._resources(setup, first=0, count=1)[gpus.PLANNED])
    gpus.require_planned_device(cuda_is_available=False)


def test_cuda_ranks_are_launched_with_what_exact_and_deterministic_products_need() -> None:
    run = load(find("grpo_llama"), [("debug.deterministic", "true"), ("generator.dtype", "float32")])
    setup: Any = SimpleNamespace(config=run, device="cuda")
    needed = {"TRITON_F32_DEFAULT": "ieee", "CUBLAS_WORKSPACE_CONFIG": ":4096:8"}
    assert needed.items() <= launch._resources(setup, first=0, count=1).items()
    assert not needed.keys() & launch._resources(SimpleNamespace(config=run, device="cpu"), first=0, count=1).keys()  # type: ignore[arg-type]
    fast = load(find("grpo_llama"), [("generator.dtype", "bfloat16")])
    assert launch.cuda_environment(fast) == {}
