"""Training objectives, one function per kind: a forward, then a loss from kernels/."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

from titan_rl.actors.titan.entropy_control import EntropyControl
from titan_rl.actors.titan.model import DeviceRows, TitanModel, shared_keys
from titan_rl.config.sections import AlgorithmSection, Config
from titan_rl.kernels.off_policy import OffPolicy
from titan_rl.kernels.policy_loss import Tokens, policy_loss, supervised_loss
from titan_rl.kernels.statistics import Loss
from titan_rl.kernels.surrogate import Surrogate
from titan_rl.kernels.value_loss import value_loss
from titan_rl.wire.parts import needed_part
from titan_rl.wire.types import Batch
from titan_rl.wire.user_functions import load

VALUE_CLIP = 0.2
"""Maximum change of the critic's value of a token within one step."""


@dataclass(frozen=True, slots=True)
class Objectives:
    model: TitanModel
    config: Config
    entropy: EntropyControl | None = None

    def named(self, kind: str) -> Callable[[DeviceRows, Batch], Loss]:
        if kind == "preference" or (kind == "rl" and self.config.algorithm.online_pairs):
            return self.pairs("losses of pairs")
        if kind == "reward":
            return self.pairs("losses of reward models")
        return {"supervised": self.supervised, "rl": self.policy, "value": self.value}[kind]

    def supervised(self, rows: DeviceRows, batch: Batch) -> Loss:
        logprob, entropy = self.model.logprobs(rows, temperature=1.0)
        return supervised_loss(logprob, entropy, rows.mask, rows.weights)

    def policy(self, rows: DeviceRows, batch: Batch) -> Loss:
        algorithm = self.config.algorithm
        entropy_coef = self.entropy.coef if self.entropy else algorithm.entropy_coef
        logprob, entropy, *divergence = self.model.logprobs(
            rows, temperature=self.config.rollout.temperature, with_entropy_grad=entropy_coef > 0
        )
        proximal = rows.columns.get("proximal")
        if proximal is None and algorithm.proximal == "trainer":
            proximal = logprob.detach()  # one update a step: the policy before it is the policy in it
        tokens = Tokens(
            behaviour=rows.columns["behaviour"],
            advantage=rows.columns["advantage"],
            mask=rows.mask,
            weight=rows.weights,
            sequence=rows.sequences,
            sequences=rows.count,
            proximal=proximal,
            reference=rows.columns.get("reference"),  # a KL in the reward is measured here too
            divergence=next(iter(divergence), None),
            own_loss=batch.loss or loaded_loss(algorithm.loss),
            image=rows.columns.get("image"),
        )
        return policy_loss(logprob, entropy, tokens, surrogate_of(algorithm, entropy_coef))

    def pairs(self, part: str) -> Callable[[DeviceRows, Batch], Loss]:
        """Return an objective over pairs, which is an optional part."""
        return partial(needed_part(part, "algorithm.name"), self.model, self.config)

    def value(self, rows: DeviceRows, batch: Batch) -> Loss:
        return value_loss(
            self.model.values(rows),
            old_T=rows.columns["value"],
            return_T=rows.columns["return"],
            mask_T=rows.mask,
            weight_T=rows.weights,
            clip=VALUE_CLIP,
        )


@cache
def loaded_loss(name: str) -> Callable[..., Any] | None:
    """Return the user's loss that a config names, if it names one."""
    return load(name, "algorithm.loss") if name else None


def surrogate_of(a: AlgorithmSection, entropy_coef: float) -> Surrogate:
    off_policy = shared_keys(OffPolicy, a, weight=a.correction, low=a.correction_low, high=a.correction_high)
    kl_coef = a.kl_coef if a.kl_in == "loss" else 0.0
    return shared_keys(Surrogate, a, kl_coef=kl_coef, entropy_coef=entropy_coef, off_policy=off_policy)
