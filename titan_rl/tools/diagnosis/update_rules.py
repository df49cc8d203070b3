"""Rules about the updates: collapse, rates that are too large or too small, overfitting, non-finite numbers."""

import math
from statistics import fmean

from titan_rl.tools.diagnosis import teacher_rules
from titan_rl.tools.diagnosis.config_rules import begins_before_cuts
from titan_rl.tools.diagnosis.findings import Change, RunFinding, moved, number, percent, rounded
from titan_rl.tools.diagnosis.history import (
    BEFORE,
    GAIN_SIGMAS,
    RECENT,
    SIGMAS,
    SOLVED,
    Jump,
    MetricsHistory,
    is_number,
    jumps,
)
from titan_rl.wire.program import command_of

COLLAPSE_STD = 0.5
"""A drop of the mean reward, in standard deviations of a reward, that no change of the prompts explains."""
ENTROPY_JUMP, ENTROPY_FACTOR = 0.5, 2.0  # nats and factor: learning moves the entropy by less within three steps
ENTROPY_FALL = 0.2  # times the entropy before
GRADIENT_JUMP = 3.0  # times the usual norm
PEAK_STEPS = 20  # steps from which on a slow decline stands out from noise
STILL_STEPS = 30  # steps from which on a score can be called flat
STILL_ENTROPY = 0.08  # relative change of the entropy below which the policy has hardly moved: 30 steps resolve that
STILL_STD = 0.25  # standard deviations of a reward: with a gain that may be larger, a score is not flat yet
CLOSE = 0.05  # nats between policy and teacher that rounding and sampling leave
LOSS_SPIKE = 2.0  # times the first loss, which is the highest in a healthy run
LEAST_RATE = 1e-6  # the lowest that recipes of RL for language models use
LOSS_FACTOR = 1.3  # growth of a supervised loss that no batch explains once SIGMAS are exceeded too


def not_finite(run: MetricsHistory) -> RunFinding | None:
    """Updates that were skipped because a loss or gradient was not finite."""
    bad = [
        line["step"]
        for line in run.lines
        if line.get("updates/skipped") or any(key in line and not is_number(line[key]) for key in ("loss", "grad_norm"))
    ]
    if not bad:
        return None
    several = "s" * (len(bad) > 1)
    where = f"step {bad[0]}" if len(bad) == 1 else f"steps {bad[0]} to {bad[-1]}"
    return RunFinding(
        "not_finite",
        f"{len(bad)} of {len(run.lines)} steps had a loss or gradient{several} that is not finite ({where}), and "
        "changed no weight",
        bad[0],
        bad[-1],
        (_rate(run, run["lr"].at(bad[0]) / 3), Change.of(run.config, "training.mixed_precision_param", "float32")),
        "Look for rewards with extreme values, too: their advantages scale the gradient.",
        level=int(math.log2(len(bad))),
        explains=frozenset(("collapse", "flat", "no_signal", "too_hard", "truncation")),
    )


def collapse(run: MetricsHistory) -> RunFinding | None:
    """Reward or entropy that jumped or declined for good, against the learning rate and the gradient's norm."""
    if not run.samples:
        return _loss_rises(run)
    if run.teacher_only:
        return teacher_rules.astray(run)
    jump = _jump(run)
    if jump is None:
        return _declines(run) or _score_falls(run) or _drifts(run)
    step, entropy = jump.step, run["entropy"]
    moves = _moves(run, step)
    at = run["lr"].between(0, step - 1)
    rate = at[-1] if at else run.config.optimizer.lr
    peak = run.config.optimizer.lr
    warming = f", {rate:.3g} in the step before it" if rate < 0.9 * peak else ""
    before, after = _around(run, "entropy", step)
    falls = after < before
    changes = (_rate(run, rate / 10),)
    advice = f"The {'fall' if falls else 'jump'} follows the updates at that rate at once, so the rate is the first "
    advice += f"suspect{warming}. Start over: these weights do not recover."
    if falls and len(entropy) and not _gradient_jumps(run, step):
        changes += (_entropy_bonus(run),)
    if not falls:
        changes += _no_bonus(run)
    if run.config.algorithm.updates > 1:
        changes += (Change.of(run.config, "algorithm.minibatches", 1),)
    if not run.config.algorithm.kl_coef:
        changes += (_anchor(run),)
    return RunFinding(
        "collapse",
        f"step {step}: {', '.join(moves)}",
        step if falls else begins_before_cuts(run, step),
        run.last,
        changes,
        advice,
        explains=frozenset(
            ("truncation", "no_signal", "too_hard", "constant_reward", "overfit", "flat", "prompts", "slow", "gap",
             "stale", "failures", "solved", "tight_anchor", "grader", "one_answer")
        ),
    )  # fmt: skip


def _jump(run: MetricsHistory) -> Jump | None:
    """Return the first lasting drop of the reward, or jump of the entropy without a gain."""
    std, noise = run.reward_std, run.most_reward_noise
    drops = []
    if math.isfinite(noise):
        drops = [j for j in jumps(run.reward, noise) if j.before - j.after > max(COLLAPSE_STD * std, 1e-9)]
    entropy = run["entropy"]
    wild = []
    scatter = entropy.scatter() if len(entropy) > BEFORE else 0.05 * max(entropy.values, default=0.0)
    for each in jumps(entropy, max(scatter, 1e-6)):
        rises = each.after - each.before > ENTROPY_JUMP and each.after > ENTROPY_FACTOR * each.before
        falls = each.before > ENTROPY_JUMP / 2 and each.after < ENTROPY_FALL * each.before
        before, after = _around(run, "reward/mean", each.step)
        gains = after > before + 1e-6 and after - before > (GAIN_SIGMAS * noise if falls else 0)
        if (rises and not gains) or (falls and not gains and not run.rises):
            wild.append(each)
    return min([*drops, *wild], key=lambda jump: jump.step, default=None)


def _around(run: MetricsHistory, key: str, step: int) -> tuple[float, float]:
    """Return the means of a metric before a step, and from it on. NaN: it is not there."""
    before, after = run[key].between(step - BEFORE, step - 1), run[key].between(step, step + 2)
    return (fmean(before) if before else math.nan, fmean(after) if after else math.nan)


def _moves(run: MetricsHistory, step: int) -> list[str]:
    """Return what changed with a step: the entropy, the reward, the gradient's norm, the KL, the share cut off."""
    found = []
    for name, key, factor in (
        ("entropy", "entropy", 1.5),
        ("reward", "reward/mean", 1.0),
        ("grad_norm", "grad_norm", GRADIENT_JUMP),
        ("KL", "kl/k3", 10.0),
    ):
        before, after = _around(run, key, step)
        if key == "reward/mean" or after > factor * before > 0 or before > factor * after > 0:
            found.append(moved(name, before, after))
    cut = run["completions/clipped_ratio"].between(step, step + 2)
    if cut and max(cut) > 0.1 and max(cut) > 2 * _around(run, "completions/clipped_ratio", step)[0]:
        found.append(f"{percent(max(cut))} cut off")
    return found


def _gradient_jumps(run: MetricsHistory, step: int) -> bool:
    before, after = _around(run, "grad_norm", step)
    return after > GRADIENT_JUMP * before


def _declines(run: MetricsHistory) -> RunFinding | None:
    """A reward that rose or stood, and declined over many steps."""
    reward = run.reward
    if len(reward) < PEAK_STEPS:
        return None
    means = [fmean(reward.values[i : i + RECENT]) for i in range(len(reward) - RECENT + 1)]
    top = max(range(len(means)), key=means.__getitem__)
    drop = means[top] - means[-1]
    # The maximum of many noisy means is too high: by about 2 sigmas of one, for up to a few hundred of them.
    if drop < max((SIGMAS + 2) * run.most_reward_noise / math.sqrt(RECENT), COLLAPSE_STD * run.reward_std, 1e-6):
        return None
    step = reward.steps[min(top + RECENT, len(reward) - 1)]
    entropy = run["entropy"]
    before, now = fmean(entropy.values[:RECENT] or [math.nan]), entropy.recent()
    falls = now < before
    changes = [_rate(run, run.config.optimizer.lr / 3)]
    if falls and now < 0.5 * before:
        changes.append(_entropy_bonus(run))
    if now > 1.5 * before:
        changes += _no_bonus(run)
    if not run.config.algorithm.kl_coef:
        changes.append(_anchor(run))
    return RunFinding(
        "collapse",
        f"the reward fell from {number(means[top])} around step {step - 1} to {number(means[-1])} in the last {RECENT} "
        f"steps, {moved('entropy', before, now)}",
        step,
        run.last,
        tuple(changes),
        "It fell over many steps: a smaller rate, or a KL to the start of RL, keeps it.",
        explains=frozenset(("truncation", "no_signal", "too_hard", "constant_reward", "overfit", "flat", "prompts")),
    )


def _drifts(run: MetricsHistory) -> RunFinding | None:
    """An entropy that grew over many steps to a multiple, without a gain."""
    entropy = run["entropy"]
    if len(entropy) < PEAK_STEPS or run.rises:
        return None
    before, now = fmean(entropy.values[:RECENT]), entropy.recent()
    if now - before < ENTROPY_JUMP or now < ENTROPY_FACTOR * before:
        return None
    since = begins_before_cuts(run, entropy.onset())
    return RunFinding(
        "collapse",
        f"{moved('entropy', before, now)}, rising since step {since}, {moved('reward', *run.reward.thirds())}",
        since,
        run.last,
        (
            _rate(run, run.config.optimizer.lr / 3),
            *_no_bonus(run),
            *(() if run.config.algorithm.kl_coef else (_anchor(run),)),
        ),
        "The policy gets more random, and no better: smaller updates, or a KL to the start of RL, hold it.",
        explains=frozenset(("truncation", "no_signal", "too_hard", "flat", "prompts", "gap", "stale")),
    )


def _score_falls(run: MetricsHistory) -> RunFinding | None:
    """A held-out score that fell far, where the training reward is too noisy to show it."""
    if len(run.scores) < 2 or run.reward_gain[0] > GAIN_SIGMAS * run.reward_gain[1]:
        return None
    best, now = max(run.scores[:-1], key=lambda score: score.value), run.scores[-1]
    if best.value - now.value < SIGMAS * math.hypot(best.error, now.error):
        return None
    rate = (run["lr"].between(best.step + 1, best.step + 1) or [run.config.optimizer.lr])[0]
    (before, after), entropy = run.reward.thirds(), run["entropy"].thirds()
    return RunFinding(
        "collapse",
        f"the held-out score fell from {number(best.value)} at step {best.step} to {number(now.value)} at step "
        f"{now.step}, {moved('reward', before, after)}, {moved('entropy', *entropy)}",
        best.step + 2,  # the first step that an update after `best` sampled
        now.step,
        (_rate(run, rate / 10), *(() if run.config.algorithm.kl_coef else (_anchor(run),))),
        "The updates took away what the policy had: the rate is the first suspect.",
        explains=frozenset(("truncation", "no_signal", "too_hard", "flat", "prompts", "rate_too_small")),
    )


def _entropy_bonus(run: MetricsHistory) -> Change:
    return Change.of(run.config, "algorithm.entropy_coef", max(0.001, 3 * run.config.algorithm.entropy_coef))


def _no_bonus(run: MetricsHistory) -> tuple[Change, ...]:
    return (Change.of(run.config, "algorithm.entropy_coef", 0.0),) if run.config.algorithm.entropy_coef else ()


def _anchor(run: MetricsHistory) -> Change:
    return Change.of(run.config, "algorithm.kl_coef", 0.001)


def _loss_rises(run: MetricsHistory) -> RunFinding | None:
    """A supervised loss or a preference loss that rose for good."""
    loss = run["loss"]
    noise = loss.scatter() if len(loss) > 3 else math.inf
    rises = [j for j in jumps(loss, max(noise, 1e-9)) if j.after > LOSS_FACTOR * j.before > 0]
    step, before, after = (rises[0].step, rises[0].before, rises[0].after) if rises else (0, 0.0, 0.0)
    if not rises and len(loss) > RECENT:
        first, peak = loss.values[0], max(loss.values)
        if peak > LOSS_SPIKE * first > 0 and loss.recent() > first / 2:  # it has come back, and not far
            step, before, after = loss.steps[loss.values.index(peak)], first, peak
    if not step:
        return None
    rate = (run["lr"].between(0, step - 1) or [run.config.optimizer.lr])[-1]
    moves = [moved("loss", before, after)]
    if _gradient_jumps(run, step):
        moves.append(moved("grad_norm", *_around(run, "grad_norm", step)))
    return RunFinding(
        "collapse",
        f"step {step}: {', '.join(moves)}",
        step,
        run.last,
        (_rate(run, rate / 10),),
        "The loss rose right after updates at that rate, so the rate is the first suspect.",
        explains=frozenset(("overfit", "flat")),
    )


def overfit(run: MetricsHistory) -> RunFinding | None:
    """A held-out score that falls while the training reward (or the fit of the data) gets better."""
    if len(run.scores) < 3:
        return None
    best, now = max(run.scores[:-1], key=lambda score: score.value), run.scores[-1]
    fall, error = best.value - now.value, math.hypot(best.error, now.error)
    if fall < (GAIN_SIGMAS + 1) * error:  # 1 more: the best of several scores is too high
        return None
    if run.samples:
        before = [v for s, v in zip(run.reward.steps, run.reward.values, strict=True) if s <= max(best.step, RECENT)]
        was, is_now = fmean(before[-RECENT:]), run.reward.recent()
        if is_now - was < GAIN_SIGMAS * run.reward_noise * math.sqrt(2 / RECENT):
            return None
        how = f"the training reward rose {number(was)} -> {number(is_now)}"
        kl = run.config.algorithm.kl_coef
        changes = (Change.of(run.config, "algorithm.kl_coef", 3 * kl if kl else 0.001),)
        advice = (
            "The reward is won on the training prompts only: overfitting, or a reward that the answers exploit. "
            f"`{command_of('audit')} --rewards RUN` names samples that look exploited; task.grader logs a second "
            "opinion; eval.keep_best keeps the weights of the best score."
        )
    else:
        before, after = run["loss"].thirds()
        if not after < before:
            return None
        how = f"the loss fell {number(before)} -> {number(after)}"
        changes = (Change.of(run.config, "training.steps", best.step),)
        advice = "The data is learnt by heart: stop earlier, use more data, or a smaller rate."
    return RunFinding(
        "overfit",
        f"the held-out score fell from {number(best.value)} at step {best.step} to {number(now.value)} at step "
        f"{now.step}, while {how}",
        best.step + 1,
        now.step,
        changes,
        advice,
        explains=frozenset(("grader",)),
        level=int(10 * fall / max(abs(best.value), 1e-9)) // 3,
    )


def rate_too_small(run: MetricsHistory) -> RunFinding | None:
    """A score that stays where it was because the weights hardly change."""
    rates = run["lr"]
    if len(rates) < STILL_STEPS or run.rises:
        return None
    total = sum(rates.values) * (run.config.algorithm.updates if run.samples else 1)
    late = run.config.lr_scheduler.warmup_steps > len(rates) and max(rates.values) < 0.5 * run.config.optimizer.lr
    if run.teacher_only:
        goal = run.goal.series
        before, after = goal.thirds()
        if abs(after) < CLOSE or abs(before - after) > max(0.02 * abs(before), GAIN_SIGMAS * goal.gain_noise):
            return None
        what = run.goal.moved
    elif run.samples:
        entropy = run["entropy"]
        before, after = entropy.thirds()
        kl = run["kl/k3"].recent()
        still = abs(after - before) + GAIN_SIGMAS * entropy.gain_noise <= STILL_ENTROPY * before
        if not still or not _flat(run) or kl > 1e-4 or run["frac_reward_zero_std"].recent(STILL_STEPS) > 0.9:
            return None
        what = f"reward {number(run.reward.thirds()[0])} -> {number(run.reward.thirds()[1])}, "
        what += moved("entropy", before, after) + (f", KL {number(kl)}" if math.isfinite(kl) else "")
    else:
        loss = run["loss"]
        before, after = loss.thirds()
        if abs(before - after) > max(0.02 * abs(before), GAIN_SIGMAS * loss.gain_noise):
            return None
        what = moved("loss", before, after)
    change = _rate(run, max(10 * max(rates.values), LEAST_RATE))
    if late:
        change = Change.of(run.config, "lr_scheduler.warmup_steps", max(1, len(rates) // 20))
    return RunFinding(
        "rate_too_small",
        f"{len(rates)} steps changed nothing beyond noise ({what}): Adam moves a weight by at most the sum of the "
        f"rates, which is {number(total)} so far; grad_norm {number(run['grad_norm'].recent())}",
        rates.steps[0],
        run.last,
        (change,),
        "Raise it by factors of 3 to 10 until the entropy moves in the first ten steps.",
        explains=frozenset(("flat", "prompts")),
    )


def flat(run: MetricsHistory) -> RunFinding | None:
    """A score that does not rise although the policy changes."""
    if not run.samples or len(run.reward) < STILL_STEPS or run.rises or not _flat(run):
        return None
    if run.reward_level >= SOLVED:
        return None
    gain, noise = run.reward_gain
    return RunFinding(
        "flat",
        f"the reward did not rise in {len(run.reward)} steps: it changed by {gain:+.3f}, and a gain above "
        f"{number(GAIN_SIGMAS * noise)} would show",
        run.last,  # a whole run has no first step of it, and any cause comes before it
        run.last,
        (_rate(run, 3 * max(run["lr"].values, default=run.config.optimizer.lr)),
         Change.of(run.config, "rollout.groups_per_step", 2 * run.config.rollout.groups_per_step)),
        "The policy changes, and no better answers follow: read good and bad answers of one prompt next to each other.",
    )  # fmt: skip


def _flat(run: MetricsHistory) -> bool:
    """Return True if the reward may not have gained more than a little, noise included."""
    gain, _ = run.reward_gain
    noise = run.most_reward_noise * math.sqrt(2 / max(1, len(run.reward) // 3))
    return gain + (GAIN_SIGMAS + 1) * noise <= max(STILL_STD * run.reward_std, 1e-9)


def _rate(run: MetricsHistory, value: float) -> Change:
    return Change.of(run.config, "optimizer.lr", rounded(value if is_number(value) else run.config.optimizer.lr / 10))
