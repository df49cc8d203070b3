"""Cached meshes of a destroyed process group, with the installed torch and with docs/upstream/dtensor-dead-meshes."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from support.overlays import overlay

ROOT = Path(__file__).resolve().parents[3]
TWO_GROUPS = """
import torch, torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate
from torch.testing._internal.distributed.fake_pg import FakeStore
from titan_rl.actors.titan import private

for rank in range(2):
    dist.init_process_group("fake", rank=rank, world_size=2, store=FakeStore())
    mesh = init_device_mesh("cpu", (2,))
    result = DTensor.from_local(torch.ones(2), mesh, [Replicate()]).clone()
    assert result.device_mesh is mesh
    dist.destroy_process_group()
    print(private.forget_shardings())
"""


@pytest.mark.parametrize("patched", [False, True])
def test_shardings_of_a_destroyed_group_are_forgotten(patched: bool, tmp_path: Path) -> None:
    env = {**os.environ, **(overlay("dtensor-dead-meshes", tmp_path) if patched else {})}
    command = [sys.executable, "-c", TWO_GROUPS]
    done = subprocess.run(command, env=env, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == [str(not patched)] * 2
