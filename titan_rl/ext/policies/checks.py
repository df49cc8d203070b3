"""Checks of a run of several policies ([policies]): values that they share, and features that it lacks yet."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace

from titan_rl.config.policies import POLICIES
from titan_rl.config.sections import Config
from titan_rl.preflight.load import Invocation
from titan_rl.preflight.refusal import problem

SEVERAL = "of a run with [policies]"
TOGETHER = "environment.seats has their names: they play together"
EQUAL = ("task", "curriculum", "rollout", "eval")
"""Sections that must be the same for policies that play together: they meet in the same episodes."""


def judged_policies(
    run: Invocation, judged: Callable[[Invocation], tuple[list[str], list[str]]]
) -> tuple[list[str], list[str]]:
    """Return the problems and warnings of a run of several policies."""
    each = {name: judged(replace(run, config=one, policies={}, problems=())) for name, one in run.policies.items()}
    refused = merged({name: refused for name, (refused, _) in each.items()})
    warned = merged({name: warned for name, (_, warned) in each.items()})
    return [*run.problems, *check_policies(run.policies), *refused], warned


def check_policies(policies: Mapping[str, Config]) -> Iterator[str]:
    """Yield the problems of several policies, beyond the problems of each as a run by itself."""
    yield from merged({name: list(_problems(config)) for name, config in policies.items()})
    configs = list(policies.values())
    if len({config.rollout.truncates for config in configs}) > 1:
        yield "rollout.top_p: expected all policies to truncate their sampling, or none, because they share engines"
    seeds = {config.debug.seed for config in configs}
    if len(seeds) > 1 and not configs[0].model.hf_assets_path:
        yield "debug.seed: expected one of all policies, which draws their base, without model.hf_assets_path"
    if configs[0].environment.seats:
        yield from _check_players(policies)


def _check_players(policies: Mapping[str, Config]) -> Iterator[str]:
    """Check policies that play together, each the seat of its name."""
    configs = list(policies.values())
    e = configs[0].environment
    if set(e.seats) - {*e.frozen_seats, *e.endpoints} != set(policies):
        yield problem(configs[0], "environment.seats", f"the policies {', '.join(policies)}, and seats of no policy")
    keys = [key for key in EQUAL if any(getattr(config, key) != getattr(configs[0], key) for config in configs)]
    keys += ["training.steps"] * (len({config.training.steps for config in configs}) > 1)
    keys += ["debug.seed"] * (len({config.debug.seed for config in configs}) > 1)
    for key in keys:
        yield f"{key}: expected the same for all policies, which play together, found others"
    for name, config in policies.items():
        for key, right in {
            "algorithm.dynamic_sampling": not config.algorithm.dynamic_sampling,
            "task.filter": not config.task.filter,
            "opponents.pool": not config.opponents.pool,
        }.items():
            if not right:
                yield f"[{POLICIES}.{name}] " + problem(config, key, "none of policies that play together")


def _problems(config: Config) -> Iterator[str]:
    mesh = config.reference.mesh if config.algorithm.needs_reference else "trainer"
    expected = {
        "lora.rank": ("at least 1: the policies are adapters over one base", config.lora.on),
        "lora.sync": ('"adapter", so that engines hold the adapters of all policies', config.lora.sync == "adapter"),
        "model.vision": (f'"none" {SEVERAL}, whose engines read one folder of images', config.model.vision == "none"),
        "algorithm.name": (f"an algorithm {SEVERAL} that samples, without a critic or a teacher", _samples(config)),
        "cold_start.steps": (f"0 {SEVERAL}", config.cold_start.steps == 0),
        "task.reward": (f"no reward model {SEVERAL}", config.task.reward != "model"),
        "task.agent": (f'"" {SEVERAL}, unless {TOGETHER}', bool(config.environment.seats) or not config.task.agent),
        "environment.name": (
            f'"" {SEVERAL}, unless {TOGETHER}',
            bool(config.environment.seats) or not config.environment.name,
        ),
        "reference.mesh": (
            f'"trainer" {SEVERAL}',
            mesh == "trainer",
        ),
        "placement.kind": (f'"disaggregated" {SEVERAL}', config.placement.kind == "disaggregated"),
        "hosts.number": (f"1 {SEVERAL}", config.hosts.number == 1),
        "weight_sync.transport": (f'"auto" or "shm" {SEVERAL}', config.weight_sync.transport in ("auto", "shm")),
        "weight_sync.in_flight": (f'"swap" or "keep" {SEVERAL}', config.weight_sync.in_flight != "drain"),
        "fault.on_bad_steps": (f'"stop" {SEVERAL}', config.fault.on_bad_steps == "stop"),
    }
    yield from (problem(config, key, what) for key, (what, right) in expected.items() if not right)


def _samples(config: Config) -> bool:
    return config.algorithm.kind == "rl" and not (config.algorithm.needs_critic or config.algorithm.needs_teacher)


def merged(lines: Mapping[str, Sequence[str]]) -> list[str]:
    """Return the lines of all policies: a line that all have once, others under their policy's name."""
    common = [line for line in next(iter(lines.values())) if all(line in each for each in lines.values())]
    own = [f"[{POLICIES}.{name}] {line}" for name, each in lines.items() for line in each if line not in common]
    return [*dict.fromkeys(common), *own]
