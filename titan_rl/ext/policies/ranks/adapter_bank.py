"""The adapters of several policies over one frozen base. One policy's are in the model at a time.

    model       base weights, and the adapters of the policy in use, with their gradients
    bank        the values and gradients of every other policy's adapters, cut over the ranks as the model's are

Optimizers are not exchanged: each policy has its own, over the model's parameters.
"""

from collections.abc import Iterable

import torch

from titan_rl.actors.titan.model import TitanModel, local
from titan_rl.wire.seeds import derive


class AdapterBank:
    def __init__(self, model: TitanModel, name: str) -> None:
        """Call what the model has now the adapters of policy `name`."""
        self._model, self.in_use = model, name
        self._parameters = [p for n, p in model.model.named_parameters() if model.adaptation.adds(n)]
        self._values = dict[str, list[torch.Tensor]]()
        self._gradients = dict[str, list[torch.Tensor | None]]()

    @property
    def names(self) -> Iterable[str]:
        return {self.in_use, *self._values}

    def add(self, name: str, seed: int | None = None) -> None:
        """Begin a policy, with adapters that change no output yet. They are drawn from `seed`, as in a run of one
        policy, or else from the run's seed and the name."""
        if name in self.names:
            raise ValueError(f"expected the name of no policy, found {name}")
        self._model.reshard()
        self._put_away()
        self.in_use = name
        own = derive(self._model.config.debug.seed, "policy", name) % 2**63
        self._model.adaptation.begin(self._model.model, own if seed is None else seed)

    @torch.no_grad()
    def use(self, name: str) -> None:
        """Exchange the adapters in the model for a policy's, with their gradients. All ranks do this together."""
        if name == self.in_use:
            return
        values, gradients = self._values.pop(name), self._gradients.pop(name)
        self._model.reshard()  # gathered parameters would be computed with
        self._put_away()
        self.in_use = name
        for parameter, value, gradient in zip(self._parameters, values, gradients, strict=True):
            local(parameter).copy_(value)
            parameter.grad = gradient

    def drop(self, name: str) -> None:
        """Forget a policy that is not in use."""
        del self._values[name], self._gradients[name]

    def _put_away(self) -> None:
        self._values[self.in_use] = [local(parameter).clone() for parameter in self._parameters]
        self._gradients[self.in_use] = [parameter.grad for parameter in self._parameters]
        for parameter in self._parameters:
            parameter.grad = None
