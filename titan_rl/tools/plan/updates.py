"""Estimates the seconds of a step's updates before anything is known of its rollouts: preflight/memory.py chooses by
them how updates are computed."""

from dataclasses import dataclass, replace
from functools import cache

from titan_rl.config.sections import Config
from titan_rl.tools.plan.facts import Gpu, read_facts
from titan_rl.tools.plan.rates import Spread, Work
from titan_rl.tools.plan.roofline import Roofline, filled_places, update_terms
from titan_rl.wire.model_shape import ModelShape

shipped_facts = cache(read_facts)


def card(config: Config, gpu_bytes: int) -> Gpu:
    """Return the card of a run: hosts.gpu if facts.toml has a row for it, or else the nearest in memory, of several the
    first."""
    facts = shipped_facts()
    cards = [gpu for gpu in facts.gpus.values() if gpu.memory_gb]
    nearest = min(cards, key=lambda gpu: abs(gpu.memory_gb * 2**30 - gpu_bytes))
    try:
        found = facts.gpu(config.hosts.gpu) if config.hosts.gpu else nearest
    except ValueError:
        found = nearest
    return replace(found, per_node=config.hosts.slots or found.per_node)


@dataclass(frozen=True)
class UpdateTimes:
    """Times of a model's updates on GPUs of this size, if all answers are as long as they may be."""

    shape: ModelShape
    gpu_bytes: int

    def card(self, config: Config) -> str:
        """Return the name of the card whose rates are taken."""
        return card(config, self.gpu_bytes).name

    def seconds(self, config: Config) -> float:
        """Return the seconds of a step's updates with a resolved config."""
        work, facts = Work(Spread(0.0), Spread(float(answer_tokens(config)))), shipped_facts()
        line = Roofline(config, self.shape, card(config, self.gpu_bytes), facts, work)
        if config.algorithm.kind == "rl":
            return sum(update_terms(line, filled_places(line)).values())
        rows = max(1.0, config.training.global_batch_size / config.parallelism.dp)
        return sum(update_terms(line, rows * config.training.seq_len).values())


def answer_tokens(config: Config) -> int:
    """Return the most tokens that a rollout samples: in several turns what its sequence holds."""
    longest = config.generator.max_model_len or config.training.seq_len
    return longest if config.rollout_code else min(config.rollout.max_new_tokens, longest)
