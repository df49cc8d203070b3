"""One process's share of a run: start everything, drive it to the end or to a stop, take everything down."""

import asyncio
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path

from titan_rl.config.sections import BYTES
from titan_rl.controller import Controller
from titan_rl.preflight.plan import Setup
from titan_rl.record.incidents import Incidents
from titan_rl.record.report import Report
from titan_rl.record.run_folder import Resume, folder_lost, watch_folder
from titan_rl.record.run_log import RunLog
from titan_rl.record.sinks import timeline, tracking
from titan_rl.record.terminal import Terminal
from titan_rl.train.bring_up import Launch, kill_ranks, launch, shutdown
from titan_rl.train.learner import Learner
from titan_rl.train.recovery import Recovery
from titan_rl.train.regrowth import Regrowth
from titan_rl.train.run_parts import RunParts
from titan_rl.train.snapshots import start_snapshots
from titan_rl.train.steering import steering
from titan_rl.train.stop import Stop
from titan_rl.train.verbs import Verbs
from titan_rl.train.weight_sync import WeightSync
from titan_rl.wire.errors import RunError
from titan_rl.wire.spans import Clock


async def session(setup: Setup, terminal: Terminal, launched: Launch = launch) -> bool:
    """Return True when the run is finished, False when it was stopped and has saved its state. `launched` starts the
    meshes, and stops them."""
    task, clock = asyncio.current_task(), Clock()
    assert task is not None
    stop = Stop(task, clock, terminal, setup.config.fault.stop_grace_seconds)
    async with opened(setup, terminal, stop, clock, launched) as run:
        recovery = Recovery(run)

        async def attempt(resume: Resume) -> None:
            if recovery.attempt > 1:
                run.report.rewind(resume.kept_rl, resume.kept_cold_start)
            run.report.ready(resume.rl or 0, setup.task.bad_rows)
            controller = Controller(
                run,
                Verbs(run, learner),
                resume,
                attempt=recovery.attempt,
                began=recovery.began,
                bad_prompts=recovery.bad_prompts,
            )
            await controller.drive()

        learner = Learner(run)
        await recovery.drive(attempt)
        stop.end()
        run.report.done(finished=not stop.requested)
        if stop.given_up:
            raise asyncio.CancelledError  # ranks may be busy: call none of them again
    return not stop.requested


@asynccontextmanager
async def opened(
    setup: Setup, terminal: Terminal, stop: Stop, clock: Clock, launched: Launch = launch, *, last: bool = True
) -> AsyncIterator[RunParts]:
    """Start the meshes, connect the weights and open the files of a run. Take all of it down at the end. `last`: this
    process starts no other run, which Monarch could not once it is shut down."""
    config, folder = setup.config, setup.folder
    socket = Path(os.environ["TMPDIR"]) / "control"
    incidents = Incidents(folder, config.fault, terminal.warn, setup.model_folder)
    folder_watch: asyncio.Task[None] | None = None
    folder_before = os.stat(folder)
    try:
        resumed = not setup.resume.nothing
        async with (
            tracking(folder, setup.name, config, resumed=resumed, warn=terminal.warn) as trackers,
            steering(setup, socket, stop, incidents, terminal.note) as steers,
            launched(setup, terminal, incidents, lambda: stop.given_up) as (meshes, watch),
            timeline(folder / "timeline.json", meshes.all, terminal.note),
        ):
            steers.started(meshes)
            incidents.observers.append(partial(trackers.event, "fault"))
            folder_watch = asyncio.create_task(watch_folder(folder, folder_before, watch.fail))
            snapshots = await watch.drive(start_snapshots(config, meshes, incidents, terminal))
            weights = None
            if meshes.generators is not None:
                weights = WeightSync(meshes.trainers, meshes.generators, clock, terminal.warn)
                with terminal.phase("weights: plan, stage, connect"):
                    plan = await watch.drive(weights.connect(config, setup.shape))
                terminal.note(f"{plan.describe(BYTES[config.generator.dtype])}, by {weights.transports}")
                steers.scales(meshes.generators)
            resume, heldout = setup.resume, len(setup.heldout.prompts)
            with (
                RunLog(
                    folder,
                    setup.name,
                    config,
                    resume_step=resume.kept_rl,
                    cold_start_step=resume.kept_cold_start,
                    trackers=trackers,
                    warn=terminal.warn,
                ) as log,
                Report(setup.name, config, folder, terminal, log, clock, heldout=heldout) as report,
            ):
                regrowth = Regrowth(meshes.trainers, meshes.rank_places, config, incidents)
                yield RunParts(
                    setup, terminal, clock, stop, incidents, meshes, watch, weights, snapshots, report, regrowth
                )
    except (OSError, RunError):
        if (lost := folder_lost(folder, folder_before)) is not None:  # a write may have failed before the watch looked
            raise lost from None
        raise
    finally:
        if folder_watch is not None:
            folder_watch.cancel()
        await setup.judges.close()
        await (shutdown() if last else kill_ranks())
