"""Metrics of runs, as runs write them, with the noise of their groups: what tools/diagnosis reads."""

import math
import random
from collections.abc import Callable, Mapping
from typing import Any

from titan_rl.config.sections import Config
from titan_rl.config.toml import find, load

Line = dict[str, Any]


def config(name: str = "grpo_llama", **keys: Any) -> Config:
    return load(find(name), [(key.replace("__", "."), str(value)) for key, value in keys.items()])


def ramp(first: float, last: float) -> Callable[[float], float]:
    return lambda share: first + (last - first) * share


LEARNING, FALLING, SOME_DEAD = ramp(0.3, 0.6), ramp(0.6, 0.4), ramp(0.45, 0.5)


def metrics(
    steps: int,
    cfg: Config,
    *,
    seed: int = 0,
    reward: Callable[[float], float] = LEARNING,
    entropy: Callable[[float], float] = FALLING,
    dead: Callable[[float], float] = SOME_DEAD,
    score: Callable[[float], float] | None = None,
    problems: int = 64,
    every: int = 4,
    change: Callable[[int, Line], Mapping[str, Any]] = lambda step, line: {},
) -> list[Line]:
    """Return the lines of a run with rewards of 0 and 1. `change` returns the values that differ in a step."""
    draw = random.Random(seed)
    groups = cfg.rollout.groups_per_step
    lines: list[Line] = [{"kind": "startup", "step": 0, "time": 0.0, "time/startup": 5.0}]
    if score:
        lines.append(evaluated(0, score(0.0), problems, draw))
    for step in range(1, steps + 1):
        share = (step - 1) / max(1, steps - 1)
        mean = reward(share)
        right = clamp(draw.gauss(mean, math.sqrt(max(mean * (1 - mean), 0) * 0.6 / groups)))  # 0.6: prompts differ
        signal = clamp(draw.gauss(dead(share), math.sqrt(0.25 / groups)))
        line: Line = {
            "kind": "rl",
            "step": step,
            "time": float(step),
            "time/step": draw.uniform(6, 9),
            "time/generate": draw.uniform(3, 4),
            "time/train": draw.uniform(2, 3),
            "time/sync": 0.1,
            "time/judge": 0.0,
            "time/wait": draw.uniform(0, 0.5),
            "reward/mean": right,
            "reward/std": math.sqrt(right * (1 - right)),
            "frac_reward_zero_std": round(signal * groups) / groups,
            "completions/mean_length": draw.gauss(8, 0.5),
            "completions/max_length": 16.0,
            "completions/clipped_ratio": clamp(draw.gauss(0.02, 0.02)),
            "entropy": entropy(share) * draw.gauss(1, 0.06),
            "grad_norm": draw.uniform(0.4, 1.6),
            "lr": cfg.optimizer.lr,
            "loss": draw.gauss(0, 0.01),
            "updates/skipped": 0.0,
            "logprob_gap/mean": 1e-5 * draw.uniform(0.8, 1.2),
            "logprob_gap/max": 1e-4,
            "logprob_gap/mult": 1.00001,
            "policy_age/mean": 0.0,
            "policy_age/max": 0.0,
            "off_policy/ess": 1.0,
            "clip_ratio/low": 0.0,
            "clip_ratio/high": 0.0,
            "rollouts/failed": 0.0,
        }
        if score and (step % every == 0 or step == steps):
            line |= {k: v for k, v in evaluated(step, score(share), problems, draw).items() if k.startswith("eval/")}
        lines.append({**line, **change(step, line)})
    return lines


def evaluated(step: int, share: float, problems: int, draw: random.Random) -> Line:
    value = round(clamp(draw.gauss(share, math.sqrt(share * (1 - share) / problems) / 2)) * problems) / problems
    half = 1.96 * math.sqrt(max(value * (1 - value), 1 / problems) / problems)
    return {"kind": "eval", "step": step, "eval/score": value, "eval/low": value - half, "eval/high": value + half}


def clamp(value: float) -> float:
    return min(1.0, max(0.0, value))
