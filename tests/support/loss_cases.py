"""Random microbatches for the policy loss, and its value with gradients."""

from dataclasses import dataclass, fields, replace
from typing import Protocol

import torch

from titan_rl.kernels.policy_loss import Tokens
from titan_rl.kernels.statistics import Statistics
from titan_rl.kernels.surrogate import Surrogate


@dataclass(frozen=True)
class Case:
    logprob: torch.Tensor
    entropy: torch.Tensor
    tokens: Tokens

    def columns(self) -> dict[str, torch.Tensor]:
        """Return the token columns that are floats, without the mask."""
        named = {f.name: getattr(self.tokens, f.name) for f in fields(Tokens)}
        return {k: v for k, v in named.items() if isinstance(v, torch.Tensor) and k not in ("mask", "sequence")}


def case(
    seed: int = 0,
    *,
    rows: int = 2,
    length: int = 40,
    dtype: torch.dtype = torch.float64,
    proximal: bool = True,
    reference: bool = True,
    spread: float = 0.4,
    far: float = 30.0,
) -> Case:
    """Return sequences of 1 to 12 tokens packed into rows, with holes in the mask and padding at the end. One token in
    16 is `far` off, by default beyond the clamp of every log-ratio."""
    g = torch.Generator().manual_seed(seed)
    shape = (rows, length)

    def normal(scale: float) -> torch.Tensor:
        return scale * torch.randn(shape, generator=g, dtype=torch.float64)

    sequence, count = torch.full(shape, -1), 0
    for row in sequence:
        at = 0
        while (n := int(torch.randint(1, 13, (), generator=g))) <= length - at:
            row[at : at + n], at, count = count, at + n, count + 1
    mask = ((sequence >= 0) & (torch.rand(shape, generator=g) > 0.3)).double()
    behaviour = -3 * torch.rand(shape, generator=g, dtype=torch.float64)
    outlying = far * torch.sign(normal(1.0)) * (torch.rand(shape, generator=g) < 1 / 16)
    logprob = behaviour + normal(spread) + outlying
    tokens = Tokens(
        behaviour=behaviour.to(dtype),
        advantage=normal(1.0).to(dtype),
        mask=mask.to(dtype),
        weight=(torch.rand(shape, generator=g) / length).to(dtype),
        sequence=sequence,
        sequences=count,
        proximal=(behaviour + normal(spread)).to(dtype) if proximal else None,
        reference=(behaviour + normal(spread)).to(dtype) if reference else None,
    )
    return Case(logprob.to(dtype), torch.rand(shape, generator=g, dtype=torch.float64).to(dtype), tokens)


@dataclass(frozen=True)
class Outcome:
    loss: torch.Tensor
    by_logprob: torch.Tensor
    by_entropy: torch.Tensor
    statistics: Statistics


class Loss(Protocol):
    def __call__(
        self, logprob_T: torch.Tensor, entropy_T: torch.Tensor, tokens: Tokens, surrogate: Surrogate, /
    ) -> tuple[torch.Tensor, Statistics]: ...


def outcome(loss_of: Loss, at: Case, surrogate: Surrogate, incoming: float = 3.0) -> Outcome:
    """Return value and gradients of `incoming` times the loss. A gradient that autograd leaves out is zero."""
    logprob, entropy = at.logprob.clone().requires_grad_(), at.entropy.clone().requires_grad_()
    loss, statistics = loss_of(logprob, entropy, at.tokens, surrogate)
    (incoming * loss).backward()
    by_logprob, by_entropy = (torch.zeros_like(x) if x.grad is None else x.grad for x in (logprob, entropy))
    return Outcome(loss.detach(), by_logprob, by_entropy, statistics)


def soiled(clean: Case, dirt: float) -> Case:
    """Return the same microbatch with `dirt` at masked positions, in every column and in the policy's outputs."""
    off = clean.tokens.mask == 0

    def dirty(values: torch.Tensor) -> torch.Tensor:
        return torch.where(off, dirt, values)

    columns = {k: dirty(v) for k, v in clean.columns().items()}
    return Case(dirty(clean.logprob), dirty(clean.entropy), replace(clean.tokens, **columns))
