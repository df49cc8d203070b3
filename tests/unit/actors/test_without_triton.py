"""Without triton, which scripts/setup leaves out on a CPU, the trainer's modules can be imported."""

import subprocess
import sys

PROGRAM = """
import sys
sys.modules["triton"] = None  # as if it were not installed
import titan_rl.actors.titan.heads
from torchtitan.distributed.minimal_async_ep import api
print(api.copy_rows_to_peers_kernel is not None)
try:
    api.copy_rows_to_peers_kernel(1, rows=2)
except ModuleNotFoundError as error:
    print(error)
"""


def test_torchtitan_is_imported_without_triton() -> None:
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=False)
    assert done.stdout.splitlines() == [
        "True",
        "torchtitan.distributed.minimal_async_ep.kernels.copy_rows_to_peers_kernel needs triton, "
        "which is not installed: pip install triton",
    ], done.stderr
