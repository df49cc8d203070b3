"""Declares the built-in advantages and clips: for each its function, its formula, and the keys that it restricts.

The values of algorithm.advantage and algorithm.clip, their --help, the table of advantages in docs/algorithms.md and
most of preflight/checks/algorithm.py follow from these entries. To add a method, add its entry here and its function in
batch/advantages.py or kernels/surrogate.py. algorithms.py has the algorithms, which choose among methods.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from pkgutil import resolve_name
from types import MappingProxyType
from typing import Any, Literal


@dataclass(frozen=True, slots=True)
class Rule:
    """A restriction of another key for as long as a method is chosen."""

    key: str  # in [algorithm]
    allowed: tuple[bool | int | float | str, ...]  # its values; empty: those below `below`
    reason: str
    below: float = 0.0
    beside: str = ""  # the rule applies only where this key of [algorithm] is not 0

    def holds(self, value: Any) -> bool:
        return value in self.allowed if self.allowed else value < self.below


@dataclass(frozen=True, slots=True, kw_only=True)
class Advantage:
    """An estimator of advantages. What `function` is called with depends on `level`:

    reward      a group's rewards, their lengths in tokens, and [algorithm]: it returns a number for each reward
    player      the running means of all players' rewards, the group's player, and the same as "reward"
    group       a group with its samples (batch/experience.py): it returns an array for each sample
    """

    function: str
    summary: str  # for --help
    formula: str
    used_by: str
    level: Literal["reward", "player", "group"] = "reward"
    compares: bool = True  # the samples of a group, so that equal rewards teach nothing
    needs: Literal["", "value", "teacher", "score_norm"] = ""  # the column that another model or pass computes
    scales: tuple[str, ...] = ("none", "batch")  # values of algorithm.normalize
    reads: tuple[str, ...] = ()  # keys of [algorithm] that only some methods read
    rules: tuple[Rule, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Clip:
    """A surrogate of the policy loss: `function` gets Policies and Surrogate (kernels/surrogate.py)."""

    function: str
    formula: str
    reads: tuple[str, ...]  # keys of [algorithm]
    rules: tuple[Rule, ...] = ()


def _advantage(name: str, **keys: Any) -> Advantage:
    return Advantage(function=f"titan_rl.batch.{name}", **keys)


def _clip(name: str, formula: str, reads: tuple[str, ...], *rules: Rule) -> Clip:
    return Clip(function=f"titan_rl.kernels.surrogate:{name}", formula=formula, reads=reads, rules=rules)


NOT_SCALED = {
    "none": "divides by deviations",
    "group": "is not divided by the group's deviation",
    "mean": "is not divided by a mean",
}
NO_PASS_K = Rule("pass_k", (0,), "does not use it")
NO_REWARDS = (
    Rule("credit", ("outcome",), "uses no rewards"),
    Rule("kl_in", ("loss",), "uses no rewards", beside="kl_coef"),
    Rule("overlong_buffer", (0,), "uses no rewards"),
    Rule("length_reward", ("none",), "uses no rewards"),
)
ADVANTAGES: Mapping[str, Advantage] = MappingProxyType(
    {
        "group": _advantage(
            "advantages:of_group",
            summary="its group's mean",
            formula="r - mean of the group",
            used_by="GRPO, Dr.GRPO, DAPO, GSPO",
            scales=("none", "group", "mean", "batch"),
        ),
        "leave_one_out": _advantage(
            "advantages:of_others",
            summary="the others' mean",
            formula="r - mean of the others",
            used_by="RLOO; `group` times n / (n - 1)",
        ),
        "median": _advantage(
            "advantages:over_median",
            summary="its group's median",
            formula="r - median of the group",
            used_by="the baseline of MC-GRPO; of rewards 0 and 1 only the rarer kind learns",
            scales=("none", "group", "batch"),
        ),
        "per_reward": _advantage(
            "experience:of_each_reward",
            level="group",
            summary="of each reward, its group's mean",
            formula="sum_k w_k (r_k - mean of the group's r_k) / (std of the group's r_k + 1e-4)",
            used_by="GDPO",
            scales=("group", "batch"),
            rules=(
                Rule("credit", ("outcome",), "compares the rewards of whole rollouts"),
                Rule("kl_in", ("loss",), "normalizes each reward by itself", beside="kl_coef"),
            ),
        ),
        "pass_at_k": _advantage(
            "advantages:of_best",
            summary="the best of pass_k without it",
            formula="mean over sets S of `pass_k` samples that have i of max(S) - max(S without i)",
            used_by="pass@k",
            reads=("pass_k",),
            scales=("none", "group", "batch"),
        ),
        "length_weighted": _advantage(
            "advantages:of_lengths",
            summary="its group's mean by length",
            formula="r - sum_j l_j r_j / sum_j l_j, l the number of sampled tokens",
            used_by="OPO",
            rules=(Rule("credit", ("outcome",), "weighs rollouts"),),
        ),
        "role_mean": _advantage(
            "experience:over_role_mean",
            level="player",
            summary="its player's running mean",
            formula="r - m, then m = role_decay m + (1 - role_decay) r",
            used_by="RAE (SPIRAL, prime-rl), self-play",
            compares=False,
            reads=("role_decay",),
            rules=(Rule("credit", ("outcome",), "is a mean over whole rollouts"),),
        ),
        "return": _advantage(
            "experience:returns",
            level="group",
            summary="none",
            formula="R_t = r_t + gamma R_{t+1}",
            used_by="REINFORCE++",
            compares=False,
            reads=("gamma",),
        ),
        "greedy": _advantage(
            "experience:over_greedy",
            level="group",
            summary="a greedy answer",
            formula="R_t - reward of the greedy rollout",
            used_by="ReMax",
            compares=False,
            reads=("gamma",),
            rules=(Rule("length_reward", ("none", "target"), "is outside the group"),),
        ),
        "optimal_token": _advantage(
            "experience:over_token_baselines",
            level="group",
            summary="one per token",
            formula="R_t - sum_j W_jt R_jt / sum_j W_jt, "
            "W_t = sum_{s <= t} (1 - 2 p_s + sum over the vocabulary of p^2)",
            used_by="OTB",
            needs="score_norm",
            reads=("gamma",),
        ),
        "gae": _advantage(
            "experience:over_critic",
            level="group",
            summary="a critic",
            formula="A_t = delta_t + gamma lambda A_{t+1}, delta_t = r_t + gamma V_{t+1} - V_t",
            used_by="PPO; V after the last token is 0",
            compares=False,
            needs="value",
            reads=("gamma", "gae_lambda"),
        ),
        "teacher": _advantage(
            "experience:gains",
            level="group",
            summary="a teacher, and no rewards",
            formula="teacher's log-prob - sampling log-prob",
            used_by="on-policy distillation, self-distillation",
            compares=False,
            needs="teacher",
            rules=NO_REWARDS,
        ),
    }
)
OWN = Advantage(
    function="titan_rl.batch.own_advantages:estimate_of",
    level="group",
    summary="a user's function",
    formula="",
    used_by="",
    compares=False,
)


def advantage_of(name: str) -> Advantage:
    """Return the entry of a value of algorithm.advantage."""
    return OWN if ":" in name else ADVANTAGES[name]


NO_DUAL = Rule("dual_clip", (0.0,), "does not use it")
BOUNDS = ("clip_low", "clip_high")
DUAL = (*BOUNDS, "dual_clip")
OF_PROBABILITIES = tuple(Rule(key, (), "bounds the change of a probability", 1.0) for key in BOUNDS)
VESPO = ("vespo_k_positive", "vespo_k_negative", "vespo_lambda_positive", "vespo_lambda_negative")
CLIPS: Mapping[str, Clip] = MappingProxyType(
    {
        "ppo": _clip("ppo", "-min(r A, clip(r, 1 - low, 1 + high) A)", DUAL),
        "cispo": _clip("cispo", "-sg(clip(r, 1 - low, 1 + high)) A logprob_t", BOUNDS),
        "sapo": _clip("sapo", "-4 / tau sigmoid(tau (r - 1)) A", ("sapo_tau_positive", "sapo_tau_negative")),
        "dppo_tv": _clip("dppo_tv", "-sg(min(r, dual_clip)) A logprob_t", DUAL, *OF_PROBABILITIES),
        "dppo_kl": _clip("dppo_kl", "-sg(min(r, dual_clip)) A logprob_t", DUAL),
        "prob_diff": _clip("prob_diff", "-r A", BOUNDS, *OF_PROBABILITIES),
        "gmpo": _clip(
            "gmpo", "-exp(mean_t(log r_t)) A", BOUNDS, Rule("ratio", ("sequence",), "is a mean over each sequence")
        ),
        "vespo": _clip(
            "vespo",
            "-sg(w^k exp(lambda (1 - w))) A logprob_t, w = prod_t r_t",
            VESPO,
            Rule("ratio", ("token",), "multiplies the ratios of a sequence itself"),
        ),
        "clip_cov": _clip(
            "clip_cov", "-min(r A, clip(r, 1 - low, 1 + high) A)", (*BOUNDS, "cov_share", "cov_low", "cov_high")
        ),
        "kl_cov": _clip("kl_cov", "-r A + cov_kl_coef abs(log r_t)", ("cov_share", "cov_kl_coef")),
        "none": _clip("unclipped", "-r A", ()),
    }
)
PAIR_LOSSES: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "dpo": ("beta", "label_smoothing"),
        "ipo": ("beta",),
        "simpo": ("beta", "label_smoothing", "simpo_gamma"),
        "orpo": ("beta",),
        "kto": ("beta", "desirable_weight", "undesirable_weight"),
    }
)
"""The losses of pairs of answers, and the keys of [algorithm] that each reads."""
POSITIVE = "needs rewards of at least 0"
RULES: Mapping[tuple[str, str], tuple[Rule, ...]] = MappingProxyType(
    {
        ("normalize", "mean"): (
            Rule("kl_in", ("loss",), POSITIVE, beside="kl_coef"),
            Rule("overlong_buffer", (0,), POSITIVE),
            Rule("length_reward", ("none",), POSITIVE),
        ),
        ("length_reward", "none"): (Rule("length_target", (0,), "does not use it"),),
        ("length_reward", "kimi"): (Rule("length_target", (0,), "does not use it"),),
    }
)
"""Rules of other keys' values, by (key of [algorithm], value)."""


def rules_of(algorithm: Any) -> list[tuple[str, Rule]]:
    """Return the rules that hold in [algorithm], each after the key whose value makes it hold."""
    advantage = advantage_of(algorithm.advantage)
    scale = Rule("normalize", advantage.scales, NOT_SCALED.get(algorithm.normalize, ""))
    found = [("advantage", rule) for rule in (scale, *advantage.rules)]
    found += [] if "pass_k" in advantage.reads else [("advantage", NO_PASS_K)]
    clip = CLIPS[algorithm.clip]
    found += [] if "dual_clip" in clip.reads else [("clip", NO_DUAL)]
    found += [("clip", rule) for rule in clip.rules]
    for (key, value), rules in RULES.items():
        if getattr(algorithm, key) == value:
            found += [(key, rule) for rule in rules]
    return [(key, rule) for key, rule in found if not rule.beside or getattr(algorithm, rule.beside)]


@cache
def function_of(method: Advantage | Clip) -> Callable[..., Any]:
    return resolve_name(method.function)
