"""Matrix products by oneDNN equal torch's, in every layout. The checks run in a separate process:
kernels are replaced for a whole process."""

import os
import subprocess
import sys
from itertools import chain, product
from pathlib import Path

import pytest
import torch

from titan_rl.kernels import cpu_matmul

AMD = "vendor_id\t: AuthenticAMD\nflags\t\t: fpu avx2 avx512f\n"
INTEL = "vendor_id\t: GenuineIntel\nflags\t\t: fpu avx2 avx512f\n"
OLD = "vendor_id\t: AuthenticAMD\nflags\t\t: fpu avx2\n"
LAYOUTS = ("rows", "columns", "expanded", "strided")


def matrix(rows: int, columns: int, layout: str) -> torch.Tensor:
    if layout == "columns":
        return torch.randn(columns, rows).t()
    if layout == "expanded":
        return torch.randn(1, 1).expand(rows, columns)
    return torch.randn(rows * 2, columns * 3)[::2, ::3] if layout == "strided" else torch.randn(rows, columns)


def check_products() -> None:
    cpu_matmul.use_onednn()
    torch.manual_seed(0)
    sizes, edges = (
        product((0, 1, 2, 7, 257), (0, 1, 3, 384), (0, 1, 5, 200)),
        [(0, 3, 5), (1, 1, 1), (7, 3, 5), (257, 384, 1)],
    )
    two = [("rows", "columns"), ("strided", "rows")]
    for (m, k, n), (left, right) in chain(product(sizes, two), product(edges, product(LAYOUTS, LAYOUTS))):
        a, b, bias = matrix(m, k, left), matrix(k, n, right), torch.randn(n)
        expected = a.double() @ b.double()
        torch.testing.assert_close(a @ b, expected.float(), rtol=1e-5, atol=1e-4)
        assert (a @ b).is_contiguous()
        added = torch.addmm(bias, a, b)
        torch.testing.assert_close(added, (expected + bias).float(), rtol=1e-5, atol=1e-4)
        scaled = torch.addmm(bias, a, b, beta=0.5, alpha=2)
        torch.testing.assert_close(scaled, (2 * expected + 0.5 * bias).float(), rtol=1e-5, atol=1e-4)


def check_gradients_and_other_dtypes() -> None:
    cpu_matmul.use_onednn()
    torch.manual_seed(0)
    for bias in (True, False):
        layer, x = torch.nn.Linear(48, 32, bias=bias), torch.randn(3, 5, 48, requires_grad=True)
        twin, y = torch.nn.Linear(48, 32, bias=bias).double(), x.detach().double().requires_grad_()
        twin.load_state_dict(layer.state_dict())
        layer(x).square().sum().backward()
        twin(y).square().sum().backward()
        for own, other in zip([x, *layer.parameters()], [y, *twin.parameters()], strict=True):
            assert own.grad is not None
            assert other.grad is not None
            torch.testing.assert_close(own.grad, other.grad.float(), rtol=1e-5, atol=1e-4)
    for dtype in (torch.bfloat16, torch.float64, torch.int64):
        assert (torch.ones(3, 4, dtype=dtype) @ torch.ones(4, 2, dtype=dtype)).tolist() == [[4, 4]] * 3
    with pytest.raises(RuntimeError, match="cannot be multiplied"):
        torch.mm(torch.ones(2, 3), torch.ones(2, 3))


def check_rows_do_not_depend_on_their_number() -> None:
    cpu_matmul.use_onednn()
    torch.manual_seed(0)
    x, weight = torch.randn(1280, 384), torch.randn(1024, 384)
    whole = x @ weight.t()
    for rows in (2, 16, 100, 256):
        assert torch.equal(x[:rows] @ weight.t(), whole[:rows])


def test_products_by_onednn_are_those_of_torch() -> None:
    checks = (check_products, check_gradients_and_other_dtypes, check_rows_do_not_depend_on_their_number)
    calls = "".join(f"; checks.{check.__name__}()" for check in checks)
    program = f"import sys; sys.path.insert(0, {str(Path(__file__).parent)!r}); import {__name__} as checks{calls}"
    env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(Path(cpu_matmul.__file__).parents[2])}
    command = [sys.executable, "-W", "error", "-c", program]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(("info", "slow"), [(AMD, True), (INTEL, False), (OLD, False)])
def test_mkl_is_slow_on_cpus_with_avx512_that_are_not_intels(
    info: str, slow: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cpu_matmul, "CPUINFO", tmp_path / "cpuinfo")
    (tmp_path / "cpuinfo").write_text(info)
    assert cpu_matmul.mkl_is_slow() is slow
    (tmp_path / "cpuinfo").unlink()
    assert cpu_matmul.mkl_is_slow() is False
