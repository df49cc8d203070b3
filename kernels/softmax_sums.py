"""State of the log-prob kernel between tiles of the vocabulary, forward and backward."""

from dataclasses import dataclass

import torch
import torch.distributed as dist


@dataclass(frozen=True)
class SoftmaxSums:
    """A token's softmax over a part of the vocabulary, as four numbers that can be combined over parts.

    max m = max z; mass = sum e^(z-m); moment = sum e^(z-m) (z-m); target = z[target] if the part has it, else 0; others
    likewise, if other ids are read too.
    """

    max_T: torch.Tensor
    mass_T: torch.Tensor
    moment_T: torch.Tensor
    target_T: torch.Tensor
    others_TK: torch.Tensor | None = None

    @classmethod
    def of_nothing(cls, *shape: int, dtype: torch.dtype, device: torch.device) -> "SoftmaxSums":
        """Return the sums of an empty part. Max is the least finite number, because -inf minus -inf would be NaN."""
        least = torch.full(shape, torch.finfo(dtype).min, dtype=dtype, device=device)
        return cls(least, *torch.zeros(3, *shape, dtype=dtype, device=device).unbind())

    def __getitem__(self, tokens: slice) -> "SoftmaxSums":
        """Return a view: adding to it adds to these sums."""
        others = None if self.others_TK is None else self.others_TK[tokens]
        return SoftmaxSums(
            self.max_T[tokens], self.mass_T[tokens], self.moment_T[tokens], self.target_T[tokens], others
        )

    def move_(self, max_T: torch.Tensor) -> None:
        """Restate mass and moment relative to another max, in place."""
        shift_T = self.max_T - max_T
        factor_T = shift_T.exp()
        self.moment_T.addcmul_(shift_T, self.mass_T).mul_(factor_T)
        self.mass_T.mul_(factor_T)
        self.max_T.copy_(max_T)

    def over_group(self, group: dist.ProcessGroup) -> "SoftmaxSums":
        """Return these sums combined with the other ranks' parts."""
        max_T = self.max_T.clone()
        dist.all_reduce(max_T, dist.ReduceOp.MAX, group)
        self.move_(max_T)
        sums_3T = torch.stack([self.mass_T, self.moment_T, self.target_T])
        dist.all_reduce(sums_3T, dist.ReduceOp.SUM, group)
        if self.others_TK is not None:
            dist.all_reduce(self.others_TK, dist.ReduceOp.SUM, group)
        return SoftmaxSums(max_T, *sums_3T.unbind(), others_TK=self.others_TK)

    @property
    def logprob_T(self) -> torch.Tensor:
        """In this order: a likely token's log-prob is small, and target - lse would round it as coarsely as logits."""
        return (self.target_T - self.max_T) - self.mass_T.log()

    @property
    def lse_T(self) -> torch.Tensor:
        return self.max_T + self.mass_T.log()

    @property
    def entropy_T(self) -> torch.Tensor:
        return self.mass_T.log() - self.moment_T / self.mass_T


@dataclass(frozen=True)
class Incoming:
    """Inputs of the backward pass per token. `entropy_grad_T` is None if the entropy is detached, `kept_TB` if nothing
    was dropped, `others` if only targets are read."""

    targets_T: torch.Tensor
    lse_T: torch.Tensor
    entropy_T: torch.Tensor
    logprob_grad_T: torch.Tensor
    entropy_grad_T: torch.Tensor | None
    kept_TB: torch.Tensor | None = None
    others: tuple[torch.Tensor, torch.Tensor] | None = None  # [T, K] ids besides the target, and their gradients

    def at(self, tokens: slice, vocab_start: int) -> "Incoming":
        """Return the inputs of a slice of tokens, with ids and kept sets counted from `vocab_start`."""
        return Incoming(
            self.targets_T[tokens] - vocab_start,
            self.lse_T[tokens],
            self.entropy_T[tokens],
            self.logprob_grad_T[tokens],
            None if self.entropy_grad_T is None else self.entropy_grad_T[tokens],
            None if self.kept_TB is None else self.kept_TB[tokens, vocab_start // 8 :],
            self.others and (self.others[0][tokens] - vocab_start, self.others[1][tokens]),
        )
