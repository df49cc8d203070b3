"""Which faults are injected into a run, and when: a pure function of a seed, the run's ranks and its steps."""

import random
from collections.abc import Collection
from dataclasses import dataclass
from typing import Literal, get_args

from titan_rl.wire.seeds import derive

Kind = Literal[
    "kill",
    "stop",
    "pair",
    "server",
    "slow",
    "error",
    "drop",
    "corrupt",
    "disk",
    "poison",
    "crash",
    "freeze",
    "preempt",
    "full",
    "second",
]

DOCS: dict[Kind, str] = {
    "kill": "SIGKILL",
    "stop": "SIGSTOP without SIGCONT",
    "pair": "SIGKILL of a trainer rank and of a generator rank at the same moment",
    "server": "the fork server of a rank is killed, and its ranks with it; or it is stopped, and the rank is killed",
    "slow": "bursts of SIGSTOP and SIGCONT, too short to count as a hang: no process may be replaced",
    "error": "an exception in one of the rank's endpoints",
    "drop": "a generator's read of the weights never returns",
    "corrupt": "generator: weights are damaged once while they are written; trainer: they are damaged in its staging "
    "memory, so that reading again does not help",
    "disk": "a trainer rank cannot write its part of a checkpoint for some seconds",
    "poison": "a generator refuses one request, as it does one that it cannot sample: no process may be replaced",
    "crash": "SIGKILL of the controller, and the same command again",
    "freeze": "SIGSTOP of the controller for longer than fault.hang_seconds: no process may be replaced",
    "preempt": "SIGTERM to the controller, its process group or every process, and the same command again: no finished "
    "step may be lost",
    "full": "the controller can write no file, which ends the run by name, and the same command again",
    "second": "the same command again while the run lasts, also with --job.fresh: both must be refused",
}
KINDS = get_args(Kind)

CONTROLLER = "controller"  # a victim like the ranks, but it replaces them
ENDING: tuple[Kind, ...] = ("crash", "preempt", "full")  # the run ends, and is started again
VICTIMS: dict[Kind, tuple[str, ...]] = {
    **{
        "pair": ("trainer",),
        "server": ("generator", "trainer"),
        "drop": ("generator",),
        "corrupt": ("generator", "trainer"),
        "disk": ("trainer", "critic"),
    },
    **{"poison": ("generator",), "freeze": (CONTROLLER,), "second": (CONTROLLER,)},
    **dict.fromkeys(ENDING, (CONTROLLER,)),
}
"""Roles that a fault can have as victims; other faults can have any rank."""
POINTS = {
    "generator": ("step", "read"),
    "trainer": ("step", "publish"),
    "critic": ("step", "scores"),
    "environment": ("begin", "take"),
}
TARGETS = ("controller", "group", "all")  # processes that a preemption signals
SIGNALS = ("kill", "stop")  # for a fork server
FROZEN_POINTS = ("scores",)
"""Failpoints at which an exception may be raised. Saving a checkpoint is none: "disk" is its fault."""
FIRST, LAST = 0.05, 0.85  # share of the steps: the run must recover from the last fault before it ends
DELAY_SECONDS = 0.3  # longest delay within the step


@dataclass(frozen=True, slots=True)
class Fault:
    kind: Kind
    victim: str  # "trainer[dp=1 tp=0]"
    step: int  # earliest step
    delay: float  # seconds, within the step
    point: str = ""  # failpoint of an error, target of a preemption, signal for a fork server

    @property
    def role(self) -> str:
        return role_of(self.victim)

    @property
    def mesh(self) -> str:
        """Role of the victim as incidents name it: "generator1"."""
        return self.victim.partition("[")[0]

    @property
    def what(self) -> str:
        return f"{self.kind} ({self.point})" if self.point else self.kind


def role_of(rank: str) -> str:
    """Return the role of a rank: "generator" for "generator1[tp=0]"."""
    return rank.partition("[")[0].rstrip("0123456789")


def cases(ranks: Collection[str], only: Collection[str] = ()) -> list[tuple[Kind, str]]:
    """Return the possible faults of each role, or only those in `only`: "kill" or "kill:trainer"."""
    roles = sorted({role_of(rank) for rank in ranks})
    sharded = any(rank.startswith("generator") and "tp=1" in rank for rank in ranks)  # one rank cannot refuse alone
    every: list[tuple[Kind, str]] = [
        (kind, role)
        for kind in KINDS
        for role in [*roles, CONTROLLER]
        if role in VICTIMS.get(kind, roles)
        and not (kind == "poison" and sharded)
        and not (kind == "pair" and "generator" not in roles)
    ]
    return [(kind, role) for kind, role in every if not only or kind in only or f"{kind}:{role}" in only]


def problems(count: int, roles: Collection[str], steps: int, only: Collection[str] = ()) -> list[str]:
    """Return the reasons why `count` faults cannot be scheduled."""
    every, at = cases(roles), eligible(steps)
    known = list(dict.fromkeys([kind for kind, _ in every] + [f"{kind}:{role}" for kind, role in every]))
    found = [
        f"--only {part}: expected a fault that this run can have: {', '.join(known)}"
        for part in only
        if part not in known
    ]
    if count < 0:
        found.append(f"--kills: expected at least 0, found {count}")
    if len(at) < count:
        found.append(
            f"{count} faults: expected at least {count} steps from {at.start} to {at.stop - 1}, of {steps}; "
            "lower --kills or raise --training.steps"
        )
    return found


def eligible(steps: int) -> range:
    return range(max(2, round(FIRST * steps)), round(LAST * steps) + 1)


def schedule(seed: int, count: int, ranks: Collection[str], steps: int, only: Collection[str] = ()) -> list[Fault]:
    """Return `count` faults at different steps. Every case is drawn once before any is drawn again."""
    rng = random.Random(derive(seed, "chaos"))
    every, undrawn, drawn = cases(ranks, only), list[tuple[Kind, str]](), list[Fault]()
    for step in sorted(rng.sample(eligible(steps), count)):
        undrawn = undrawn or rng.sample(every, len(every))
        kind, role = undrawn.pop()
        victim = rng.choice(sorted(rank for rank in ranks if role_of(rank) == role) or [CONTROLLER])
        point = rng.choice(POINTS.get(role, FROZEN_POINTS)) if kind == "error" else ""
        point = rng.choice({"preempt": TARGETS, "server": SIGNALS}[kind]) if kind in ("preempt", "server") else point
        drawn.append(Fault(kind, victim, step, rng.uniform(0, DELAY_SECONDS), point))
    return drawn
