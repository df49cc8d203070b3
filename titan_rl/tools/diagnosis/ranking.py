"""Runs the rules, ranks their findings, and puts each effect under its cause.

    history ── rules, in the order of RULES ──> findings ── effects under causes ──> causes, first suspect first

An effect does not begin before its cause, so a cut-off answer explains a reward of 0 from the start on, and a collapse
at step 40 explains answers that are cut off since step 41.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from titan_rl.tools.diagnosis import (
    config_rules,
    engine_rules,
    exploit_rules,
    signal_rules,
    teacher_rules,
    update_rules,
)
from titan_rl.tools.diagnosis.findings import RunFinding, number, percent
from titan_rl.tools.diagnosis.history import RECENT, MetricsHistory

FEW_STEPS = 10  # below it the thirds have three steps each
Rule = Callable[[MetricsHistory], RunFinding | None]

RULES: Sequence[Rule] = (
    update_rules.not_finite,
    signal_rules.failures,
    signal_rules.noise_sampling,
    config_rules.cold_sampling,
    config_rules.entropy_bonus,
    engine_rules.routes,
    engine_rules.gap,
    engine_rules.stale,
    update_rules.collapse,
    signal_rules.truncation,
    signal_rules.constant_reward,
    signal_rules.format_part,
    signal_rules.too_hard,
    signal_rules.solved,
    teacher_rules.uncovered,
    config_rules.tight_anchor,
    signal_rules.no_signal,
    update_rules.overfit,
    exploit_rules.grader,
    exploit_rules.one_answer,
    update_rules.rate_too_small,
    signal_rules.prompts,
    update_rules.flat,
    engine_rules.slow,
    engine_rules.drafts,
)
TEACHER_RULES: Sequence[Rule] = (
    update_rules.not_finite,
    signal_rules.failures,
    config_rules.entropy_bonus,
    engine_rules.routes,
    engine_rules.gap,
    engine_rules.stale,
    update_rules.collapse,
    signal_rules.truncation,
    teacher_rules.uncovered,
    update_rules.rate_too_small,
    engine_rules.slow,
    engine_rules.drafts,
)
"""For runs that learn from a teacher without rewards."""
FIT_RULES: Sequence[Rule] = (
    update_rules.not_finite,
    update_rules.collapse,
    update_rules.overfit,
    update_rules.rate_too_small,
    engine_rules.slow,
)


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """The causes of a run, ranked, and what the rules could check."""

    findings: tuple[RunFinding, ...]
    checked: tuple[str, ...]  # names of the rules
    limits: tuple[str, ...] = ()  # what too few numbers cannot show

    @property
    def problems(self) -> tuple[RunFinding, ...]:
        return tuple(finding for finding in self.findings if finding.problem)


def diagnose(run: MetricsHistory) -> Diagnosis:
    """Return the causes, problems first, each with its effects."""
    rules = TEACHER_RULES if run.teacher_only else RULES if run.samples else FIT_RULES
    if not run.lines:
        return Diagnosis((), (), ("no step was made yet",))
    found = [finding for rule in rules if (finding := rule(run)) is not None]
    causes = _causes(found)
    causes.sort(key=lambda finding: not finding.problem)  # stable: the order of the rules decides
    return Diagnosis(tuple(causes), tuple(rule.__name__.replace("_", " ") for rule in rules), _limits(run))


def _causes(found: Sequence[RunFinding]) -> list[RunFinding]:
    """Put each effect under the first finding that explains it."""
    order = {finding.rule: place for place, finding in enumerate(found)}

    def caused(cause: RunFinding, effect: RunFinding) -> bool:
        if effect.rule not in cause.explains or cause.since > effect.since or (effect.problem and not cause.problem):
            return False
        mutual = cause.rule in effect.explains and effect.since == cause.since
        return not mutual or order[cause.rule] < order[effect.rule]

    parent = {f.rule: next((c.rule for c in found if c is not f and caused(c, f)), "") for f in found}

    def top(rule: str) -> str:
        return top(parent[rule]) if parent[rule] else rule

    return [
        replace(finding, effects=tuple(f for f in found if f is not finding and top(f.rule) == finding.rule))
        for finding in found
        if not parent[finding.rule]
    ]


def _limits(run: MetricsHistory) -> tuple[str, ...]:
    limits = []
    steps, scores = len(run.lines), len(run.scores)
    if steps < FEW_STEPS:
        limits.append(f"{steps} steps are too few to tell a trend from noise: {FEW_STEPS} or more would show one")
    if run.samples and not run.teacher_only and len(run.reward) > 1:
        _, noise = run.reward_gain
        if noise:
            limits.append(f"a change of the mean reward below {number(2 * noise)} cannot be seen in {steps} steps")
    if scores > 1:
        wide = 2 * (run.scores[0].error ** 2 + run.scores[-1].error ** 2) ** 0.5
        limits.append(f"a change of the held-out score below {number(wide)} is within its two 95% intervals")
    elif scores <= 1 and run.config.evaluates:
        limits.append(f"{scores} evaluation{'s' * (scores != 1)}: eval.interval sets their distance")
    return tuple(limits)


def measured(run: MetricsHistory) -> str:
    """Return the numbers that the rules looked at, as they are now."""
    found = []
    for name, key, shown in (
        ("cut off", "completions/clipped_ratio", percent),
        ("groups with signal", "frac_reward_zero_std", lambda share: percent(1 - share)),
        ("entropy", "entropy", number),
        ("grad_norm", "grad_norm", number),
        ("log-prob gap", "logprob_gap/mean", number),
        ("age", "policy_age/mean", number),
        ("clipped tokens", "clip_ratio/high", percent),
        ("learning rate", "lr", number),
        ("seconds per step", "time/step", number),
    ):
        if len(run[key]):
            found.append(f"{name} {shown(run[key].recent())}")
    return ", ".join(found)


def progress(run: MetricsHistory) -> str:
    """Return how the scores moved, in one line."""
    parts = []
    if run.teacher_only and len(run.goal.series) > 1:
        goal = run.goal.series
        parts.append(f"{run.goal.moved} ({'beyond' if abs(goal.gain) > 2 * goal.gain_noise else 'within'} noise)")
    elif run.samples and len(run.reward) > 1:
        gain, noise = run.reward_gain
        before, after = run.reward.thirds()
        parts.append(
            f"reward {number(before)} -> {number(after)} ({'beyond' if abs(gain) > 2 * noise else 'within'} noise)"
        )
    elif len(run["loss"]) > 1:
        before, after = run["loss"].thirds()
        parts.append(f"loss {number(before)} -> {number(after)}")
    if run.scores:
        first, last = run.scores[0], run.scores[-1]
        parts.append(f"held-out {number(first.value)} at step {first.step}")
        if last is not first:
            parts[-1] += f" -> {number(last.value)} at step {last.step}"
    return ", ".join(parts) or f"{len(run.lines)} steps (recent: {RECENT})"
