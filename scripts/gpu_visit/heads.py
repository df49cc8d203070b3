#!/usr/bin/env python3
"""Compare log-prob heads: titan_rl's, TRL's, Liger's, and whole logits, in values, gradients, seconds and memory.

    python scripts/gpu_visit/heads.py          # with scripts/ on PYTHONPATH; trl 1.16 and liger-kernel 0.8.5 installed

All give the log-prob and the entropy of each token, with a gradient that comes later:
- titan_rl: windows of cuBLAS products, folded by Triton; logits are computed again in the backward (4 products)
- titan_rl, logits kept: the same with `keep_logits` (3 products)
- TRL: its ChunkedLogProbFunction, the same design
- Liger: its scaled cross entropy; CuTe DSL on Hopper where nvidia-cutlass-dsl is installed, else chunks of tokens
- whole logits: torch's log_softmax of all of them (3 products)

Prints a JSON line for each. A head that is not installed, or fails, has a line with its error.
"""

import json
from collections.abc import Callable

import torch

from bench.gpu.measured import DEVICE, ON_CPU, milliseconds, relative
from titan_rl.kernels import token_logprob_triton as fused
from titan_rl.kernels.logit_windows import MOST_TOKENS, WORDS
from titan_rl.kernels.token_logprob import reference_token_logprob, token_logprob

Head = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]
SIZES = [(4096, 151936, 1024), (4096, 151936, 2048), (4096, 128256, 4096), (16384, 151936, 1024)]  # T, V, D
TINY = [(64, 512, 32)]
COMPARED = 256  # tokens whose values and gradients are compared: a float32 reference of more would not fit
WINDOWS = (24, 25, 26, 27, 28)  # powers of 2, in logits


def titans(
    hidden_TD: torch.Tensor, weight_VD: torch.Tensor, targets_T: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    logprob_T, entropy_T = token_logprob(hidden_TD, weight_VD, targets_T, 1.0)[:2]
    return logprob_T, entropy_T


def titans_kept(
    hidden_TD: torch.Tensor, weight_VD: torch.Tensor, targets_T: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    logprob_T, entropy_T = token_logprob(hidden_TD, weight_VD, targets_T, 1.0, keep_logits=True)[:2]
    return logprob_T, entropy_T


def trls(
    hidden_TD: torch.Tensor, weight_VD: torch.Tensor, targets_T: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    from trl.trainer.utils import (  # pyright: ignore[reportMissingImports]
        _CHUNKED_LOGPROB_CHUNK_SIZE as CHUNK,
    )
    from trl.trainer.utils import (  # pyright: ignore[reportMissingImports]
        _ChunkedLogProbFunction as ChunkedLogProb,
    )

    return ChunkedLogProb.apply(hidden_TD, weight_VD, None, targets_T, 1.0, CHUNK, None, 1.0, ("log_probs", "entropy"))[
        :2
    ]


def ligers(
    hidden_TD: torch.Tensor, weight_VD: torch.Tensor, targets_T: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    from liger_kernel.ops.fused_linear_scaled_cross_entropy import (  # pyright: ignore[reportMissingImports]
        LigerFusedLinearScaledCrossEntropyFunction as ScaledCrossEntropy,
    )

    nll, entropy = ScaledCrossEntropy.apply(hidden_TD, weight_VD, targets_T, 1.0, -100, 1, True)[:2]
    return -nll, entropy


def whole(
    hidden_TD: torch.Tensor, weight_VD: torch.Tensor, targets_T: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    logs = (hidden_TD @ weight_VD.T).float().log_softmax(-1)
    return logs.gather(1, targets_T[:, None])[:, 0], -(logs.exp() * logs).sum(-1)


HEADS: dict[str, Head] = {
    "titan_rl": titans,
    "titan_rl, logits kept": titans_kept,
    "TRL": trls,
    "Liger": ligers,
    "whole logits": whole,
}


def of_logits(tokens: int, logits: int) -> tuple[int, int]:
    """Return a window of this number of logits."""
    rows = min(tokens, MOST_TOKENS)
    return rows, max(WORDS, logits // rows // WORDS * WORDS)


def both(head: Head, x: tuple[torch.Tensor, torch.Tensor, torch.Tensor]) -> Callable[[], None]:
    """Return a forward with the backward of its log-probs."""

    def run() -> None:
        x[0].grad = x[1].grad = None
        head(*x)[0].sum().backward()

    return run


def gaps(head: Head, x: tuple[torch.Tensor, torch.Tensor, torch.Tensor]) -> dict[str, float]:
    """Return how far values and gradients of some tokens are from the reference in float32 (on a CPU, float64)."""
    kind = torch.float64 if ON_CPU else torch.float32
    own = x[0][:COMPARED].detach().requires_grad_(), x[1].detach().requires_grad_()
    true = own[0].detach().to(kind).requires_grad_(), own[1].detach().to(kind).requires_grad_()
    targets = x[2][:COMPARED]
    found, wanted = head(own[0], own[1], targets), reference_token_logprob(true[0], true[1], targets)
    found_grads = torch.autograd.grad(found[0].sum(), own)
    wanted_grads = torch.autograd.grad(wanted[0].sum(), true)
    return {
        "logprob_gap": float((found[0] - wanted[0]).abs().max()),
        "entropy_gap": float((found[1] - wanted[1]).abs().max()),
        "hidden_gradient_gap": relative(found_grads[0], wanted_grads[0]),
        "weight_gradient_gap": relative(found_grads[1], wanted_grads[1]),
    }


def measured(head: Head, x: tuple[torch.Tensor, torch.Tensor, torch.Tensor], product_ms: float) -> dict[str, float]:
    line = gaps(head, x)
    held = 0
    if not ON_CPU:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        held = torch.cuda.memory_allocated()
    with torch.no_grad():
        forward = milliseconds(lambda: head(*x))
    ms = milliseconds(both(head, x))
    line |= {"forward_ms": forward, "ms": ms, "products": ms / product_ms}
    if not ON_CPU:
        line["extra_mib"] = (torch.cuda.max_memory_allocated() - held) / 2**20
    return line


def main() -> None:
    kind = torch.float32 if ON_CPU else torch.bfloat16
    for tokens, vocabulary, width in TINY if ON_CPU else SIZES:
        torch.manual_seed(0)
        hidden = torch.randn(tokens, width, device=DEVICE).to(kind).requires_grad_()
        weight = (torch.randn(vocabulary, width, device=DEVICE) * width**-0.5).to(kind).requires_grad_()
        x = hidden, weight, torch.randint(vocabulary, (tokens,), device=DEVICE)
        sizes = {"tokens": tokens, "vocabulary": vocabulary, "width": width}
        with torch.no_grad():
            product_ms = milliseconds(lambda x=x: x[0] @ x[1].T)
        print(json.dumps(sizes | {"head": "one product", "ms": product_ms}), flush=True)
        for name, head in HEADS.items():
            try:
                line = measured(head, x, product_ms)
            except Exception as error:  # not installed, or another project's kernel failed: the others still count
                line = {"failed": f"{type(error).__name__}: {error}".split("\n")[0][:200]}
            print(json.dumps(sizes | {"head": name, **line}), flush=True)
        shipped = fused.window
        for power in () if ON_CPU else WINDOWS:
            fused.window = lambda tokens, *_, power=power: of_logits(tokens, 2**power)
            line = {"head": f"titan_rl, windows of 2^{power}", "ms": milliseconds(both(titans, x))}
            print(json.dumps(sizes | line), flush=True)
        fused.window = shipped


if __name__ == "__main__":
    main()
