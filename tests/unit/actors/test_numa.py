"""Ranks stay on the cores of their GPU's node: a tree as Linux has it under /sys, and a driver compiled here."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from titan_rl.actors import numa

DRIVER = r"""
#include <stdio.h>
int cuInit(unsigned flags) { return 0; }
int cuDeviceGet(int *device, int index) { *device = index; return index < 2 ? 0 : 101; }
int cuDeviceGetPCIBusId(char *text, int size, int device) { return snprintf(text, size, "0000:%dB:00.0", device) < 0; }
"""
MOVED = """
import os, sys, threading
from pathlib import Path
from titan_rl.actors import numa
stop, before = threading.Event(), os.sched_getaffinity(0)
first = threading.Thread(target=stop.wait)
first.start()
index, tree = int(sys.argv[1]), Path(sys.argv[2])
cores = numa.stay_near_gpu(index, tree)
later = threading.Thread(target=stop.wait)
later.start()
threads = [frozenset(os.sched_getaffinity(int(task.name))) for task in Path("/proc/self/task").iterdir()]
stop.set()
print(sorted(cores), sorted(map(sorted, set(threads))), sorted(before))
"""


def tree(folder: Path, nodes: dict[str, str], lists: dict[int, str]) -> Path:
    """Write the node of each PCI device, and the cores of each node."""
    for address, node in nodes.items():
        (folder / "bus/pci/devices" / address).mkdir(parents=True)
        (folder / "bus/pci/devices" / address / "numa_node").write_text(f"{node}\n")
    for node, cores in lists.items():
        (folder / f"devices/system/node/node{node}").mkdir(parents=True)
        (folder / f"devices/system/node/node{node}/cpulist").write_text(f"{cores}\n")
    return folder


def test_a_device_is_near_its_nodes_cores(tmp_path: Path) -> None:
    nodes = {"0000:0b:00.0": "1", "0000:1b:00.0": "-1", "0000:2b:00.0": "7", "0000:3b:00.0": "2"}
    system = tree(tmp_path, nodes, {0: "0-3", 1: "4-5,12,14-15", 2: ""})
    assert numa.cores_near("0000:0b:00.0", system) == {4, 5, 12, 14, 15}
    for unknown in ("0000:1b:00.0", "0000:2b:00.0", "0000:3b:00.0", "0000:4b:00.0", ""):
        assert numa.cores_near(unknown, system) == set()


@pytest.fixture(scope="module")
def driver(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("driver")
    (folder / "cuda.c").write_text(DRIVER)
    compiler = shutil.which("cc") or shutil.which("gcc")
    assert compiler, "torch.compile needs one too"
    subprocess.run([compiler, "-shared", "-fPIC", "-o", folder / "libcuda.so.1", folder / "cuda.c"], check=True)
    return folder


@pytest.mark.parametrize(("index", "moves"), [(0, True), (1, False), (2, False)], ids=["near", "elsewhere", "no GPU"])
def test_all_threads_of_a_rank_move(index: int, moves: bool, driver: Path, tmp_path: Path) -> None:
    own, *others = sorted(os.sched_getaffinity(0))
    assert others, "expected two cores"
    nodes = {"0000:0b:00.0": "0", "0000:1b:00.0": "1"}
    system = tree(tmp_path, nodes, {0: f"{own},100000", 1: "100001-100002"})
    environment = os.environ | {"LD_LIBRARY_PATH": str(driver)}
    command = [sys.executable, "-c", MOVED, str(index), str(system)]
    child = subprocess.run(command, env=environment, check=True, capture_output=True, text=True)
    expected = [own] if moves else [own, *others]
    assert child.stdout.split(maxsplit=1) == f"{[own] if moves else []} {[expected]} {[own, *others]}\n".split(
        maxsplit=1
    )


def test_without_a_driver_nothing_moves(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> None:
        raise OSError(f"{name}: cannot open shared object file")

    monkeypatch.setattr(numa.ctypes, "CDLL", missing)
    assert numa.pci_address(0) == ""
    before = os.sched_getaffinity(0)
    assert numa.stay_near_gpu(0) == set()
    assert os.sched_getaffinity(0) == before
