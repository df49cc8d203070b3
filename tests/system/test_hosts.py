"""The same run on one host and on several: workers on this machine that stand for hosts."""

from pathlib import Path
from typing import Any

import psutil
import pytest

from support.outputs import losses, sampled
from support.running import Run, Runs

KEYS: dict[str, Any] = {
    "cold_start__steps": 3,
    "training__steps": 3,
    "generator__replicas": 2,
    "hosts__threads": 0,  # they follow from the cores
}
THREE = {"hosts__count": 3, "placement__hosts": '{trainer = "0-1", generator = "1-2"}'}


@pytest.fixture(scope="module")
def local(tmp_path_factory: pytest.TempPathFactory) -> Run:
    return Runs().finish(tmp_path_factory.mktemp("local") / "run", **KEYS)


def same(run: Run, other: Run) -> bool:
    kinds = ("cold_start", "rl")
    return all(losses(run, kind) == losses(other, kind) for kind in kinds) and sampled(run) == sampled(other)


def worker_of(pid: int) -> str:
    """Return the host of a rank: its shim's parent is the worker."""
    for parent in psutil.Process(pid).parents():
        if "titan_rl.worker" in (command := parent.cmdline()):
            return Path(command[command.index("--address") + 1]).parent.name
    return ""


def test_three_processes_as_hosts_change_no_bit(runs: Runs, local: Run, tmp_path: Path) -> None:
    keys = {**KEYS, "hosts__kind": "processes", **THREE}
    run = runs.finish(tmp_path / "run", **keys)
    assert same(run, local)
    assert {path.name for path in (run.folder / "hosts").iterdir()} == {"host0.log", "host1.log", "host2.log"}


def test_ranks_are_where_the_plan_says_and_end_with_the_controller(runs: Runs, tmp_path: Path) -> None:
    run = runs.start(tmp_path / "run", **{**KEYS, "training__steps": 1000, "hosts__kind": "processes", **THREE})
    run.wait_for_step(1)
    mine = psutil.Process(run.process.pid).children(recursive=True)
    shims = {process.environ()["TITAN_RL_SHIM"].split(" ", 1)[1]: process.pid for process in mine if is_shim(process)}
    assert {name: worker_of(pid) for name, pid in shims.items()} == {
        "trainer[dp=0 tp=0]": "h0",
        "trainer[dp=1 tp=0]": "h1",
        "generator0[tp=0]": "h1",
        "generator1[tp=0]": "h2",
    }
    run.process.kill()
    run.finish()
    _, left = psutil.wait_procs(mine, timeout=60)
    assert not left


def is_shim(process: psutil.Process) -> bool:
    return "zygote_shim.py" in " ".join(process.cmdline())
