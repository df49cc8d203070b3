"""Gathers facts about this machine and this process: reads /proc and /sys, tries sockets, asks nvidia-smi.

A probe returns "" if it worked, else the reason. Nothing here judges: verdicts.py does. Only the environment variables
in VARIABLES are read, so that a report holds no secrets.
"""

import ctypes
import os
import platform
import re
import resource
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from titan_rl import __version__, isolation
from titan_rl.environment import cache_home
from titan_rl.record.provenance import CHECKOUT, git_commit, machine
from titan_rl.tools.doctor import one_rank
from titan_rl.tools.doctor.installed import Packages, gather_packages
from titan_rl.wire.gpus import driver, visible_gpus

VARIABLES = ("ATEN_CPU_CAPABILITY", "ONEDNN_MAX_CPU_ISA", "OMP_NUM_THREADS", "CUDA_VISIBLE_DEVICES")
ISA = ("amx_", "avx512", "avx2")  # best first; a prefix of cpuinfo's flags
PROBE = """
import ctypes, os, sys
fd, secret = os.memfd_create("titan_rl doctor"), ctypes.create_string_buffer(b"titan_rl")
print(fd, ctypes.addressof(secret), flush=True)
sys.stdin.read()
"""


@dataclass(frozen=True, slots=True)
class Cpu:
    model: str
    architecture: str
    cores: int
    usable: int  # in this process's affinity
    quota: float | None  # cores that the cgroup allows
    flags: tuple[str, ...]  # in cpuinfo, about AVX and AMX

    @property
    def capability(self) -> str:
        return next((isa.strip("_") for isa in ISA for flag in self.flags if flag.startswith(isa)), "default")


@dataclass(frozen=True, slots=True)
class MemoryFacts:
    total: int  # bytes, as all sizes
    available: int
    limit: int | None  # the cgroup's
    used: int  # by the cgroup, without file caches
    shm: "Disk"

    @property
    def free(self) -> int:
        return self.available if self.limit is None else min(self.available, self.limit - self.used)


@dataclass(frozen=True, slots=True)
class Disk:
    path: str
    free: int
    total: int
    error: str = ""  # why it cannot be written


@dataclass(frozen=True, slots=True)
class ProcessLimits:
    """None: unlimited."""

    files: int | None
    processes: int | None  # threads too, of all of the user's processes
    pids: int | None  # the same, of the cgroup
    locked_memory: int | None


@dataclass(frozen=True, slots=True)
class Sockets:
    loopback: str
    ports: str  # the range that the kernel chooses from
    unix: str
    abstract: str
    tmpdir: str


@dataclass(frozen=True, slots=True)
class Kernel:
    version: str
    proc_fd: str  # opening another own process's memory file through /proc, as the weight sync does
    read_memory: str  # process_vm_readv of another own process, as py-spy does
    pidfd: str
    ptrace_scope: int | None  # None: no Yama
    isolation: str  # a network namespace that other users cannot enter


@dataclass(frozen=True, slots=True)
class GpuFacts:
    visible: int
    names: tuple[str, ...]
    driver: str
    cuda: str  # the newest CUDA that the driver runs


@dataclass(frozen=True, slots=True)
class MachineFacts:
    identity: dict[str, str]  # which titan_rl, which Python
    environment: dict[str, str]  # the VARIABLES that are set
    packages: Packages
    cpu: Cpu
    memory: MemoryFacts
    limits: ProcessLimits
    sockets: Sockets
    kernel: Kernel
    rank: str  # one started as a run starts it; "" also without Monarch
    gpu: GpuFacts
    network: dict[str, tuple[str, ...]]
    disks: dict[str, Disk]


def gather_facts() -> MachineFacts:
    host = machine()
    read_memory, proc_fd = probe_child()
    packages = gather_packages()
    outputs, cache = Path.cwd() / "outputs", cache_home()
    return MachineFacts(
        identity={
            "titan_rl": __version__,
            "commit": git_commit(),
            "folder": str(CHECKOUT),
            "python": platform.python_version(),
            "executable": sys.executable,
            "prefix": sys.prefix,
        },
        environment={name: os.environ[name] for name in VARIABLES if name in os.environ},
        packages=packages,
        cpu=gather_cpu(host),
        memory=gather_memory(),
        limits=gather_limits(),
        sockets=gather_sockets(),
        kernel=Kernel(
            version=platform.release(),
            proc_fd=proc_fd,
            read_memory=read_memory,
            pidfd=attempt(lambda: os.close(os.pidfd_open(os.getpid()))),
            ptrace_scope=number("/proc/sys/kernel/yama/ptrace_scope"),
            isolation=isolation.refusal(),
        ),
        rank=one_rank.reason() if "torchmonarch" in packages.found else "",
        gpu=GpuFacts(visible_gpus(), tuple(host["gpus"]), *driver()),
        network={"interfaces": entries("/sys/class/net"), "rdma": entries("/sys/class/infiniband")},
        disks={
            "outputs": disk(outputs),
            "packages": disk(Path(sys.prefix)),
            "cache": disk(cache),
            "temporary": disk(temporary_folder()),
        },
    )


def attempt(probe: Callable[[], object]) -> str:
    """Return "" if `probe` works, else the error that it raised."""
    try:
        probe()
    except Exception as error:  # the report names any error
        return f"{type(error).__name__}: {error}"
    return ""


def gather_cpu(host: dict[str, Any]) -> Cpu:
    flags = re.search(r"^(?:flags|Features)\s*: (.+)$", text_of("/proc/cpuinfo"), re.MULTILINE)
    named = tuple(sorted({flag for flag in flags[1].split() if flag.startswith(("avx", "amx"))})) if flags else ()
    usable = len(os.sched_getaffinity(0))
    return Cpu(host["cpu"], platform.machine(), host["cores"] or usable, usable, cpu_quota(), named)


def cgroup_file(controller: str, v1: str, v2: str) -> str:
    """Return the text of this process's cgroup file, of version 2 or 1, or of the mount's root in a container."""
    groups = [line.split(":", 2) for line in text_of("/proc/self/cgroup").splitlines()]
    own = {name: group[2].lstrip("/") for group in groups if len(group) == 3 for name in group[1].split(",")}
    mount = Path("/sys/fs/cgroup")
    for folder, group, name in ((mount / controller, own.get(controller, ""), v1), (mount, own.get("", ""), v2)):
        for path in (folder / group / name, folder / name):
            text = text_of(path).strip()
            if text:
                return text
    return ""


def cpu_quota() -> float | None:
    quota, period = cgroup_file("cpu", "cpu.cfs_quota_us", "cpu.max").split(), 1e5
    if len(quota) == 2:
        period = float(quota[1])
    elif quota:
        period = float(cgroup_file("cpu", "cpu.cfs_period_us", "cpu.max") or period)
    return float(quota[0]) / period if quota and quota[0].isdecimal() else None


def gather_memory() -> MemoryFacts:
    meminfo = {name: 1024 * int(kb) for name, kb in re.findall(r"^(\w+):\s+(\d+) kB", text_of("/proc/meminfo"), re.M)}
    total = meminfo.get("MemTotal", 0)
    limit = cgroup_file("memory", "memory.limit_in_bytes", "memory.max")
    used = cgroup_file("memory", "memory.usage_in_bytes", "memory.current")
    stat = cgroup_file("memory", "memory.stat", "memory.stat")
    cached = re.findall(r"^(?:total_)?inactive_file (\d+)$", stat, re.MULTILINE)  # given back when memory is short
    bound = int(limit) if limit.isdecimal() and int(limit) < total else None  # version 1 writes 2**63 for none
    busy = max(0, int(used or 0) - int(cached[-1] if cached else 0))
    return MemoryFacts(total, meminfo.get("MemAvailable", total), bound, busy, disk(Path("/dev/shm")))


def gather_limits() -> ProcessLimits:
    def soft(kind: int) -> int | None:
        return None if (limit := resource.getrlimit(kind)[0]) == resource.RLIM_INFINITY else limit

    pids = cgroup_file("pids", "pids.max", "pids.max")
    return ProcessLimits(
        files=soft(resource.RLIMIT_NOFILE),
        processes=soft(resource.RLIMIT_NPROC),
        pids=int(pids) if pids.isdecimal() else None,
        locked_memory=soft(resource.RLIMIT_MEMLOCK),
    )


def gather_sockets() -> Sockets:
    def listen(family: socket.AddressFamily, address: Any) -> str:
        def try_it() -> None:
            with socket.socket(family) as listener, socket.socket(family) as caller:
                listener.bind(address)
                listener.listen()
                caller.settimeout(5)
                caller.connect(listener.getsockname())

        return attempt(try_it)

    def listen_in_a_folder() -> None:
        with tempfile.TemporaryDirectory(prefix="titan_rl-doctor-", dir=temporary_folder()) as folder:
            at = os.open(folder, os.O_PATH | os.O_DIRECTORY)  # its path may be too long, which is another problem
            try:
                error = listen(socket.AF_UNIX, f"/proc/self/fd/{at}/socket")
                if error:
                    raise OSError(error)
            finally:
                os.close(at)

    return Sockets(
        loopback=listen(socket.AF_INET, ("127.0.0.1", 0)),
        ports="-".join(text_of("/proc/sys/net/ipv4/ip_local_port_range").split()),
        unix=attempt(listen_in_a_folder),
        abstract=listen(socket.AF_UNIX, f"\0titan_rl-doctor-{os.getpid()}"),
        tmpdir=str(temporary_folder()),
    )


def temporary_folder() -> Path:
    """Return the folder that a run makes its sockets in. tempfile takes another one than TMPDIR if it cannot write."""
    try:
        return Path(tempfile.gettempdir())
    except FileNotFoundError:  # none of the candidates can be written
        return Path(os.environ.get("TMPDIR", "/tmp"))


def probe_child() -> tuple[str, str]:
    """Read the memory of a child, and open its memory file; return what went wrong with each."""
    try:
        child = subprocess.Popen(
            [sys.executable, "-ISc", PROBE], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
    except OSError as error:
        return f"no child process: {error}", f"no child process: {error}"
    with child:
        assert child.stdin
        assert child.stdout
        fd, address = [*child.stdout.readline().split(), "", ""][:2]
        errors = (
            attempt(lambda: read_memory(child.pid, int(address))),
            attempt(lambda: os.close(os.open(f"/proc/{child.pid}/fd/{int(fd)}", os.O_RDWR))),
        )
        child.stdin.close()
    return errors


def read_memory(pid: int, address: int) -> None:
    """Read 8 bytes at `address` of another process."""

    class Span(ctypes.Structure):
        _fields_ = (("start", ctypes.c_void_p), ("size", ctypes.c_size_t))

    here = ctypes.create_string_buffer(8)
    mine, theirs = Span(ctypes.addressof(here), 8), Span(address, 8)
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.process_vm_readv(pid, ctypes.byref(mine), 1, ctypes.byref(theirs), 1, 0) != 8:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))


def disk(path: Path) -> Disk:
    """Return the space at `path`, and whether it, or its nearest existing parent, can be written."""
    there = next((folder for folder in (path, *path.parents) if folder.exists()), Path("/"))
    try:
        usage = shutil.disk_usage(there)
    except OSError as error:
        return Disk(str(path), 0, 0, str(error))

    def try_to_write() -> None:
        with tempfile.TemporaryFile(dir=there) as file:
            file.write(b"titan_rl")

    return Disk(str(path), usage.free, usage.total, attempt(try_to_write))


def entries(folder: str) -> tuple[str, ...]:
    with suppress(OSError):
        return tuple(sorted(os.listdir(folder)))
    return ()


def number(path: str) -> int | None:
    text = text_of(path).strip()
    return int(text) if text.lstrip("-").isdecimal() else None


def text_of(path: str | Path) -> str:
    """Return the text of a file of the kernel, "" if there is none or it is private."""
    with suppress(OSError):
        return Path(path).read_text(encoding="utf-8", errors="replace")
    return ""
