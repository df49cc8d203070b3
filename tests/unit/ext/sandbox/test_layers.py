"""Each layer alone stops its attacks, and without any layer the same attacks succeed."""

import os
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from support.attacks import ATTACKS, BOMBS, Target, target
from titan_rl.config.sections import SandboxSection
from titan_rl.ext.sandbox import landlock
from titan_rl.ext.sandbox.execution import Execution, ExecutionLimits
from titan_rl.ext.sandbox.fork_server import UNUSED_USERS
from titan_rl.ext.sandbox.requirements import ALWAYS, LAYERS
from titan_rl.ext.sandbox.running import ForkServer

LIMITS = ExecutionLimits(cpu_seconds=2, wall_seconds=30, memory_mb=256, processes=12, file_mb=8, disk_mb=16)
OUTSIDE = "os.kill(os.getsid(0), 0); escaped()"  # the process that forked process 1 has the same user
DAEMON = """
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0: os.execvp('sleep', ['sleep', '98765.5'])
    os._exit(0)
os.wait()"""
MANY_FILES = """
for i in range(40): open(f'f{i}', 'wb').write(b'x' * (1 << 20))
escaped()"""
MANY = "for _ in range(150):\n  if os.fork() == 0: time.sleep(20); os._exit(0)\nescaped()"
LARGE = """
libc.malloc.restype = ctypes.c_void_p
if libc.malloc(ctypes.c_size_t(1 << 30)): escaped()"""  # none of it is touched, so nothing but the limit sees it
METADATA = """
for change in (lambda: os.chmod('.', 0o777), lambda: os.utime('.'), lambda: os.setxattr('.', 'user.x', b'1')):
    try: change(); escaped()
    except OSError: pass"""
LIMITS_OF_OTHERS = """
import resource
resource.prlimit(os.getsid(0), resource.RLIMIT_NOFILE, (99, 99)); escaped()"""
CORES_OF_OTHERS = "os.sched_setaffinity(os.getsid(0), os.sched_getaffinity(0)); escaped()"
PRIORITY_OF_OTHERS = "os.setpriority(os.PRIO_PROCESS, os.getsid(0), 5); escaped()"
HOLDS = {
    "namespaces": {
        **{name: ATTACKS[name] for name in ("read the run's file", "read through a symbolic link", "TCP", "UDP")},
        **{name: ATTACKS[name] for name in ("abstract Unix socket", "Unix socket with a path")},
        **{name: ATTACKS[name] for name in ("see other processes", "list home folders")},
        "fill the disk": MANY_FILES,
    },
    "landlock": {
        **{name: ATTACKS[name] for name in ("read the run's file", "read through a symbolic link", "TCP")},
        **{name: ATTACKS[name] for name in ("abstract Unix socket", "see other processes", "list home folders")},
        "signal a process outside": OUTSIDE,
    },
    "seccomp": {
        "permissions, times and attributes of files": METADATA,
        "limits of other processes": LIMITS_OF_OTHERS,
        "cores of other processes": CORES_OF_OTHERS,
        "priority of other processes": PRIORITY_OF_OTHERS,
    }
    | {
        name: ATTACKS[name]
        for name in (
            *("TCP", "UDP", "listen", "abstract Unix socket", "Unix socket with a path", "new user namespace"),
            *("clone into a user namespace", "clone3 into a user namespace", "datagram of a socket pair", "keyring"),
            *("shared memory that stays", "memory without a limit"),
        )
    },
    "rlimits": {"many processes": MANY, "much memory": LARGE, "a large file": BOMBS["a large file"][0]},
}
CASES = [(layer, name) for layer, attacks in HOLDS.items() for name in attacks]


@pytest.fixture(scope="module")
def aim(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Target]:
    with target(tmp_path_factory.mktemp("aim")) as found:
        yield found


class Servers:
    """A fork server for each set of layers."""

    def __init__(self) -> None:
        self._started: dict[tuple[str, ...], ForkServer] = {}

    def run(self, layers: tuple[str, ...], code: str, limits: ExecutionLimits = LIMITS) -> Execution:
        if layers not in self._started:
            self._started[layers] = ForkServer(SandboxSection(), layers)
        return self._started[layers].execute("python", code, "", limits)

    def close(self) -> None:
        for each in self._started.values():
            each.end()


@pytest.fixture(scope="module")
def servers() -> Iterator[Servers]:
    servers = Servers()
    yield servers
    servers.close()


def test_this_kernel_has_every_layer() -> None:
    """Without them the other tests cannot say anything: use a kernel with Landlock's ABI 6 (Linux 6.12), and allow
    unprivileged user namespaces."""
    assert landlock.version() >= 6
    ForkServer(SandboxSection(), [*LAYERS, *ALWAYS]).end()


@pytest.mark.root
def test_a_server_becomes_a_user_without_processes() -> None:
    *taken, free = UNUSED_USERS
    sleeping = [subprocess.Popen(["sleep", "60"], user=user) for user in taken]
    try:
        server = ForkServer(SandboxSection(), [*LAYERS, *ALWAYS])
        assert Path(f"/proc/{server._process.pid}").stat().st_uid == free
        server.end()
    finally:
        for process in sleeping:
            process.kill()
            process.wait()


@pytest.mark.parametrize(("layer", "name"), CASES)
def test_a_layer_alone_contains_an_attack_that_succeeds_without_it(
    layer: str, name: str, aim: Target, servers: Servers
) -> None:
    attack = aim.fill(HOLDS[layer][name])
    found = servers.run((layer,), attack)
    assert found.status in ("ok", "error", "killed", "memory"), found
    assert "ESCAPED" not in found.stdout, found
    assert not aim.harmed()
    escaped = servers.run((), attack)
    assert [aim.harmed(), "ESCAPED" in escaped.stdout] != ["", False], escaped


@pytest.mark.parametrize("name", ATTACKS)
def test_without_namespaces_the_other_layers_hold(name: str, aim: Target, servers: Servers) -> None:
    found = servers.run(("landlock", "seccomp", *ALWAYS), aim.fill(ATTACKS[name]))
    assert found.status in ("ok", "error", "killed"), found
    assert "ESCAPED" not in found.stdout, found
    assert not aim.harmed()


@pytest.mark.parametrize("layers", [(*LAYERS, *ALWAYS), ("landlock", "seccomp", *ALWAYS)], ids=["all", "weaker"])
def test_no_process_outlives_its_execution(layers: tuple[str, ...], aim: Target, servers: Servers) -> None:
    assert servers.run(layers, aim.fill(DAEMON)).status == "ok"
    assert not processes("sleep\x0098765.5")
    bomb = ExecutionLimits(cpu_seconds=2, wall_seconds=1.0, memory_mb=256, processes=12)
    assert servers.run(layers, aim.fill(BOMBS["fork bomb"][0]), bomb).status == "timeout"
    assert servers.run(layers, "print(1)").stdout == "1\n"


def test_memory_that_files_share_is_no_escape_from_the_watcher(aim: Target, servers: Servers) -> None:
    began = time.monotonic()
    found = servers.run((*LAYERS, *ALWAYS), aim.fill(BOMBS["memory bomb of many processes"][0]))
    assert found.status == "memory", found
    assert time.monotonic() - began < 20


def processes(words: str) -> list[str]:
    found = []
    for pid in filter(str.isdigit, os.listdir("/proc")):
        try:
            line = Path(f"/proc/{pid}/cmdline").read_text()
        except OSError:
            continue
        found += [pid] if words in line else []
    return found
