"""The trainer's side of a rank, on TorchTitan. Runs before any of this package's modules imports TorchTitan.

TorchTitan's models import its kernels for expert parallelism, which import triton: a gigabyte that nothing else on a
CPU needs, and that scripts/setup leaves out there. Where their import fails for want of triton, those kernels are
replaced by a module whose functions raise an error that names triton. With docs/upstream/import-without-triton the
import succeeds, and nothing is replaced.
"""

import sys
from importlib import import_module
from importlib.util import find_spec
from types import ModuleType
from typing import Any

KERNELS = "torchtitan.distributed.minimal_async_ep.kernels"


class NoKernels(ModuleType):
    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)

        def missing(*_: Any, **__: Any) -> Any:
            raise ModuleNotFoundError(f"{KERNELS}.{name} needs triton, which is not installed: pip install triton")

        return missing


if find_spec("triton") is None:
    try:
        import_module("torchtitan.distributed.minimal_async_ep")
    except ModuleNotFoundError as error:
        if error.name != "triton":
            raise
        sys.modules[KERNELS] = NoKernels(KERNELS)
