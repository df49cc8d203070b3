"""A model on one rank without FSDP2, which copies every parameter in each forward and again in each backward, though
there is nothing to gather (pytorch #173680).

    parameters, training.dtype ── place: one cast per update ──► copies in the dtype of the products; the modules have
          ▲                                                      these until `take_back`
          └─ gradients in training.dtype ◄── fold: in parts, during the backward ── gradients of the copies

Parameters that have the dtype of the products already need no copy. Gradients add up in the order and in the dtypes of
FSDP2's, so that losses and gradients are the same, bit for bit.
"""

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

FOLDED_BYTES = 64 << 20
"""Bytes of the copies' gradients that are folded together: few launches, and little memory."""
ALIGNED = 256  # bytes; vector loads of compiled blocks need 16


class ComputeCopies:
    def __init__(self, model: nn.Module, dtype: torch.dtype) -> None:
        """Call this before the model has memory: parameters are looked up at the first forward."""
        self._model, self._dtype = model, dtype
        self._memory: Tensor | None = None  # holds all copies; None before the first forward
        self._parameters: list[nn.Parameter] = []
        self._copies: list[nn.Parameter] = []
        self._users: list[list[tuple[nn.Module, str]]] = []  # by parameter; several for a tied one
        self._held: list[tuple[nn.Parameter, Tensor]] = []  # gradients to fold
        self._held_bytes = 0
        self._placed = False
        model.register_state_dict_pre_hook(lambda *_: self.take_back())
        model.register_load_state_dict_pre_hook(lambda *_: self.take_back())

    @torch.no_grad()
    def place(self) -> None:
        """Give the modules copies of the current parameters, unless they have them."""
        if self._placed:
            return
        if self._memory is None:
            self._memory = self._allocated()
        self._memory.untyped_storage().resize_(self._memory.nbytes)
        if self._copies:
            torch.ops.aten._foreach_copy_(self._copies, self._parameters)
        self._exchange(self._copies)
        self._placed = True

    def take_back(self) -> None:
        """Give the modules their parameters, with all gradients, and free the copies. They are stale then."""
        if not self._placed or self._memory is None:
            return
        self.fold()
        self._exchange(self._parameters)
        self._memory.untyped_storage().resize_(0)
        self._placed = False

    def drop_gradients(self) -> None:
        """Forget gradients that have not been folded."""
        self._held, self._held_bytes = [], 0

    @torch.no_grad()
    def fold(self) -> None:
        """Add gradients of copies to the gradients of their parameters. Call this after each backward."""
        held = self._held
        self.drop_gradients()
        begun = [(parameter, gradient) for parameter, gradient in held if parameter.grad is not None]
        new = [(parameter, gradient) for parameter, gradient in held if parameter.grad is None]
        for parameter, wide in zip([p for p, _ in new], _widened(new), strict=True):
            parameter.grad = wide
        if begun:
            torch.ops.aten._foreach_add_.List([parameter.grad for parameter, _ in begun], _widened(begun))

    def _allocated(self) -> Tensor:
        """Make the copies, in one piece of memory."""
        users = dict[nn.Parameter, list[tuple[nn.Module, str]]]()
        for module in self._model.modules():
            for name, parameter in module.named_parameters(recurse=False):
                if parameter.dtype != self._dtype and parameter.is_floating_point():
                    users.setdefault(parameter, []).append((module, name))
        self._parameters, self._users = list(users), list(users.values())
        starts, each = [0], ALIGNED // self._dtype.itemsize
        for parameter in self._parameters:
            starts.append(starts[-1] + -(-parameter.numel() // each) * each)
        device = next(self._model.parameters()).device
        memory = torch.empty(starts[-1], dtype=self._dtype, device=device)
        for parameter, start in zip(self._parameters, starts, strict=False):
            part = memory[start : start + parameter.numel()].view(parameter.shape)
            copy = nn.Parameter(part, requires_grad=parameter.requires_grad)
            if copy.requires_grad:
                copy.register_post_accumulate_grad_hook(partial(self._hold, parameter))
            self._copies.append(copy)
        return memory

    def _hold(self, parameter: nn.Parameter, copy: Any) -> None:
        self._held.append((parameter, copy.grad))
        self._held_bytes += copy.grad.nbytes
        copy.grad = None
        if self._held_bytes >= FOLDED_BYTES:
            self.fold()

    def _exchange(self, parameters: Sequence[nn.Parameter]) -> None:
        for parameter, users in zip(parameters, self._users, strict=True):
            for module, name in users:
                setattr(module, name, parameter)


def _widened(held: Sequence[tuple[nn.Parameter, Tensor]]) -> list[Tensor]:
    """Return gradients in the dtypes of their parameters."""
    wide = [torch.empty_like(parameter) for parameter, _ in held]
    if held:
        torch.ops.aten._foreach_copy_(wide, [gradient for _, gradient in held])
    return wide
