"""Rules about learning from a teacher without rewards: its distance is what a run makes smaller."""

from titan_rl.tools.diagnosis.findings import Change, RunFinding, moved, percent, rounded
from titan_rl.tools.diagnosis.history import MetricsHistory, jumps

COVERED = 0.1  # share of the answers with a privileged context below which a step has hardly a signal
TOO_LONG = 0.5  # share of the answers whose privileged prompt does not fit
AWAY = 0.3  # growth of the distance to the teacher, as a share, that no batch explains


def uncovered(run: MetricsHistory) -> RunFinding | None:
    """Answers for which the teacher has nothing to read that the policy has not."""
    covered, algorithm = run["distill/covered"], run.config.algorithm
    if not algorithm.teacher_context or len(covered) < 2 or covered.recent() >= COVERED:
        return None
    since, long = covered.since(lambda value: value < COVERED), run["distill/too_long"].recent()
    changes = [Change("algorithm.teacher_context", "a text that these answers have", algorithm.teacher_context)]
    if long > TOO_LONG:
        changes.insert(0, Change.of(run.config, "training.seq_len", 2 * run.config.training.seq_len))
    return RunFinding(
        "uncovered",
        f"the teacher reads more than the policy for {percent(covered.recent())} of the answers since step {since}"
        + (f"; for {percent(long)} it is too long" if long > TOO_LONG else ""),
        since,
        run.last,
        tuple(changes),
        "The other answers teach nothing: their teacher is the policy itself.",
        explains=frozenset(("rate_too_small", "flat", "no_signal")),
    )


def astray(run: MetricsHistory) -> RunFinding | None:
    """Return a collapse if the policy moved away from its teacher for good."""
    name, goal, sign = run.goal
    if len(goal) < 4:
        return None
    found = jumps(goal, max(goal.scatter(), 1e-6))
    falls = [each for each in found if max(each.after, goal.recent()) < each.before - AWAY * abs(each.before)]
    if not falls:
        return None
    step = falls[0].step
    rate = (run["lr"].between(0, step - 1) or [run.config.optimizer.lr])[-1]
    return RunFinding(
        "collapse",
        f"step {step}: {moved(name, sign * falls[0].before, sign * goal.recent())}, "
        f"{moved('entropy', *run['entropy'].thirds())}",
        step,
        run.last,
        (Change.of(run.config, "optimizer.lr", rounded(rate / 10)),),
        "The policy moved away from its teacher right after updates at that rate, so the rate is the first suspect.",
        explains=frozenset(("truncation", "stale", "gap", "flat", "slow")),
    )
