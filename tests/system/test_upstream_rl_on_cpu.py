"""TorchTitan on a CPU, as installed and with docs/upstream/rl-on-cpu: what titan_cpu replaces, and when."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from support.overlays import overlay
from titan_rl.actors.titan import titan_cpu

ROOT = Path(__file__).parents[2]
CHANGED = ("torchtitan/tools/utils.py", "torchtitan/distributed/fsdp.py")  # the release lacks the rest: RL moved since
pytestmark = pytest.mark.skipif(not titan_cpu.ON_CPU, reason="with CUDA, neither changes anything")

DEVICE = """
import torchtitan.distributed.utils as copied
from titan_rl.actors.titan.titan_cpu import use_cpu
found = copied.device_type
copied.device_type = "as it was"
use_cpu()
print(found, copied.device_type, sep=", ")
"""

SUMS = """
import os, sys
import torch, torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torchtitan.distributed.fsdp import disable_fsdp_gradient_division

child = os.fork()
rank = int(not child)
dist.init_process_group("gloo", init_method=f"file://{sys.argv[1]}/meeting", rank=rank, world_size=2)
model = torch.nn.Linear(2, 2, bias=False)
fully_shard(model, mesh=init_device_mesh("cpu", (2,)))
disable_fsdp_gradient_division(model)
try:
    model(torch.full((1, 2), 1.0 + rank)).sum().backward()
    answer = model.weight.grad.full_tensor().tolist()
except RuntimeError as error:
    answer = error
if child:
    os.waitpid(child, 0)
    print(answer)
sys.stdout.flush()
os._exit(0)
"""


def printed(program: str, environment: dict[str, str], *arguments: str) -> str:
    command = [sys.executable, "-c", program, *arguments]
    env = {**os.environ, "OMP_NUM_THREADS": "1", **environment}
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=env, timeout=300)
    assert not done.returncode, done.stderr
    return done.stdout.strip()


def test_the_device_type_is_replaced_where_it_is_not_the_cpu(tmp_path: Path) -> None:
    assert printed(DEVICE, {}) == "cuda, cpu"
    assert printed(DEVICE, overlay("rl-on-cpu", tmp_path, CHANGED)) == "cpu, as it was"


def test_torchtitan_sums_gradients_of_gloo_ranks_only_with_the_change(tmp_path: Path) -> None:
    """When the first of these fails, adapt_fsdp no longer needs to ask for sums."""
    for name in ("installed", "patched"):
        (tmp_path / name).mkdir()
    assert "PREMUL_SUM" in printed(SUMS, {}, str(tmp_path / "installed"))
    patched = overlay("rl-on-cpu", tmp_path / "patched", CHANGED)
    assert printed(SUMS, patched, str(tmp_path / "patched")) == "[[3.0, 3.0], [3.0, 3.0]]"
