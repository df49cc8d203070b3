"""The Triton launches of the log-prob kernel, and of Liger's, at production shapes. Nothing is computed."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from bench.ahead_of_time import Launch, recorded
from titan_rl.kernels import token_logprob, token_logprob_triton


def launches(
    tokens: int,
    vocabulary: int,
    width: int,
    *,
    float32_logits: bool,
    entropy: bool,
    truncated: bool = False,
    cap: float = 0.0,
) -> list[Launch]:
    """Record a forward and a backward in bf16: softmax_sums_kernel, then descent_kernel."""
    hidden = torch.empty(tokens, width, dtype=torch.bfloat16, device="meta", requires_grad=True)
    weight = torch.empty(vocabulary, width, dtype=torch.bfloat16, device="meta", requires_grad=True)
    targets = torch.empty(tokens, dtype=torch.int64, device="meta")
    kept = torch.empty(tokens, -(-vocabulary // 8), dtype=torch.uint8, device="meta") if truncated else None

    keys: dict[str, Any] = {"with_entropy_grad": entropy, "float32_logits": float32_logits, "kept": kept, "cap": cap}

    def forward_backward() -> None:
        logprob, entropies = token_logprob.token_logprob(hidden, weight, targets, 0.7, **keys)
        (logprob + entropies if entropy else logprob).sum().backward()

    with _as_on_a_gpu():
        return recorded(forward_backward)


@contextmanager
def _as_on_a_gpu() -> Iterator[None]:
    """Choose the GPU's tile for tensors of the meta device."""
    chosen = token_logprob._triton
    token_logprob._triton = lambda hidden_TD: token_logprob_triton
    try:
        yield
    finally:
        token_logprob._triton = chosen


def our_launches(tokens: int, vocabulary: int, width: int) -> dict[str, Launch]:
    named: dict[str, Launch] = {}
    for float32_logits in (False, True):
        for entropy in (False, True):
            sums, descent = launches(tokens, vocabulary, width, float32_logits=float32_logits, entropy=entropy)
            logits = ", float32 logits" if float32_logits else ""
            named[f"softmax_sums{logits}"] = sums
            named[f"descent{logits}{', entropy' if entropy else ''}"] = descent
    return named


def liger_launches(tokens: int, vocabulary: int) -> dict[str, Launch]:
    """Record what Liger's fused linear cross entropy launches for a chunk of bf16 logits. Liger 0.8.5 must be on
    sys.path."""
    from liger_kernel.ops.cross_entropy import (  # pyright: ignore[reportMissingImports]
        liger_cross_entropy_kernel,
    )
    from liger_kernel.ops.fused_linear_cross_entropy import MAX_FUSED_SIZE  # pyright: ignore[reportMissingImports]

    logits = torch.empty(tokens, vocabulary, dtype=torch.bfloat16, device="meta")
    targets, loss = torch.empty(tokens, dtype=torch.int64, device="meta"), torch.empty(tokens, device="meta")
    off: dict[str, Any] = dict.fromkeys(["weight_ptr", "z_loss_ptr", "token_accuracy_ptr", "predicted_tokens_ptr"])
    off |= {"token_accuracy_stride": 0, "predicted_tokens_stride": 0, "weight_sum": 0.0, "softcap": None}
    off |= {"lse_square_scale": 0.0, "label_smoothing": 0.0}
    off |= dict.fromkeys(["RETURN_Z_LOSS", "RETURN_TOKEN_ACCURACY", "RETURN_PREDICTED_TOKENS", "HAS_WEIGHT"], False)
    named: dict[str, Launch] = {}
    for gradients in (True, False):
        call = liger_cross_entropy_kernel[(tokens,)]
        (named[f"Liger cross_entropy{'' if gradients else ', no gradients'}"],) = recorded(
            lambda call=call, gradients=gradients: call(
                X_ptr=logits,
                X_stride=vocabulary,
                Y_ptr=targets,
                Y_stride=1,
                loss_ptr=loss,
                loss_stride=1,
                n_cols=vocabulary,
                n_non_ignore=tokens,
                sum_non_ignore_weight=tokens,
                ignore_index=-100,
                reduction="sum",
                HAS_SOFTCAPPING=False,
                HAS_GRADIENTS=gradients,
                BLOCK_SIZE=MAX_FUSED_SIZE,
                num_warps=32,
                **off,
            )
        )
    return named
