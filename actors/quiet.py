"""All processes share the controller's terminal: errors reach it, and what a user can do nothing about does not."""

import logging
import os
import sys
import tempfile
import warnings
from collections.abc import Iterator
from contextlib import contextmanager


def quiet() -> None:
    """Call once the engine is imported: libraries set levels and filters of their own on import."""
    logging.getLogger().setLevel(logging.ERROR)  # TorchTitan logs to the root logger
    logging.getLogger("torch.distributed.tensor").setLevel(logging.ERROR)  # two all-reduces of one number, it warns
    for category in (UserWarning, FutureWarning, DeprecationWarning):
        warnings.filterwarnings("ignore", category=category)


@contextmanager
def quiet_rdma() -> Iterator[None]:
    """For the first use of RDMA in a process. Monarch warns on every rank that it falls back to TCP, which the plan has
    told the user once; and its C++ part notes on stderr that a CPU machine has no libcuda."""
    from monarch.rdma import RDMATcpFallbackWarning

    warnings.filterwarnings("ignore", category=RDMATcpFallbackWarning)
    with without_lines(b"[RdmaXcel] Can't open libcuda"):
        yield


@contextmanager
def without_lines(prefix: bytes) -> Iterator[None]:
    """Hold back what native code writes to stderr, and let it through afterwards without the lines of this prefix."""
    sys.stderr.flush()
    kept = os.dup(2)
    with tempfile.TemporaryFile() as held:
        os.dup2(held.fileno(), 2)
        try:
            yield
        finally:
            sys.stderr.flush()
            os.dup2(kept, 2)
            os.close(kept)
            held.seek(0)
            for line in held:
                if not line.startswith(prefix):
                    os.write(2, line)
