"""Multiplies float32 matrices by oneDNN on CPUs of which torch's MKL uses only half.

MKL takes its AVX-512 kernels on Intel's CPUs only: on others it computes at AVX2's speed. On an AMD EPYC core it
reached 100 GFLOP/s where oneDNN, which torch also contains, reached 210 to 230 (150 to 205 for gradients of weights).
Both add up float32 products in float32, in another order.
"""

import warnings
from pathlib import Path
from typing import Any

import torch

CPUINFO = Path("/proc/cpuinfo")
_overrides: list[torch.library.Library] = []  # live as long as the process


def mkl_is_slow() -> bool:
    """Return whether this is an x86 CPU with AVX-512 that MKL does not know as Intel's."""
    info = CPUINFO.read_text() if CPUINFO.exists() else ""
    flags = next((line for line in info.splitlines() if line.startswith("flags")), "").split()
    has_both = torch.backends.mkl.is_available() and torch.backends.mkldnn.is_available()
    return has_both and "avx512f" in flags and "GenuineIntel" not in info


def use_fastest() -> bool:
    """Let matrix products of this process be oneDNN's where MKL is slow, and return whether they are. Call it before
    the first one."""
    if not _overrides and mkl_is_slow():
        use_onednn()
    return bool(_overrides)


def use_onednn() -> None:
    """Replace torch's kernels for products of float32 matrices on CPUs."""
    linear = torch.ops.mkldnn._linear_pointwise.default
    mkls_mm = torch.library.get_kernel("aten::mm", "CPU")
    mkls_addmm = torch.library.get_kernel("aten::addmm", "CPU")

    def fits(a: torch.Tensor, b: torch.Tensor) -> bool:
        whole = a.dim() == b.dim() == 2 and a.shape[1] == b.shape[0] and a.numel() > 0 and b.numel() > 0
        return whole and a.dtype is b.dtype is torch.float32

    def mm(keys: Any, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        if not fits(a, b):
            return mkls_mm.call_boxed(keys, a, b)
        # oneDNN's left factor is copied unless it is contiguous, and its right one may lie as it likes. The gradient of
        # a weight has two that are not: the smaller one is copied, and the product, which is small too.
        if not a.is_contiguous() and b.numel() + a.shape[0] * b.shape[1] < a.numel():
            return linear(b.t(), a, None, "none", [], "").t().contiguous()
        return linear(a, b.t(), None, "none", [], "")

    def addmm(
        keys: Any, bias: torch.Tensor, a: torch.Tensor, b: torch.Tensor, *, beta: float = 1, alpha: float = 1
    ) -> torch.Tensor:
        if fits(a, b) and beta == alpha == 1 and bias.dtype is torch.float32 and bias.shape == (b.shape[1],):
            return linear(a, b.t(), bias, "none", [], "")
        return mkls_addmm.call_boxed(keys, bias, a, b, beta=beta, alpha=alpha)

    library = torch.library.Library("aten", "IMPL")
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Warning only once for all operators")  # about overriding, which is intended
        library.impl("mm", mm, "CPU", with_keyset=True, allow_override=True)
        library.impl("addmm", addmm, "CPU", with_keyset=True, allow_override=True)
    _overrides.append(library)
