"""Helpers for the endpoints of every rank: their failures, output, profilers, and the busy seconds of their thread."""

import logging
import os
import sys
import tempfile
import time
import warnings
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager, suppress
from functools import wraps
from pathlib import Path
from typing import Concatenate, ParamSpec, TypeVar

from titan_rl.wire import failpoints
from titan_rl.wire.spans import span

Self = TypeVar("Self")
P = ParamSpec("P")
T = TypeVar("T")

THIS_THREAD = Path("/proc/thread-self")


def fallible(method: Callable[Concatenate[Self, P], Awaitable[T]]) -> Callable[Concatenate[Self, P], Awaitable[T]]:
    """Make a failing endpoint fail its call and nothing else.

    Monarch answers a call with an Exception, but ends the actor on any other BaseException; DCP's CheckpointException
    is one. Those become a RuntimeError here, so the caller gets the remote traceback under the rank's name."""

    @wraps(method)
    async def answered(self: Self, *args: P.args, **kwargs: P.kwargs) -> T:
        try:
            await failpoints.reached(method.__name__)
            return await method(self, *args, **kwargs)
        except Exception:
            raise
        except BaseException as error:
            raise RuntimeError(f"{type(error).__name__}: {error}") from error

    return answered


def busy_seconds() -> float:
    """Return the seconds that this thread has spent on a core or in the run queue; only on a core where the kernel has
    no schedstat.

    Ranks that share a step finish it together, and most of its wall time is waiting in collectives. This number tells a
    slow rank from one that waits for it. On a GPU it covers the launching thread, which kernels delay only where the
    host waits for them."""
    try:
        run, waited, _ = (THIS_THREAD / "schedstat").read_text().split()
    except (OSError, ValueError):
        return time.thread_time()
    return (int(run) + int(waited)) / 1e9


def show_spans_to_profilers(traced: bool = False) -> None:
    """Make the spans of this process ranges of torch.profiler if it is `traced`, else on a GPU NVTX ranges, which
    Nsight Systems shows. They exclude each other as these profilers do: CUPTI serves one at a time."""
    import torch

    if traced:
        span.ranges = torch.profiler.record_function
    elif torch.cuda.is_available():
        span.ranges = torch.cuda.nvtx.range


def quiet() -> None:
    """Silence warnings that a user cannot act on: all processes share the controller's terminal.

    Call it after the engine is imported: libraries set levels and filters on import."""
    logging.getLogger().setLevel(logging.ERROR)  # TorchTitan logs to the root logger
    logging.getLogger("torch.distributed.tensor").setLevel(logging.ERROR)  # warns of two all-reduces of one number
    for category in (UserWarning, FutureWarning, DeprecationWarning):
        warnings.filterwarnings("ignore", category=category)


@contextmanager
def quiet_rdma() -> Iterator[None]:
    """Silence the first use of RDMA in a process. Monarch warns on every rank that it falls back to TCP, which the plan
    prints once; and its C++ part notes on stderr that a CPU machine has no libcuda."""
    from monarch.rdma import RDMATcpFallbackWarning

    warnings.filterwarnings("ignore", category=RDMATcpFallbackWarning)
    with without_lines(b"[RdmaXcel] Can't open libcuda"):
        yield


@contextmanager
def without_lines(prefix: bytes) -> Iterator[None]:
    """Buffer what native code writes to stderr, then print it without the lines that start with `prefix`."""
    sys.stderr.flush()
    stderr = os.dup(2)
    with tempfile.TemporaryFile() as buffer:
        os.dup2(buffer.fileno(), 2)
        try:
            yield
        finally:
            sys.stderr.flush()
            os.dup2(stderr, 2)
            os.close(stderr)
            buffer.seek(0)
            for line in buffer:
                if not line.startswith(prefix):
                    with suppress(OSError):  # stderr may be a pipe without a reader
                        os.write(2, line)
