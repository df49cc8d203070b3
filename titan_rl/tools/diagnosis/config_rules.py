"""Rules that read a key of the config against the curves that show its effect."""

import math
from statistics import fmean

from titan_rl.tools.diagnosis.findings import Change, RunFinding, moved, number, percent, rounded
from titan_rl.tools.diagnosis.history import RECENT, SIGMAS, SOLVED, MetricsHistory, Series

COLD = 0.5  # temperature below which siblings are much alike: recipes for RL use 0.6 to 1.2
SURE = 0.15  # nats of entropy at the start that leave nothing to choose between
LONG_ENOUGH = 10  # steps after which a rise of the score would show
ALIKE = 0.8  # share of groups with equal rewards: half is usual
BONUS_GROWTH, BONUS_NATS = 1.3, 0.15
"""Factor and nats by which the entropy must have grown: learning lowers it."""
STRONG_BONUS = 0.02  # recipes use 0.001 to 0.01: with them a rate that is too high is the first suspect
TIGHT = 0.1  # KL coefficient above recipes: they use 0.001 to 0.04
PINNED = 0.01  # nats per token of KL to the reference: policies that learn move farther
OUTWEIGHS = 0.2  # cost of the KL per token: advantages, mostly within 1, have to pay for it
PINNED_STEPS = 30  # steps after which a policy that learns has moved
NO_RATE = 1e-7  # below it the rate alone explains that nothing moves


def cold_sampling(run: MetricsHistory) -> RunFinding | None:
    """A temperature so low that the answers to a prompt are nearly the same."""
    entropy, temperature = run["entropy"], run.config.rollout.temperature
    if temperature >= COLD or not len(entropy) or run.rises or run.reward_level >= SOLVED:
        return None
    first, dead = fmean(entropy.values[:2]), run["frac_reward_zero_std"].recent()
    sure = first < SURE and len(entropy) >= LONG_ENOUGH
    if not sure and not (dead >= ALIKE and first < 2 * SURE):
        return None
    equal = f", {percent(dead)} of the groups have equal rewards" if math.isfinite(dead) else ""
    return RunFinding(
        "cold_sampling",
        f"rollout.temperature = {temperature:g}: the entropy is {number(first)} nats from step {entropy.steps[0]} on"
        f"{equal}",
        entropy.steps[0],
        run.last,
        (Change.of(run.config, "rollout.temperature", 1.0),),
        "Answers that are nearly the same cannot be compared, and trainers divide by the temperature too. Sample at "
        "about 1; evaluations have their own temperature.",
        explains=frozenset(
            ("no_signal", "collapse", "flat", "rate_too_small", "prompts", "too_hard", "gap", "stale", "overfit")
        ),
    )


def entropy_bonus(run: MetricsHistory) -> RunFinding | None:
    """An entropy bonus that outweighs the rewards."""
    entropy, adapted = run["entropy"], run["entropy_coef"]
    algorithm = run.config.algorithm
    weight = max(adapted.values, default=0.0) if algorithm.entropy_target else algorithm.entropy_coef
    if weight < STRONG_BONUS or len(entropy) < 4 or run.rises:
        return None
    first, now = fmean(entropy.values[:2]), entropy.recent(3)
    if now < max(BONUS_GROWTH * first, first + BONUS_NATS, first + SIGMAS * entropy.scatter() / math.sqrt(2)):
        return None
    since = begins_before_cuts(run, entropy.onset())
    key = "algorithm.entropy_coef_max" if algorithm.entropy_target else "algorithm.entropy_coef"
    return RunFinding(
        "entropy_bonus",
        f"{key} = {weight:g}: {moved('entropy', first, now)}, rising since step {since}, and the "
        f"{_goal(run)} does not rise",
        since,
        run.last,
        (Change.of(run.config, key, rounded(min(weight / 30, 0.001))),),
        "The bonus is worth more than the rewards, so the policy learns to be random: answers lose their form and run "
        "into the limit of tokens. Recipes use 0 to 0.01.",
        explains=frozenset(
            ("truncation", "collapse", "no_signal", "too_hard", "constant_reward", "flat", "prompts", "overfit", "gap",
             "stale", "slow", "format", "failures", "rate_too_small", "grader", "one_answer")
        ),
    )  # fmt: skip


def begins_before_cuts(run: MetricsHistory, since: int) -> int:
    """Return when a rise of the entropy began that is seen from step `since` on: with the cuts, if answers began to be
    cut off a little earlier. Cuts do not raise the entropy; random answers miss their end."""
    cut = run["completions/clipped_ratio"]
    if not len(cut) or max(cut.values[:2]) >= CUT_BEGINS or cut.recent() < CUT_BEGINS:
        return since
    began = cut.since(lambda value: value >= CUT_BEGINS)
    return began if since - RECENT <= began < since else since


CUT_BEGINS = 0.15  # share of answers cut off from which `truncation` dates itself


def tight_anchor(run: MetricsHistory) -> RunFinding | None:
    """A KL penalty that holds the policy at the reference."""
    algorithm = run.config.algorithm
    weight, rates = algorithm.kl_coef, run["lr"]
    kl = _kl(run)
    if weight < TIGHT or not len(kl) or len(run.lines) < PINNED_STEPS or run.rises:
        return None
    distance = abs(kl.recent())
    if not (distance < PINNED or weight * distance > OUTWEIGHS) or max(rates.values, default=math.inf) < NO_RATE:
        return None
    before, after = run.reward.thirds()
    if run.reward_level >= SOLVED or run["frac_reward_zero_std"].recent(PINNED_STEPS) > 0.9:
        return None
    return RunFinding(
        "tight_anchor",
        f"algorithm.kl_coef = {weight:g} holds the policy at the reference: KL {number(distance)} nats per token, "
        f"which costs {number(weight * distance)}, after {len(run.lines)} steps, {moved('reward', before, after)}",
        kl.steps[0],
        run.last,
        (Change.of(run.config, "algorithm.kl_coef", 0.001),),
        "A change that the rewards ask for costs more than it earns. Recipes use 0 to 0.04.",
        explains=frozenset(("flat", "rate_too_small", "prompts", "no_signal")),
    )


def _kl(run: MetricsHistory) -> Series:
    return next((run[f"kl/{kind}"] for kind in ("k3", "k2", "k1") if len(run[f"kl/{kind}"])), run["kl/k3"])


def _goal(run: MetricsHistory) -> str:
    return run.goal.name if run.teacher_only else "reward"
