"""Simulates a run: this project's own controller, stream, router, replicas, healing, weight sync and packing, on parts
whose seconds come from rates.

    Controller.reinforce ── Learner, RolloutStream, WeightSync, GeneratorMesh, Fleet, Router, Replica ── as they are
        └── ranks, environments, judges (simulated_parts.py, engine_model.py) ── in virtual time (virtual_time.py)

Not represented:
- evaluations, checkpoints (their seconds), a cold start, several policies, tinker;
- text: rewards always differ within a group, so dynamic sampling drops none; teacher_context reads nothing else;
- blocks of the cache, except that contexts share whole ones; chunks of a long prompt (a prompt stops the decoding of
  others while it is computed), speculative decoding, and requests that are withdrawn;
- failed or hung environments and judges, lockstep; a branch of a rollout: each context continues the one before;
- one rate for all model meshes; differences between replicas, rows or hosts, and contention of their networks;
- losses of trainers: a fault is the loss of a replica;
- the controller's own seconds, except Rates.step_s, which follows each step.
"""

import asyncio
import tempfile
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

from titan_rl.config import auto
from titan_rl.config.sections import ColdStartSection, Config, LoraSection, ModelSection
from titan_rl.controller import Controller
from titan_rl.meshes.generator_mesh import GeneratorMesh
from titan_rl.preflight.shapes import shape_of
from titan_rl.record.incidents import Incidents
from titan_rl.record.metrics import step_metrics, step_times
from titan_rl.record.run_folder import Resume
from titan_rl.tasks.examples import Example
from titan_rl.tools.plan.rates import Rates, Work
from titan_rl.tools.plan.simulated_parts import (
    Prompts,
    SimulatedEnvironments,
    SimulatedMesh,
    SimulatedRun,
    SizedLearner,
    SizedVerbs,
)
from titan_rl.tools.plan.virtual_time import Cores, VirtualLoop, in_virtual_time
from titan_rl.train.bring_up import Meshes, generator_policy
from titan_rl.train.regrowth import Regrowth
from titan_rl.train.run_parts import RunParts
from titan_rl.train.stop import Stop
from titan_rl.train.weight_sync import WeightSync
from titan_rl.wire.reports import StepStats, SyncStats
from titan_rl.wire.spans import Clock
from titan_rl.wire.types import Group, Sampling

PATIENCE_SECONDS = 1e9  # a simulated engine never hangs: it need not be polled


@dataclass(frozen=True, slots=True)
class ReplicaLoss:
    """The death of a replica's process."""

    replica: int
    second: float  # after the first weights were served


@dataclass(slots=True)
class Simulation:
    steps: list[dict[str, float]] = field(default_factory=list)  # as in metrics.jsonl
    ends: list[float] = field(default_factory=list)  # seconds until the end of each step
    trainers_idle: float = 0.0  # share of the seconds until the last step's end
    engines_idle: float = 0.0
    prefix_hits: float = 0.0  # share of the tokens that engines read
    preemptions: int = 0
    resampled: int = 0  # samples that began again after faults
    notes: list[str] = field(default_factory=list)  # what the run would have shown

    @property
    def seconds_per_step(self) -> float:
        """Return the mean of the middle half: at both ends of a run less overlaps."""
        ends = [0.0, *self.ends]
        edge = len(self.ends) // 4
        return (ends[-1 - edge] - ends[edge]) / (len(self.ends) - 2 * edge)


def simulate(
    config: Config,
    rates: Rates,
    work: Work,
    *,
    steps: int,
    seed: int = 0,
    faults: Sequence[ReplicaLoss] = (),
    resolved: Config | None = None,
) -> Simulation:
    """Simulate a run's first steps. What the run would raise is raised: a RunError names a deadline that is too short.
    `resolved`: of Setup, if microbatches have the rows that fit; "auto" in `config` is as on a GPU."""
    config = simulated_config(config, steps, seed)
    resolved = simulated_config(resolved or auto.resolved(config, "cuda"), steps, seed)
    found = Simulation()
    with tempfile.TemporaryDirectory() as folder:
        in_virtual_time(partial(_run, found, config, resolved, rates, work, faults, Path(folder)))
    return found


def simulated_config(config: Config, steps: int, seed: int) -> Config:
    """Return the config without the parts that are not represented. A replica has one rank, each step is kept."""
    config = auto.on_device(config, "cuda")
    return replace(
        config,
        training=replace(config.training, steps=steps),
        debug=replace(config.debug, seed=seed),
        model=ModelSection(hf_assets_path="simulated"),
        algorithm=replace(config.algorithm, teacher_context=[]),
        generator=replace(config.generator, tensor_parallel_degree=1),
        cold_start=ColdStartSection(steps=0),
        lora=LoraSection(),
        eval=replace(config.eval, keep_best=""),
        record=replace(config.record, batches=0),
        checkpoint=replace(config.checkpoint, enable=False),
        fault=replace(config.fault, snapshot_interval=1),
    )


class StepReport:
    """In the place of Report: keeps the metrics of each step."""

    cause = to_disk = written = staticmethod(lambda: None)

    def __init__(self, found: Simulation, clock: Clock, loop: VirtualLoop) -> None:
        self._found, self._clock, self._loop = found, clock, loop
        self.began = 0.0

    def step(
        self, step: int, groups: Sequence[Group], stats: StepStats, sync: SyncStats, evaluations: Any, **more: Any
    ) -> None:
        times = step_times(self._clock.lap())
        metrics = step_metrics(step, groups, stats, sync, times, **more)
        self._found.steps.append({"step": step, **metrics})
        self._found.ends.append(self._loop.now - self.began)


async def _run(
    found: Simulation,
    config: Config,
    resolved: Config,
    rates: Rates,
    work: Work,
    faults: Sequence[ReplicaLoss],
    folder: Path,
    loop: VirtualLoop,
) -> None:
    run = SimulatedRun(resolved, shape_of(ModelSection()), rates, work, Cores(loop, rates.cores))
    terminal: Any = SimpleNamespace(warn=found.notes.append, note=lambda _: None, phase=lambda _: nullcontext())
    task, clock = asyncio.current_task(), Clock()
    assert task is not None
    incidents = Incidents(folder, config.fault, found.notes.append)
    policy = replace(generator_policy(config, incidents), hang_seconds=PATIENCE_SECONDS)
    replicas = [await run.make(i, policy, 0.0) for i in range(config.generator.replicas)]
    generators = GeneratorMesh(replicas, policy, make=lambda i, _: run.make(i, policy, rates.engine.start_s))
    await generators.start()
    roles: dict[str, Any] = {role: SimulatedMesh(run, cast(Any, role)) for role in config.roles}
    trainers = SimulatedMesh(run, "trainer")
    if config.rollout_code or work.turns.mean > 1:
        roles["environments"] = SimulatedEnvironments(run)
    meshes = Meshes(trainers, generators, colocated=config.placement.kind == "colocated", **roles)
    weights = WeightSync(trainers, generators, clock, found.notes.append)
    await weights.connect(resolved, run.shape)
    examples = [Example("", "")] * 4096  # alike, but in an order that is shuffled in each epoch
    setup: Any = SimpleNamespace(
        config=config,
        resolved=resolved,
        folder=folder,
        checkpoint_bytes=0,
        tokenizer=SimpleNamespace(pad=0, eos=0, decode=lambda _: ""),
        task=Prompts(examples, [], work=work, most=config.longest_rollout - 1),
        sampling=Sampling(config.rollout.max_new_tokens, config.rollout.temperature),
        heldout=SimpleNamespace(prompts=[]),
        eval_sets=(),
        judges=SimpleNamespace(judge=lambda *_: run.judge),
    )
    report = StepReport(found, clock, loop)
    # In the place of Snapshots: the controller's own work at the end of each step.
    snapshots: Any = SimpleNamespace(forget=lambda but: None, take=lambda *_: asyncio.sleep(rates.step_s))
    stop = Stop(task, clock, terminal, listens=False)
    regrowth, watch = Regrowth(trainers, None, config, incidents), cast(Any, None)
    parts = RunParts(
        setup, terminal, clock, stop, incidents, meshes, watch, weights, snapshots, cast(Any, report), regrowth
    )

    def began(step: int) -> None:
        """Start to measure: the first weights are served."""
        clock.lap()
        report.began = loop.now
        for fault in faults:
            loop.call_later(fault.second, run.kill, fault.replica)

    verbs = SizedVerbs(parts, SizedLearner(parts))
    verbs.engines_proven = True  # the engines are no engines
    await Controller(parts, verbs, Resume(None, None), began=began).reinforce()
    seconds = loop.now - report.began
    engines = [rank.engine for rank in run.ranks]
    read = [engine.counted() for engine in engines]
    found.trainers_idle = 1 - sum(rank.busy for rank in trainers.ranks) / (len(trainers.ranks) * seconds)
    found.engines_idle = 1 - sum(stats.seconds for stats in read) / (config.generator.replicas * seconds)
    found.prefix_hits = sum(s.cached_tokens for s in read) / max(1, sum(s.prompt_tokens for s in read))
    found.preemptions = sum(engine.preemptions for engine in engines)
    found.resampled = sum(rank.again for rank in run.ranks)
