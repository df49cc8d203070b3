"""Finds the kernels that need Triton, which installs for a CPU leave out."""

import warnings
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from typing import Any


@cache
def triton_kernels(name: str, without: str) -> Any:
    """Return the module of a kernel's Triton version. If triton is not installed, warn once of what happens `without`
    it, and return None."""
    if find_spec("triton"):
        return import_module(f"titan_rl.kernels.{name}_triton")
    warnings.warn(f"triton is not installed: {without}", stacklevel=2)
    return None
