"""A user's loss in the place of the algorithm's surrogate: a function of a microbatch's tokens.

    def soft_clip(logprob, proximal, advantage):
        log_ratio = logprob - proximal
        return -advantage * log_ratio.exp() + 5.0 * log_ratio.square()

It may name any of these arguments, each a tensor [T]:

    logprob      of the policy, with its gradient
    behaviour    log-prob when the token was sampled
    proximal     log-prob before the step's first update; where the algorithm has none, `behaviour`
    reference    log-prob of the frozen reference; None without one
    advantage
    mask         True on the tokens that are trained on; all values are 0 elsewhere
    sequence     index of the token's rollout in the microbatch, -1 on padding

and returns a loss for each token, or that and a dict of further numbers for each token, whose means are logged. Weights
of tokens, microbatches, packing and sharding are around it: an entry may depend on the tokens of its sequence only.
`check` tries it before a run uses it.
"""

from collections.abc import Callable
from typing import Any

import torch

from titan_rl.kernels.surrogate import Policies
from titan_rl.wire.user_functions import keywords_of

TRIED_LENGTHS = (5, 3, 4)
CLOSE = 1e-4


def own_loss(
    loss: Callable[..., Any], policies: Policies, behaviour_T: torch.Tensor, reference_T: torch.Tensor | None
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Return the loss of each token, 0 where it is not trained on, and the user's statistics."""
    x, zero_T = policies, torch.zeros_like(policies.current_T)
    if reference_T is not None:
        reference_T = torch.where(x.on_T, reference_T, zero_T)
    offered = {"logprob": x.current_T, "behaviour": behaviour_T, "proximal": x.old_T, "reference": reference_T}
    offered |= {"advantage": x.advantage_T, "mask": x.on_T, "sequence": x.sequence_T}
    name = getattr(loss, "__qualname__", repr(loss))
    result = loss(**keywords_of(loss, offered, f"the loss {name}"))
    loss_T, statistics = result if isinstance(result, tuple) else (result, {})
    if not isinstance(loss_T, torch.Tensor) or loss_T.shape != zero_T.shape:
        found = f"shape {list(loss_T.shape)}" if isinstance(loss_T, torch.Tensor) else repr(loss_T)
        raise ValueError(f"the loss {name}: expected a tensor of shape {list(zero_T.shape)}, found {found}")
    return torch.where(x.on_T, loss_T, zero_T), {key: torch.as_tensor(v).detach() for key, v in statistics.items()}


def check(loss: Callable[..., Any], name: str) -> str:
    """Return why a user's loss cannot be used, or "". Tries it on random tokens: alone, and with another row behind
    them."""
    generator = torch.Generator().manual_seed(0)
    tokens = sum(TRIED_LENGTHS)

    def trial(rows: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the losses and the gradients of the first row."""
        generator.manual_seed(0)
        parts = [torch.randn(5, tokens, generator=generator) for _ in range(rows)]
        logprob_T, behaviour_T, old_T, reference_T, advantage_T = torch.cat(parts, 1)
        logprob_T, behaviour_T, old_T, reference_T = (-x.abs() for x in (logprob_T, behaviour_T, old_T, reference_T))
        count = len(TRIED_LENGTHS)
        sequence_T = torch.repeat_interleave(torch.arange(rows * count), torch.tensor(TRIED_LENGTHS * rows))
        on_T = torch.ones(rows * tokens, dtype=torch.bool)
        on_T[::6] = False
        logprob_T.requires_grad_()
        current_T, zero_T = torch.where(on_T, logprob_T, 0.0), torch.zeros_like(logprob_T)
        old_T, advantage_T = torch.where(on_T, old_T, zero_T), torch.where(on_T, advantage_T, zero_T)
        ratio_T = (current_T - old_T).exp()
        policies = Policies(on_T, current_T, old_T, ratio_T, advantage_T, sequence_T, rows * count)
        behaviour_T = torch.where(on_T, behaviour_T, zero_T)
        loss_T, _ = own_loss(loss, policies, behaviour_T, reference_T)
        if loss_T.requires_grad:
            loss_T.sum().backward()
        gradient_T = zero_T if logprob_T.grad is None else logprob_T.grad
        return loss_T.detach()[:tokens], gradient_T[:tokens]

    try:
        loss_T, gradient_T = trial(1)
        both_T, both_gradient_T = trial(2)
    except Exception as error:  # a user's function may raise any error
        return f"{name}: expected it to take random tokens, found {type(error).__name__}: {error}"
    for what, values_T in (("losses", loss_T), ("gradients", gradient_T)):
        if not values_T.isfinite().all():
            return f"{name}: expected finite {what} of random tokens, found {values_T.tolist()}"
    if not gradient_T.any():
        return f"{name}: expected a gradient with respect to `logprob`, found none"
    if not (torch.allclose(loss_T, both_T, atol=CLOSE) and torch.allclose(gradient_T, both_gradient_T, atol=CLOSE)):
        found = "found others: it mixes tokens of several sequences"
        return f"{name}: expected the same losses with another row behind, {found}"
    return ""
