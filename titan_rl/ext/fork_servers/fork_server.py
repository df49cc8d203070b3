"""The program of a fork server: it imports an engine, and then forks ranks, which start in a fraction of a second.

    python -P fork_server.py KIND LISTENER PARENT     KIND: a key of PRELOAD; LISTENER: an open socket

    controller ── Monarch ──> rank launcher (forking_rank_launcher.py)
                                │ socket: Request       back: "pid N" and "end STATUS", or "cold REASON"
                              fork server of the kind ── fork ──> rank: Monarch's ordinary bootstrap

Forking is safe while a process has one thread and has not touched CUDA: both are checked before each fork. So a fork
server never imports Monarch, whose library starts threads. It imports nothing of titan_rl either: ranks import that
themselves, so they run the current code. It reports the ends of its ranks to their launchers, and kills a rank whose
launcher is gone. The kernel kills it with PARENT, and its ranks with it.

In /proc, a forked rank has the command and environment of its fork server. To find the ranks of a run, ask the run
(`titan_rl.tools.ctl RUN status`) or look at its launchers: each holds a pidfd of its rank.
"""

import atexit
import ctypes
import gc
import importlib
import os
import random
import runpy
import select
import signal
import socket
import struct
import sys
import tempfile
import traceback
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import NamedTuple, NoReturn

PRELOAD = {
    "model": """
        numpy torch torch.distributed.fsdp torch.distributed.tensor torch.distributed.checkpoint.hf_storage
        torch._subclasses.schema_check_mode safetensors.torch xxhash torchtitan.models.qwen3.sharding
        torchtitan.components.checkpoint torchtitan.components.optimizer.utils
        torchtitan.distributed.activation_checkpoint torchtitan.tools.profiler
        """,
    "generator": """
        numpy torch torch._subclasses.schema_check_mode xxhash
        vllm vllm.engine.arg_utils vllm.engine.llm_engine vllm.v1.engine.llm_engine vllm.v1.worker.cpu_worker
        vllm.v1.executor.uniproc_executor vllm.v1.attention.backends.cpu_attn vllm.renderers.hf
        vllm.model_executor.models.llama vllm.model_executor.models.qwen3 vllm.triton_utils.dispatcher
        vllm.utils.cpu_triton_utils vllm.distributed.device_communicators.cpu_communicator
        vllm.distributed.elastic_ep.elastic_execute vllm.model_executor.layers.quantization.online.base
        vllm.model_executor.layers.fused_moe.experts.cpu_moe vllm.lora.resolver numpy.random
        vllm.plugins.lora_resolvers.filesystem_resolver vllm.plugins.lora_resolvers.hf_hub_resolver
        vllm.v1.core.sched.scheduler vllm.v1.pool.flash_maxsim
        """,
}
"""Modules of other projects by kind of rank. None of them starts a thread or touches CUDA when imported on a CPU."""

READ_AT_IMPORT = b"ATEN_ DNNL_ ONEDNN_ MKL_ OMP_ GOMP_ TORCH_ TORCHDYNAMO_ VLLM_ HF_ TRANSFORMERS_ PYTHON LD_PRELOAD"
SET_LATER = b"OMP_NUM_THREADS", b"PYTHONPATH"  # in actors/imports.py, and in `become`
"""Variables with these prefixes, except two, must have the values that the fork server was started with."""

REQUEST_SECONDS = 5.0
PR_SET_PDEATHSIG = 1
CAPABILITY_VERSION = 0x20080522  # as in titan_rl/isolation.py
NAMESPACES = {"user": 0x10000000, "net": 0x40000000}  # in the order to enter them
_libc = ctypes.CDLL(None, use_errno=True)


class Request(NamedTuple):
    """What a new process would get from its parent, which is the launcher here."""

    launcher: int
    python: str
    folder: bytes
    umask: int
    cpus: list[int]
    environment: dict[bytes, bytes]
    stdio: list[int]

    @classmethod
    def parse(cls, launcher: int, message: bytes, stdio: list[int]) -> "Request":
        python, folder, umask, cpus, *pairs = message.split(b"\0")
        cores, environment = [int(n) for n in cpus.split(b",")], dict(pair.split(b"=", 1) for pair in pairs)
        return cls(launcher, os.fsdecode(python), folder, int(umask), cores, environment, stdio)


def main() -> None:
    kind, listener, parent = sys.argv[1], socket.socket(fileno=int(sys.argv[2])), int(sys.argv[3])
    _libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):  # they mean the controller
        signal.signal(number, signal.SIG_IGN)
    own = dict(os.environb)
    gc.disable()
    preload(kind)
    gc.freeze()  # a collection in a rank would copy every page it looks at
    sys.stdout.flush()  # else each rank would print it
    request, launcher = serve(listener, own)
    enter_namespaces(request.launcher)  # from here on, this process is a rank
    become(request, own)
    with launcher:
        launcher.send(b"pid %d" % os.getpid())
    run_bootstrap()


def preload(kind: str) -> None:
    compiling = nullcontext()
    if kind == "model":
        actors = Path(__file__).resolve().parents[2] / "actors"
        runpy.run_path(str(actors / "titan" / "__init__.py"))  # TorchTitan imports without triton after it
        compiling = runpy.run_path(str(actors / "imports.py"))["compile_deferred"]()
    with compiling:
        for name in PRELOAD[kind].split():
            try:
                importlib.import_module(name)
            except Exception as error:  # the rank fails in the same way, and reports where
                print(f"{name}: {error!r}", file=sys.stderr)


def serve(listener: socket.socket, own: dict[bytes, bytes]) -> tuple[Request, socket.socket]:
    """Fork ranks on request, and be their parent. Return only in each rank: its request, and its launcher."""
    poll = select.poll()
    poll.register(listener, select.POLLIN)
    ranks: dict[int, tuple[int, socket.socket]] = {}  # pid and launcher by pidfd, which is readable at the rank's end
    while True:
        fd, _ = poll.poll()[0]  # one at a time: the next one's number may have been closed and reused meanwhile
        if fd in ranks:
            pid, launcher = ranks.pop(fd)
            for each in (fd, launcher):
                with suppress(KeyError):  # the launcher was gone before
                    poll.unregister(each)
            with launcher, suppress(OSError):
                launcher.send(b"end %d" % os.waitpid(pid, 0)[1])
            os.close(fd)
        elif fd != listener.fileno():  # a launcher is gone: it sends nothing after its request
            poll.unregister(fd)
            os.kill(next(pid for pid, launcher in ranks.values() if launcher.fileno() == fd), signal.SIGKILL)
        elif (accepted := accept(listener, own)) is not None:
            request, launcher = accepted
            if (pid := os.fork()) == 0:
                listener.close()
                for pidfd, (_, other) in ranks.items():
                    os.close(pidfd)
                    other.close()
                return request, launcher
            for each in request.stdio:
                os.close(each)
            ranks[pidfd := os.pidfd_open(pid)] = pid, launcher
            poll.register(pidfd, select.POLLIN)
            poll.register(launcher, select.POLLIN)


def accept(listener: socket.socket, own: dict[bytes, bytes]) -> tuple[Request, socket.socket] | None:
    """Answer one caller. Return its request if this process can fork the rank."""
    caller, _ = listener.accept()
    stdio: list[int] = []
    try:
        pid, user, _ = struct.unpack("3i", caller.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
        if not pid or user != os.getuid():  # pid 0: in another pid namespace, where a rank's pid means nothing
            raise ValueError("expected a process of this user in this pid namespace")
        caller.settimeout(REQUEST_SECONDS)
        message, stdio, _, _ = socket.recv_fds(caller, 1 << 20, 3)
        if message == b"ready?":
            answer = b"ready"
        else:
            request = Request.parse(pid, message, stdio)
            if not (refusal := unfit(request, own)):
                return request, caller
            answer = os.fsencode(f"cold {refusal}")
        caller.send(answer)
    except (OSError, ValueError):  # the caller is gone, or is no launcher
        pass
    for fd in stdio:
        os.close(fd)
    caller.close()
    return None


def unfit(request: Request, own: dict[bytes, bytes]) -> str:
    """Return why the requested rank cannot be forked from this process, or ""."""
    if (threads := len(os.listdir("/proc/self/task"))) > 1:
        return f"it has {threads} threads, expected one"
    torch, files = sys.modules.get("torch"), [f"/proc/self/fd/{fd}" for fd in os.listdir("/proc/self/fd")]
    on_gpu = any(os.path.realpath(file).startswith("/dev/nvidia") for file in files)
    if on_gpu or (torch and torch.cuda.is_initialized()):
        return "it has touched CUDA"
    if request.python != sys.executable:
        return f"it runs {sys.executable}, the rank needs {request.python}"
    for name in sorted({*request.environment, *own}):
        ours, theirs = own.get(name), request.environment.get(name)
        if ours != theirs and name.startswith(tuple(READ_AT_IMPORT.split())) and name not in SET_LATER:
            ours, theirs = ("unset" if value is None else repr(os.fsdecode(value)) for value in (ours, theirs))
            return f"the rank needs {os.fsdecode(name)} {theirs}, it was imported with {ours}"
    return ""


def enter_namespaces(pid: int) -> None:
    """Move this fork to the namespaces of its launcher: a fork server may be older than the run's network."""
    for name, flag in NAMESPACES.items():
        theirs = f"/proc/{pid}/ns/{name}"
        if not os.path.samefile(theirs, f"/proc/self/ns/{name}"):
            with open(theirs, "rb") as namespace:
                if _libc.setns(namespace.fileno(), flag) != 0:
                    raise OSError(ctypes.get_errno(), f"cannot enter {theirs}: {os.strerror(ctypes.get_errno())}")
    if os.getuid() != 0:  # a rank that started cold has none, and opens /proc/PID/fd only of ranks that have no more
        _libc.capset(struct.pack("Ii", CAPABILITY_VERSION, 0), bytes(24))


def become(request: Request, own: dict[bytes, bytes]) -> None:
    """Give this fork of the fork server, which was started with `own`, all that a new process would have."""
    _libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    for at, fd in enumerate(request.stdio):
        os.dup2(fd, at)
        os.close(fd)
    os.umask(request.umask)
    os.sched_setaffinity(0, request.cpus)
    os.chdir(request.folder)
    set_by_imports = {name: value for name, value in os.environb.items() if own.get(name) != value}
    os.environb.clear()
    os.environb.update(request.environment | set_by_imports)
    del sys.argv[1:]
    rest = [path for path in sys.path if path not in {*import_paths(own), ""}]
    sys.path[:] = [os.fsdecode(request.folder), *import_paths(request.environment), *rest]  # as `python -m` has it
    random.seed()
    if numpy_random := sys.modules.get("numpy.random"):
        numpy_random.seed()
    tempfile.tempdir = None  # an import may have asked for the fork server's
    gc.enable()


def import_paths(environment: dict[bytes, bytes]) -> list[str]:
    paths = os.fsdecode(environment.get(b"PYTHONPATH", b"")).split(os.pathsep)
    return [os.path.abspath(path) for path in paths if path]


def run_bootstrap() -> NoReturn:
    """Run Monarch's bootstrap as `python -m` does, and end at once: Python takes seconds to unload all modules."""
    code = 0
    try:
        runpy.run_module("monarch._src.actor.bootstrap_main", run_name="__main__", alter_sys=True)
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        traceback.print_exc()
        code = 1
    atexit._run_exitfuncs()
    with suppress(OSError):
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__":
    main()
