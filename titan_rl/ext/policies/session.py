"""One process's share of a run of several policies: start the meshes, drive a controller for each as a task.

    meshes, engines ── bound to a policy ── WeightSync, RunParts ── Controller ── its folder in the run's
                                        └── ...                     in turn on the trainers, together on the engines

A policy that fails, or a rank that does, ends the run; all other policies are saved if their ranks are alive. The same
command resumes each policy from its last checkpoint.
"""

import asyncio
import os
from collections.abc import Coroutine
from functools import partial
from pathlib import Path
from typing import Any

from titan_rl.config.sections import BYTES
from titan_rl.controller import Controller
from titan_rl.ext.policies.shared_episodes import Table
from titan_rl.meshes.faults import Watch
from titan_rl.preflight.plan import Setup
from titan_rl.record.incidents import Incidents
from titan_rl.record.report import Report
from titan_rl.record.run_folder import folder_lost, watch_folder
from titan_rl.record.run_log import RunLog
from titan_rl.record.sinks import timeline, tracking
from titan_rl.record.terminal import Terminal
from titan_rl.rollout.player import Shares
from titan_rl.train.bring_up import Launch, Meshes, launch, shutdown
from titan_rl.train.learner import Learner
from titan_rl.train.regrowth import Regrowth
from titan_rl.train.run_parts import RunParts
from titan_rl.train.snapshots import Snapshots
from titan_rl.train.steering import steering
from titan_rl.train.stop import Stop, Stops
from titan_rl.train.verbs import Verbs
from titan_rl.train.weight_sync import WeightSync
from titan_rl.wire.errors import RunError
from titan_rl.wire.spans import Clock


async def session_of_policies(setup: Setup, terminal: Terminal, launched: Launch = launch) -> bool:
    """Return True when all policies are finished, False when they were stopped and have saved their states."""
    task = asyncio.current_task()
    assert task is not None
    folder, incidents = setup.folder, Incidents(setup.folder, setup.config.fault, terminal.warn, setup.model_folder)
    stops, before = Stops(task), os.stat(folder)
    socket = Path(os.environ["TMPDIR"]) / "control"
    folder_watch: asyncio.Task[None] | None = None
    try:
        async with (
            steering(setup, socket, stops, incidents, terminal.note) as steers,
            launched(setup, terminal, incidents, lambda: stops.given_up) as (meshes, watch),
            timeline(folder / "timeline.json", meshes.all, terminal.note),
        ):
            folder_watch = asyncio.create_task(watch_folder(folder, before, watch.fail))
            assert meshes.generators is not None
            work = await watch.drive(connected(setup, terminal, meshes, watch, incidents, stops))
            steers.scales(meshes.generators)
            await watch.drive(together(work, stops))
            if stops.given_up:
                raise asyncio.CancelledError  # ranks may be busy: call none of them again
        return not stops.requested
    except (OSError, RunError):
        if (lost := folder_lost(folder, before)) is not None:
            raise lost from None
        raise
    finally:
        if folder_watch is not None:
            folder_watch.cancel()
        await asyncio.gather(*(policy.judges.close() for policy in setup.policies.values()))
        await shutdown()


async def connected(
    setup: Setup, terminal: Terminal, meshes: Meshes, watch: Watch, incidents: Incidents, stops: Stops
) -> "dict[str, Coroutine[Any, Any, None]]":
    """Plan and connect the weight sync of every policy; the first one's moves the frozen weights, too. Return what
    drives each policy."""
    work, syncs = dict[str, Coroutine[Any, Any, None]](), list[WeightSync]()
    table = Table([*setup.policies], setup.config.rollout.timeout_seconds) if setup.config.environment.seats else None
    with terminal.phase("weights: plan, stage, connect"):
        for slot, (name, own) in enumerate(setup.policies.items()):
            bound, printed, clock = meshes.of(name, slot), terminal.of(name), Clock()
            assert bound.generators is not None
            syncs.append(weights := WeightSync(bound.trainers, bound.generators, clock, printed.warn, [*syncs]))
            plan = await weights.connect(own.config, own.shape)
            printed.note(f"{plan.describe(BYTES[own.config.generator.dtype])}, by {weights.transports}")
            shares = table and partial(table.play, name)
            work[name] = drive(own, printed, clock, bound, weights, watch, incidents, stops, shares)
    return work


async def drive(
    setup: Setup,
    terminal: Terminal,
    clock: Clock,
    meshes: Meshes,
    weights: WeightSync,
    watch: Watch,
    incidents: Incidents,
    stops: Stops,
    shares: Shares | None,
) -> None:
    """Train and export one policy, over meshes that are bound to it. It `shares` its episodes with the others."""
    config, folder, resume, task = setup.config, setup.folder, setup.resume, asyncio.current_task()
    assert task is not None
    stop = Stop(task, clock, terminal, config.fault.stop_grace_seconds, stops=stops)
    socket = Path(os.environ["TMPDIR"]) / f"control-{folder.name}"
    regrowth = Regrowth(meshes.trainers, meshes.rank_places, config, incidents)
    async with (
        tracking(folder, setup.name, config, resumed=not resume.nothing, warn=terminal.warn) as trackers,
        steering(setup, socket, stop, incidents, terminal.note) as steers,
    ):
        steers.started(meshes)
        incidents.observers.append(partial(trackers.event, "fault"))
        with (
            RunLog(folder, setup.name, config, resume_step=resume.rl, trackers=trackers, warn=terminal.warn) as log,
            Report(setup.name, config, folder, terminal, log, clock, heldout=len(setup.heldout.prompts)) as report,
        ):
            snapshots = Snapshots()  # takes none
            run = RunParts(
                setup, terminal, clock, stop, incidents, meshes, watch, weights, snapshots, report, regrowth, shares
            )
            report.ready(resume.rl or 0, setup.task.bad_rows)
            await Controller(run, Verbs(run, Learner(run)), resume).drive()
            stop.end()
            report.done(finished=not stop.requested)


async def together(work: "dict[str, Coroutine[Any, Any, None]]", stops: Stops) -> None:
    """Await the work of all policies. If one fails, the others save their last step, unless a rank has failed."""
    tasks = [asyncio.create_task(coroutine, name=name) for name, coroutine in work.items()]
    try:
        _, left = await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)
        failed = [error for task in tasks if task.done() and not task.cancelled() and (error := task.exception())]
        if left and not any(isinstance(error, RunError) and error.rank for error in failed):
            await stops.leave()
            await asyncio.wait(left)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)
    if failed:
        raise failed[0]
