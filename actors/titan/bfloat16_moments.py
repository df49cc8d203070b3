"""AdamW that stores its moments in bfloat16, and computes in float32: 4 bytes per float32 parameter less.

Each parameter's moments are widened, updated by torch's fused AdamW, and rounded to nearest. torch's kernel for mixed
dtypes exists for CUDA only, where no test could compare it with AdamW.
"""

from collections.abc import Iterable
from typing import Any

import torch
from torch.optim.adamw import adamw

MOMENTS = ("exp_avg", "exp_avg_sq")


class Bfloat16Moments(torch.optim.AdamW):
    def __init__(self, groups: Iterable[dict[str, Any]]) -> None:
        """`groups` have all settings of AdamW. The state exists at once: created lazily, it would be float32."""
        super().__init__(groups)
        for group in self.param_groups:
            for parameter in group["params"]:
                moments = {name: torch.zeros_like(parameter, dtype=torch.bfloat16) for name in MOMENTS}
                self.state[parameter] = {"step": torch.zeros((), device=parameter.device), **moments}
        self.register_load_state_dict_post_hook(_narrow)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        assert closure is None
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._update(parameter, parameter.grad, group)

    def _update(self, parameter: torch.Tensor, gradient: torch.Tensor, group: dict[str, Any]) -> None:
        state = self.state[parameter]
        mean, square = (state[name].to(parameter.dtype) for name in MOMENTS)
        beta1, beta2 = group["betas"]
        adamw(
            *([parameter], [gradient], [mean], [square], [], [state["step"]]),
            fused=True,
            amsgrad=False,
            beta1=beta1,
            beta2=beta2,
            lr=group["lr"],
            weight_decay=group["weight_decay"],
            eps=group["eps"],
            maximize=False,
        )
        for name, moment in zip(MOMENTS, (mean, square), strict=True):
            state[name].copy_(moment)


def _narrow(optimizer: torch.optim.Optimizer) -> None:
    """Undo what torch does to a loaded state: it takes the parameters' dtype."""
    for state in optimizer.state.values():
        state |= {name: state[name].bfloat16() for name in MOMENTS}
