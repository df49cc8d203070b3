"""The GPU's kernel in Triton's interpreter, in a process of its own: it is chosen before triton is imported."""

import os
import subprocess
import sys
from dataclasses import fields, replace

import pytest
import torch

from policy_cases import SURROGATES, Case, Outcome, assert_same, case, name, outcome, soiled
from titan_rl.kernels import fused_policy_loss as fused
from titan_rl.kernels.fused_policy_loss import fused_policy_loss
from titan_rl.kernels.policy_loss import Surrogate, policy_loss
from titan_rl.kernels.statistics import Statistics

pytest.importorskip("triton")


def cases(seed: int, dtype: torch.dtype) -> list[Case]:
    """A part of a block with and without the optional columns, or several blocks; and nothing trained."""
    return [
        case(seed, dtype=dtype, proximal=seed % 2 > 0, reference=seed % 3 > 0),
        *([case(seed, rows=3, length=700, dtype=dtype), *empty(case(seed, dtype=dtype))] if seed % 16 == 0 else []),
    ]


def empty(at: Case) -> list[Case]:
    nothing = replace(at.tokens, mask=torch.zeros_like(at.tokens.mask))
    padding = replace(nothing, sequence=torch.full_like(at.tokens.sequence, -1), sequences=0)
    return [replace(at, tokens=tokens) for tokens in (nothing, padding)]


def interpret() -> None:
    from titan_rl.kernels.fused_policy_loss_triton import triton_pass

    fused.implementation = lambda device: triton_pass  # the interpreter runs it on CPU tensors
    for seed, surrogate in enumerate(SURROGATES):
        checks = [(torch.float64, 1e-12), *([(torch.float32, 2e-6)] if seed % 5 == 0 else [])]
        for dtype, tolerance in checks:
            for at in cases(seed, dtype):
                want = outcome(policy_loss, at, surrogate)
                try:
                    assert_same(outcome(fused_policy_loss, at, surrogate), want, tolerance)
                    if seed % 16 == 0:
                        assert_same(outcome(fused_policy_loss, soiled(at, torch.nan), surrogate), want, tolerance)
                except AssertionError as error:
                    raise AssertionError(f"{name(surrogate)}, seed {seed}, {dtype}") from error


def test_the_interpreted_kernel_is_the_reference() -> None:
    environment = os.environ | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    subprocess.run([sys.executable, __file__], env=environment, check=True)


def on(device: str, at: Case) -> Case:
    columns = {k: v.to(device) for k, v in at.columns().items()}
    tokens = replace(at.tokens, mask=at.tokens.mask.to(device), sequence=at.tokens.sequence.to(device), **columns)
    return Case(at.logprob.to(device), at.entropy.to(device), tokens)


def back(got: Outcome) -> Outcome:
    kinds = {f.name: getattr(got.statistics, f.name) for f in fields(Statistics)}
    statistics = Statistics(**{kind: {k: v.cpu() for k, v in values.items()} for kind, values in kinds.items()})
    return Outcome(got.loss.cpu(), got.by_logprob.cpu(), got.by_entropy.cpu(), statistics)


@pytest.mark.gpu
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float32, 1e-5)], ids=str)
@pytest.mark.parametrize("surrogate", SURROGATES[::16], ids=name)  # each compiles for seconds
def test_the_compiled_kernel_is_the_reference(surrogate: Surrogate, dtype: torch.dtype, tolerance: float) -> None:
    for at in cases(SURROGATES.index(surrogate), dtype):
        want = outcome(policy_loss, at, surrogate)
        for given in (at, soiled(at, torch.nan)):
            assert_same(back(outcome(fused_policy_loss, on("cuda", given), surrogate)), want, tolerance)


if __name__ == "__main__":
    interpret()
