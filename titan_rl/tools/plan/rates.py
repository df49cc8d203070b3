"""Rates of a run's parts, which the simulator needs: roofline.py computes them from data sheets, measured.py takes them
from a finished run.
"""

import math
from dataclasses import dataclass, field
from statistics import NormalDist
from typing import Any

import numpy as np

from titan_rl.config.auto import threads
from titan_rl.config.sections import Config
from titan_rl.wire.cores import usable_cores
from titan_rl.wire.seeds import derive


@dataclass(frozen=True, slots=True)
class Spread:
    """A log-normal distribution of seconds or tokens, cut off at `most`."""

    mean: float
    deviation: float = 0.0
    most: float = math.inf

    def draw(self, *path: object) -> float:
        """Return the number of this path, whose parts are seeds and names: always the same."""
        return self.quantile((derive(0, *path) + 0.5) / 2**63)

    def quantile(self, share: float) -> float:
        """Return the number below which this share of the distribution lies."""
        if not self.deviation or not self.mean:
            return min(self.mean, self.most)
        variance = math.log1p((self.deviation / self.mean) ** 2)
        normal = NormalDist().inv_cdf(share)
        return min(self.mean * math.exp(math.sqrt(variance) * normal - variance / 2), self.most)


NOTHING = Spread(0.0)


@dataclass(frozen=True, slots=True)
class EngineRates:
    """Seconds of one replica. A decode step of n sequences takes the device
    step_s + max(read_s(n), n * sequence_s) + tokens * context_s, and the host gap_s + n * host_s: one after the other,
    or at the same time if the host works `ahead` (generator.async_scheduling)."""

    step_s: float  # at any batch: launches; of a measured run the host's part too
    weights_s: float = 0.0  # at least, of its products: the weights that every token meets are read once
    sequence_s: float = 0.0  # products of one sequence's token
    context_s: float = 0.0  # keys and values of one token
    prefill_s: float = 0.0  # one token of a prompt that is not cached
    cached_tokens: int = 0  # keys and values that fit; 0: no limit
    block: int = 1  # tokens; contexts share whole blocks
    start_s: float = 60.0  # until a new replica serves
    cores: float = 0.0  # that it keeps busy, of Rates.cores
    gap_s: float = 0.0  # scheduler and outputs of a step
    host_s: float = 0.0  # scheduler and outputs of one sequence
    ahead: bool = False
    experts_s: float = 0.0  # all experts are read once
    passed_over: float = 0.0  # share of the experts that a token does not meet

    def read_s(self, n: Any) -> Any:
        """Return the seconds in which a step of n tokens reads its weights. It reads an expert if a token meets it; the
        router chooses all with equal chances. `n` may be an array."""
        return self.weights_s + self.experts_s * (1 - self.passed_over**n)

    def device_s(self, n: Any, tokens: Any) -> Any:
        """Return the device's seconds of a step of n sequences with `tokens` in the cache. Both may be arrays."""
        return self.step_s + np.maximum(self.read_s(n), n * self.sequence_s) + tokens * self.context_s

    def waited_s(self, n: Any, tokens: Any) -> Any:
        """Return the seconds of such a step in which the device waits for the host."""
        host_s = self.gap_s + n * self.host_s
        return np.maximum(0.0, host_s - self.device_s(n, tokens)) if self.ahead else host_s


@dataclass(frozen=True, slots=True)
class TrainerRates:
    """Seconds of one dp row."""

    update_s: float  # gradient norm, optimizer
    microbatch_s: float = 0.0  # launches, gathers that nothing hides
    place_s: float = 0.0  # forward and backward of one place of a row, also an empty one
    score_s: float = 0.0  # forward of one place: reference, teacher, critic, proximal
    cores: float = 0.0


@dataclass(frozen=True, slots=True)
class SyncRates:
    publish_s: float  # trainers pack: they wait
    fetch_s: float  # replicas fetch, and sample meanwhile
    switch_s: float  # replicas write and verify: they stop sampling


@dataclass(frozen=True, slots=True)
class Rates:
    engine: EngineRates
    trainer: TrainerRates
    sync: SyncRates
    judge: Spread = NOTHING  # seconds of a group's rewards
    environment: Spread = NOTHING  # seconds of a turn
    step_s: float = 0.0  # the controller's seconds in each step: packing, log lines, snapshot
    cores: float = math.inf  # that all parts share, if they are on one machine


def threads_of(config: Config) -> tuple[int, int]:
    """Return the threads of each engine and of each trainer on this machine's cores."""
    cores = usable_cores()
    return threads(config, "generator", "cpu", cores), threads(config, "model", "cpu", cores)


@dataclass(frozen=True, slots=True)
class Work:
    """Tokens of a run's rollouts."""

    prompt: Spread
    answer: Spread  # sampled in each turn
    turns: Spread = field(default_factory=lambda: Spread(1.0))
    observation: Spread = NOTHING  # that the environment adds after a turn
