"""A machine that lacks a layer is refused, with the layer's name and what allows it."""

import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from titan_rl.config.sections import SandboxSection
from titan_rl.ext.sandbox import fork_server, seccomp
from titan_rl.ext.sandbox.cgroup import OwnCgroup, problems
from titan_rl.ext.sandbox.execution import ExecutionLimits
from titan_rl.ext.sandbox.local import LocalSandbox
from titan_rl.wire.errors import SandboxRefused

NO_NAMESPACES = """
import os
from titan_rl.ext.sandbox.fork_server import separate
separate(os.open("/proc", os.O_PATH), flags=0)  # into a user namespace of user 1000, in which there may be no other
open("/proc/sys/user/max_user_namespaces", "w").write("0")
"""
NO_LANDLOCK = """
import struct
from titan_rl.ext.sandbox import seccomp
refuse = (seccomp.EQUAL, 0, 1, 444), (seccomp.RETURN, 0, 0, seccomp.FAIL | 38)
calls = (seccomp.LOAD, 0, 0, 0), *refuse, (seccomp.RETURN, 0, 0, seccomp.ALLOW)
seccomp.instructions = lambda **_: [struct.pack("HBBI", *each) for each in calls]
seccomp.restrict()
"""
TRY = """
from titan_rl.config.sections import SandboxSection
from titan_rl.wire.errors import SandboxRefused
from titan_rl.ext.sandbox.local import LocalSandbox, missing
print(missing(SandboxSection()))
try:
    LocalSandbox().run_here("print('it ran')")
except SandboxRefused:
    print("refused")
print(LocalSandbox(SandboxSection(require={weaker})).run_here("print('weaker')").stdout)
"""


def on_machine(without: str, weaker: list[str]) -> str:
    """Return what a process prints that lacks a layer, as on another machine."""
    program = textwrap.dedent(without) + TRY.format(weaker=weaker)
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_a_machine_without_namespaces_is_refused_with_the_command() -> None:
    said = on_machine(NO_NAMESPACES, ["landlock", "seccomp"])
    assert said.startswith("['namespaces: [Errno 28] unshare: No space left on device; ")
    assert "/proc/sys/user/max_user_namespaces is 0: sysctl -w user.max_user_namespaces=15000" in said
    assert "refused" in said
    assert "it ran" not in said
    assert "weaker" in said  # as configured


def test_a_machine_without_landlock_is_refused() -> None:
    said = on_machine(NO_LANDLOCK, ["namespaces", "seccomp"])
    assert "landlock: expected ABI 1 or newer (Linux 5.13 with lsm=landlock), found none" in said
    assert "leave it out of sandbox.require" in said
    assert "refused" in said
    assert "it ran" not in said
    assert "weaker" in said


def test_a_machine_without_seccomp_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(seccomp, "AUDIT", {})
    (said,) = fork_server.lacking(frozenset({"seccomp", "namespaces"}))
    assert said == "seccomp: expected a kernel with seccomp filters on x86_64 or aarch64, found none"


def test_a_sandbox_without_its_two_walls_is_never_made() -> None:
    for require in (["namespaces", "landlock"], ["seccomp"], []):
        with pytest.raises(SandboxRefused, match=r"^sandbox\.require: expected"):
            LocalSandbox(SandboxSection(require=require))


@pytest.mark.parametrize("machine", ["x86_64", "aarch64"])
def test_the_filter_of_each_machine_fits_the_kernel(machine: str) -> None:
    program = seccomp.instructions(machine)
    assert 150 < len(program) < len(seccomp.instructions(machine, alone=True)) < 4096
    assert len(set(map(len, program))) == 1


def test_a_cgroup_bounds_memory_and_processes(tmp_path: Path) -> None:
    (tmp_path / "cgroup.subtree_control").write_text("cpu")
    assert list(problems(str(tmp_path))) == [
        "sandbox.cgroup: expected memory and pids to be enabled for its children: "
        f"echo +memory +pids > {tmp_path}/cgroup.subtree_control"
    ]
    (tmp_path / "cgroup.subtree_control").write_text("cpu memory pids")
    cgroup = OwnCgroup(str(tmp_path))
    (own,) = (each for each in tmp_path.iterdir() if each.is_dir())
    cgroup.take(4321)
    cgroup.limit(ExecutionLimits(memory_mb=100, disk_mb=36, processes=8))
    written = {each.name: each.read_text() for each in own.iterdir()}
    assert written == {
        "cgroup.procs": "4321",
        "memory.max": str(200 << 20),
        "memory.swap.max": "0",
        "pids.max": "12",
    }
    (own / "memory.events").write_text("low 0\noom 1\noom_kill 1\n")
    assert [cgroup.overflowed(), cgroup.overflowed()] == [True, False]
