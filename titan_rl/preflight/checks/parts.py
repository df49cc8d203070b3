"""Checks that this installation has the optional parts that the keys need, and finds the checks of those parts."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

from titan_rl.config.sections import (
    Config,
    FaultSection,
    LaunchSection,
    MetricsSection,
    OpponentsSection,
    SandboxSection,
)
from titan_rl.preflight.checks.task import rewards_of, rewards_of_sets
from titan_rl.preflight.load import Invocation
from titan_rl.tasks.games import GAMES
from titan_rl.tasks.judging import evaluation_rubric, training_rubric
from titan_rl.tasks.rubric import Rubric
from titan_rl.wire import parts
from titan_rl.wire.weight_source import FORCES_LINKS

Needs = Callable[[Config], bool]
SNAPSHOT_STEPS = FaultSection().snapshot_interval


def tracks(config: Config) -> bool:
    return bool(config.metrics.services) or not config.metrics.project.strip()


def alerts(config: Config) -> bool:
    """Return True if there is an alert, or a key of one that has no effect."""
    metrics, default = config.metrics, MetricsSection()
    return (metrics.alert, metrics.alert_on) != (default.alert, default.alert_on)


def plays(config: Config) -> bool:
    e = config.environment
    return bool(config.rollout_code or e.seats or e.endpoints) or config.task.name in GAMES


def shares_rows(config: Config) -> bool:
    return any(p.context_parallel_degree > 1 for p in (config.parallelism, *config.roles.values()))


def calls_functions(config: Config) -> bool:
    """Return True if answers may be judged in processes."""
    task = config.task
    rubrics = [training_rubric(task), evaluation_rubric(task)]
    rubrics += [Rubric(((name, 1.0),)) for name in rewards_of_sets(config)]
    return task.reward_workers > 0 and not all(each.simple or each.names == ["model"] for each in rubrics)


def spans_hosts(config: Config) -> bool:
    """Return True if a key of [hosts] is set that a run on this machine alone does not need."""
    hosts = config.hosts
    return hosts.kind != "local" or hosts.count > 1 or bool(hosts.addresses or hosts.ports)


def runs_code(config: Config) -> bool:
    """Return True if code of the user or of a model may run in the sandbox."""
    named = [config.environment.name, config.task.agent, *rewards_of_sets(config)]
    named += [name for _, name in rewards_of(config.task)]
    return config.sandbox != SandboxSection() or any(":" in name or name == "code_tests" for name in named)


def crosses_hosts(config: Config) -> bool:
    """Return True if weights may go from one host to another."""
    hosts, how = config.hosts, config.weight_sync.transport
    apart = how == "auto" and hosts.at_addresses and hosts.number > 1
    return config.samples_rollouts and (apart or how in FORCES_LINKS)


def adapts(config: Config) -> bool:
    lora = config.lora
    return lora.on or bool(lora.targets) or lora.sync == "adapter"


def opposes(config: Config) -> bool:
    return config.opponents != OpponentsSection()


def distills(config: Config) -> bool:
    """Return True if there is a teacher, or a key of one that has no effect."""
    a = config.algorithm
    keys = a.needs_teacher or a.teacher_weights != "folder" or a.teacher_context or config.cold_start.teacher_prompts
    return a.kind == "rl" and bool(keys)


NEEDED: Sequence[tuple[str, str, Needs]] = (
    ("environments", "environment.name", lambda config: bool(config.environment.name)),
    ("environments", "task.agent", lambda config: bool(config.task.agent)),
    ("games", "task.name", lambda config: config.task.name in GAMES),
    ("broadcasts of trainers", "weight_sync.transport", lambda c: c.weight_sync.transport == "broadcast"),
    ("context parallelism", "parallelism.context_parallel_degree", shares_rows),
    ("curriculum", "curriculum", lambda config: config.curriculum.on),
    ("column kept", "rollout.top_p, top_k or min_p", lambda config: config.rollout.truncates),
    ("column routes", "algorithm.routing_replay", lambda config: config.algorithm.routing_replay),
    ("drafts", "generator.drafts", lambda config: config.generator.drafts != "none"),
    ("images of trainers", "model.vision", lambda config: config.model.vision != "none"),
    ("kept batches", "record.batches", lambda config: config.record.batches > 0),
    ("links of trainers", "weight_sync.transport", crosses_hosts),
    ("losses of pairs", "algorithm.name", lambda c: c.algorithm.kind == "preference" or c.algorithm.online_pairs),
    ("losses of reward models", "algorithm.name", lambda config: config.algorithm.kind == "reward"),
    ("opponents", "opponents.pool", opposes),
    ("quantized rows", "generator.quantization", lambda config: config.generator.quantization != "none"),
    ("relays of hosts", "weight_sync.relay", lambda config: config.weight_sync.relay is True),
    ("reward processes", "task.reward_workers", calls_functions),
    ("row lengths", "task.bad_rows", lambda config: config.task.bad_rows == "drop"),
    ("snapshots", "fault.snapshot_interval", lambda config: config.fault.snapshot_interval not in (0, SNAPSHOT_STEPS)),
    ("snapshots", "fault.snapshot_gbps", lambda config: config.fault.snapshot_gbps > 0),
    ("several hosts", "hosts.kind", spans_hosts),
    ("adapters of trainers", "lora", adapts),
    ("teacher", "algorithm.advantage", distills),
    ("trackers", "metrics.trackers", lambda config: bool(config.metrics.services)),
    ("prometheus", "metrics.prometheus", lambda config: bool(config.metrics.prometheus)),
    ("alerts", "metrics.alert", alerts),
)
"""A part, the key that needs it, and whether it does."""

CHECKS: Sequence[tuple[str, Needs]] = (
    ("ext.agents.checks", plays),
    ("ext.sandbox.checks", runs_code),
    ("ext.teachers.checks", distills),
    ("ext.trackers.checks", tracks),
    ("ext.prometheus.checks", lambda config: bool(config.metrics.prometheus)),
    ("ext.alerts.checks", alerts),
    ("tools.launch.checks", lambda config: config.launch != LaunchSection()),
    ("ext.hosts.checks", spans_hosts),
    ("ext.relay.checks", lambda config: config.weight_sync.relay is True),
)
"""A module with `problems(config)` and `warnings(config)`, and whether a config needs its checks."""

MODEL_CHECKS: Sequence[tuple[str, Needs]] = (
    ("ext.adapters.checks", adapts),
    ("ext.opponents.pool_checks", opposes),
    ("ext.vision.checks", lambda config: config.model.vision != "none"),
    ("ext.drafts.checks", lambda config: config.generator.drafts != "none"),
)
"""The same, of modules with `problems(config, shape, device)` and `warnings(config, shape, device)`."""


def check_parts(config: Config) -> Iterator[str]:
    for name, key, needs in NEEDED:
        if needs(config) and not parts.has_part(name):
            yield parts.missing_part(name, key)


def without_snapshots(run: Invocation) -> Invocation:
    """Return a run that takes no snapshots by default if this installation takes none, with a warning."""
    fault = run.config.fault
    if run.policies or fault.snapshot_interval != SNAPSHOT_STEPS or parts.has_part("snapshots"):
        return run
    config = replace(run.config, fault=replace(fault, snapshot_interval=0))
    warning = (
        f"fault.snapshot_interval: 0 in place of {SNAPSHOT_STEPS} in an installation without titan_rl/ext/snapshots: a "
        "lost trainer costs the steps since the last checkpoint"
    )
    return replace(run, config=config, warnings=(*run.warnings, warning))


def checks_of_parts(config: Config, checks: Sequence[tuple[str, Needs]] = CHECKS) -> list[Any]:
    """Return the modules of the checks that a config needs. No others are imported."""
    return parts.modules_of(name for name, needs in checks if needs(config))
