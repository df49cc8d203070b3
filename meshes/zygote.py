"""A zygote: a process that has imported an engine, and forks ranks, which therefore start in a fraction of a second.

    controller ── Monarch ──> shim (zygote_shim.py)
                                │ AF_UNIX: Python, folder, environment, stdio;   back: the rank's pid, then how it ended
                              zygote of the kind (model | generator) ──fork──> rank: Monarch's ordinary bootstrap

Zygotes are forked, too, so that what all kinds need is imported once: zygote_root.py is the program.

Forking is safe while a process has one thread and has not touched CUDA; both are checked before each fork, and a rank
that cannot be forked is refused with a reason. So a zygote never imports Monarch, whose library starts threads when it
is loaded. It imports nothing of titan_rl either: ranks import that themselves, so they always run the current code.
It is the parent of its ranks: it reaps them, tells their shims, and kills a rank whose shim is gone.
"""

import atexit
import ctypes
import gc
import importlib
import logging
import os
import random
import runpy
import select
import signal
import socket
import struct
import sys
import traceback
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

PRELOAD = {
    "model": """
        numpy torch torch.distributed.fsdp torch.distributed.tensor torch.distributed.checkpoint.hf_storage
        torch._subclasses.schema_check_mode safetensors.torch xxhash
        torchtitan.models.qwen3.sharding torchtitan.components.checkpoint
        torchtitan.components.optimizer.utils torchtitan.distributed.activation_checkpoint torchtitan.tools.profiler
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

READ_AT_IMPORT = tuple(
    b"ATEN_ DNNL_ ONEDNN_ MKL_ OMP_ KMP_ GOMP_ TORCH PYTORCH_ VLLM_ HF_ TRANSFORMERS_ TOKENIZERS_ "
    b"PYTHON LD_ MALLOC_ TRITON_ NCCL_ CUDA_".split()
)
READ_LATER = b"OMP_NUM_THREADS PYTHONPATH CUDA_VISIBLE_DEVICES TORCHINDUCTOR_CACHE_DIR".split()
SET_BY_IMPORTS = b"PYTORCH_NVML_BASED_CUDA_CHECK TORCHINDUCTOR_COMPILE_THREADS TRITON_CACHE_AUTOTUNING".split()
SET_BY_IMPORTS += [b"LD_LIBRARY_PATH"]  # cv2 appends its own folder
"""A rank needs the values that its zygote was imported with in variables of these prefixes. The exceptions are replaced
in time, or are set by vLLM in any process that imports it: the tests' own, say."""

ROOM = "TITAN_RL_ROOM"  # padding of the zygote's environment, which a rank's own is written over
REQUEST_SECONDS = 5.0
PR_SET_PDEATHSIG = 1
NAMESPACES = {"user": 0x10000000, "net": 0x40000000}  # that a run may have of its own, in the order to enter them
_libc = ctypes.CDLL(None, use_errno=True)


@dataclass(frozen=True, slots=True)
class Request:
    """What a rank is to be: everything that a process gets from its parent."""

    python: str
    folder: bytes
    umask: int
    cpus: list[int]
    environment: dict[bytes, bytes]
    stdio: list[int]

    @classmethod
    def receive(cls, connection: socket.socket) -> "Request | None":
        """Read a request. None: the caller only asks whether this zygote is ready."""
        data, stdio, _, _ = socket.recv_fds(connection, 1 << 20, 3)
        while data and not data.endswith(b"\0\0"):
            if not (more := connection.recv(1 << 20)):
                raise ValueError("expected a whole request")
            data += more
        if not data.strip(b"\0"):
            return None
        python, folder, umask, cpus, *pairs = data[:-2].split(b"\0")
        environment = dict(pair.split(b"=", 1) for pair in pairs)
        return cls(os.fsdecode(python), folder, int(umask), [int(n) for n in cpus.split(b",")], environment, stdio)


def end_with(parent: int) -> None:
    """Die when the parent does, and at no signal that means the controller."""
    _libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)


def own_environment() -> dict[bytes, bytes]:
    """Return this process's environment, held where it is not written over: a rank shows its own in the block of memory
    that the kernel put this one in."""
    own = {name: value for name, value in os.environb.items() if name != ROOM.encode()}
    set_environment(own)
    return own


def fork_ranks(kind: str, listener: socket.socket, own: dict[bytes, bytes]) -> None:
    """Import what ranks of this kind need, and fork them on request. Returns in each rank, when it has ended."""
    preload(kind)
    gc.freeze()  # a collection in a rank would copy every page it looks at
    request, shim = Zygote(listener, own).serve()
    enter_namespaces(shim)
    become(request, own)
    with shim:
        shim.sendall(f"pid {os.getpid()}\n".encode())
    leave(run_bootstrap())


def run_bootstrap() -> int:
    """Run Monarch's bootstrap as `python -m` does. Return the exit code."""
    try:
        runpy.run_module("monarch._src.actor.bootstrap_main", run_name="__main__", alter_sys=True)
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        traceback.print_exc()
        return 1
    return 0


def leave(code: int) -> NoReturn:
    """End without taking the interpreter apart, which takes seconds with so many modules."""
    try:
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
    finally:
        os._exit(code)


def preload(kind: str) -> None:
    logging.getLogger("vllm").setLevel(os.environ.get("VLLM_LOGGING_LEVEL", "INFO"))  # ignored until vLLM has set it up
    if kind == "generator":
        return import_all(PRELOAD[kind].split(), kind)
    actors = Path(__file__).resolve().parents[1] / "actors"
    runpy.run_path(str(actors / "titan" / "__init__.py"))  # TorchTitan imports without triton after it
    with runpy.run_path(str(actors / "imports.py"))["compile_deferred"]():
        import_all(PRELOAD[kind].split(), kind)


def import_all(names: Iterable[str], kind: str) -> None:
    for name in names:
        try:
            importlib.import_module(name)
        except Exception as error:  # the rank fails in the same way, and says where
            print(f"zygote {kind}: {name}: {error!r}", file=sys.stderr)


class Zygote:
    """Forks ranks on request, and is their parent."""

    def __init__(self, listener: socket.socket, own: dict[bytes, bytes]) -> None:
        """`own`: its environment before it imported anything."""
        self._listener, self._own = listener, own
        self._poll = select.poll()
        self._poll.register(listener, select.POLLIN)
        self._ranks: dict[int, int] = {}  # by pidfd, which is readable once the rank has ended
        self._shims: dict[int, socket.socket] = {}  # by pidfd

    def serve(self) -> tuple[Request, socket.socket]:
        """Never returns, except in each rank: what it is to be, and its shim."""
        while True:
            fd, _ = self._poll.poll()[0]  # one at a time: what it closes may be the next one's, and its number reused
            if fd in self._ranks:
                self._reap(fd)
            elif fd != self._listener.fileno():
                self._forsake(fd)
            elif (forked := self._accept()) is not None:
                return forked

    def _accept(self) -> tuple[Request, socket.socket] | None:
        """Answer one caller. Returns only in the rank that is forked for it."""
        connection, _ = self._listener.accept()
        if not _is_ours(connection):
            return connection.close()
        try:
            connection.settimeout(REQUEST_SECONDS)
            request = Request.receive(connection)
            why = "" if request is None else unfit(request, self._own)
            if request is None or why:
                connection.sendall(b"ready\n" if request is None else f"cold {why}\n".encode())
        except (OSError, ValueError):  # the caller is gone, or is no shim
            return connection.close()
        if request is None or why:
            for fd in () if request is None else request.stdio:
                os.close(fd)
            return connection.close()
        sys.stdout.flush()
        sys.stderr.flush()
        if (pid := os.fork()) == 0:
            for inherited in (self._listener, *self._shims.values()):
                inherited.close()
            for pidfd in self._ranks:
                os.close(pidfd)
            return request, connection
        for fd in request.stdio:
            os.close(fd)
        pidfd = os.pidfd_open(pid)
        self._ranks[pidfd], self._shims[pidfd] = pid, connection
        self._poll.register(pidfd, select.POLLIN)
        self._poll.register(connection, select.POLLIN)

    def _reap(self, pidfd: int) -> None:
        status = os.waitpid(self._ranks.pop(pidfd), 0)[1]
        self._poll.unregister(pidfd)
        os.close(pidfd)
        if shim := self._shims.pop(pidfd, None):
            self._poll.unregister(shim)
            with suppress(OSError):
                shim.sendall(f"end {status}\n".encode())
            shim.close()

    def _forsake(self, fd: int) -> None:
        """Kill the rank of a shim that is gone."""
        for pidfd, shim in list(self._shims.items()):
            if shim.fileno() == fd:
                self._poll.unregister(fd)
                del self._shims[pidfd]
                shim.close()
                os.kill(self._ranks[pidfd], signal.SIGKILL)


def _is_ours(connection: socket.socket) -> bool:
    """Whether the caller is the same user, in the same pid namespace: elsewhere a rank's pid would mean nothing."""
    pid, user = _caller(connection)
    return pid > 0 and user == os.getuid()


def _caller(connection: socket.socket) -> tuple[int, int]:
    """Return the pid (0: invisible from here) and the user of the process at the other end."""
    form = "3i"
    pid, user, _ = struct.unpack(
        form, connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize(form))
    )
    return pid, user


def enter_namespaces(shim: socket.socket) -> None:
    """Move this fork to where its shim is: a zygote may be older than the run's network, or serve several runs."""
    pid, _ = _caller(shim)
    for name, flag in NAMESPACES.items():
        theirs = f"/proc/{pid}/ns/{name}"
        if os.path.samefile(theirs, f"/proc/self/ns/{name}"):
            continue
        with open(theirs, "rb") as namespace:
            if _libc.setns(namespace.fileno(), flag) != 0:
                raise OSError(ctypes.get_errno(), f"cannot enter {theirs}: {os.strerror(ctypes.get_errno())}")


def unfit(request: Request, own: dict[bytes, bytes]) -> str:
    """Return why the requested rank cannot be forked from this process, or ""."""
    if (threads := len(os.listdir("/proc/self/task"))) > 1:
        return f"it has {threads} threads, expected one"
    if _touched_cuda():
        return "it has touched CUDA"
    if request.python != sys.executable:
        return f"it runs {sys.executable}, the rank needs {request.python}"
    for name in sorted({*request.environment, *own}):
        ours, theirs = own.get(name), request.environment.get(name)
        if ours != theirs and name.startswith(READ_AT_IMPORT) and name not in READ_LATER + SET_BY_IMPORTS:
            ours, theirs = ("unset" if value is None else repr(os.fsdecode(value)) for value in (ours, theirs))
            return f"the rank needs {os.fsdecode(name)} {theirs}, it was imported with {ours}"
    return ""


def _touched_cuda() -> bool:
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_initialized():
        return True
    for fd in os.listdir("/proc/self/fd"):
        try:
            if os.readlink(f"/proc/self/fd/{fd}").startswith("/dev/nvidia"):
                return True
        except OSError:  # the fd of this listing
            continue
    return False


def become(request: Request, own: dict[bytes, bytes]) -> None:
    """Give this fork of the zygote, whose environment is `own`, all that a new process of the request would have."""
    _libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    for at, fd in enumerate(request.stdio):
        os.dup2(fd, at)
        os.close(fd)
    os.umask(request.umask)
    os.sched_setaffinity(0, request.cpus)
    os.chdir(request.folder)
    set_by_imports = {name: value for name, value in os.environb.items() if own.get(name) != value}
    set_environment(request.environment | set_by_imports)
    show_in_proc(request.environment, b"python\0-m\0monarch._src.actor.bootstrap_main\0")
    inherited = {*_import_paths(own), ""}
    rest = [path for path in sys.path if path not in inherited]
    sys.path[:] = [os.fsdecode(request.folder), *_import_paths(request.environment), *rest]  # as `python -m` has it
    torch: Any = sys.modules.get("torch")
    if torch is not None and (threads := request.environment.get(b"OMP_NUM_THREADS", b"")).isdigit():
        torch.set_num_threads(int(threads))  # for all threads: OpenMP has read the zygote's
    random.seed()
    tempfile: Any = sys.modules.get("tempfile")
    if tempfile is not None:
        tempfile.tempdir = None  # it may have been asked for where the zygote's own TMPDIR is
    if "numpy.random" in sys.modules:
        sys.modules["numpy.random"].seed()
    gc.enable()


def _import_paths(environment: dict[bytes, bytes]) -> list[str]:
    return [
        os.path.abspath(path) for path in os.fsdecode(environment.get(b"PYTHONPATH", b"")).split(os.pathsep) if path
    ]


def set_environment(environment: dict[bytes, bytes]) -> None:
    os.environb.clear()
    os.environb.update(environment)


def show_in_proc(environment: dict[bytes, bytes], command: bytes) -> None:
    """Write this fork's environment and command over its parent's, where /proc/PID/environ and cmdline read them."""
    fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    arguments, arguments_end, variables, variables_end = (int(fields[n - 3]) for n in (48, 49, 50, 51))
    ours_first = sorted(environment.items(), key=lambda pair: not pair[0].startswith(b"TITAN_RL_"))
    block = b"".join(name + b"=" + value + b"\0" for name, value in ours_first)
    _write_over(variables, variables_end, block)
    _write_over(arguments, arguments_end, command)


def _write_over(start: int, end: int, text: bytes) -> None:
    ctypes.memset(start, 0, end - start)
    ctypes.memmove(start, text, min(len(text), end - start - 1))
