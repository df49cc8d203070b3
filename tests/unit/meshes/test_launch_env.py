"""What ranks are launched with."""

import os
import subprocess
import sys

from titan_rl.meshes.fork_servers import WORKER_ENV

FORWARDS = """
import ctypes
from resource import RUSAGE_SELF, getrusage
libc = ctypes.CDLL(None)
libc.malloc.restype, libc.malloc.argtypes, libc.free.argtypes = ctypes.c_void_p, [ctypes.c_size_t], [ctypes.c_void_p]
for i in range(6):
    before = getrusage(RUSAGE_SELF).ru_minflt
    tensors = [libc.malloc(8 << 20) for _ in range(4)]
    for tensor in tensors:
        ctypes.memset(tensor, 0, 8 << 20)
    for tensor in tensors:
        libc.free(tensor)
print(getrusage(RUSAGE_SELF).ru_minflt - before)
"""


def pages_taken(env: dict[str, str]) -> int:
    own = {name: value for name, value in os.environ.items() if not name.startswith("MALLOC_")}
    return int(subprocess.check_output([sys.executable, "-c", FORWARDS], env={**own, **env}))


def test_a_rank_keeps_its_memory_between_forwards() -> None:
    assert pages_taken(WORKER_ENV) < 10 < pages_taken({})
