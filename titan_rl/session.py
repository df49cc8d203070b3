"""One process's share of a run: bring everything up, drive it to the end or to a stop, take everything down."""

import asyncio
import os
from contextlib import nullcontext
from pathlib import Path

from titan_rl.config.sections import BYTES
from titan_rl.control.server import Control
from titan_rl.controller import Controller
from titan_rl.meshes.snapshot_store import Snapshots
from titan_rl.preflight.setup import Setup
from titan_rl.record.incidents import Incidents
from titan_rl.record.report import Report
from titan_rl.record.run_log import RunLog
from titan_rl.record.terminal import Terminal
from titan_rl.record.timeline import timeline
from titan_rl.train.export import export
from titan_rl.train.launch import launch, shutdown
from titan_rl.train.learner import Roles
from titan_rl.train.recovery import Recovery
from titan_rl.train.status import Scale, Status
from titan_rl.train.stop import Stop
from titan_rl.train.weight_sync import WeightSync
from titan_rl.wire.clock import Clock


async def session(setup: Setup, terminal: Terminal) -> bool:
    """True when the run is finished, False when it was asked to stop and saved itself."""
    task = asyncio.current_task()
    assert task is not None
    clock = Clock()
    stop = Stop(task, clock, terminal)
    config, resume = setup.config, setup.resume
    control = Control(setup.folder, Path(os.environ["TMPDIR"]) / "control", announce=terminal.note)
    incidents = Incidents(setup.folder, config.fault, terminal.warn)
    status = Status(stop, incidents)
    control.question(status=status.answer)
    control.offer(checkpoint=stop.checkpoint, pause=stop.pause, resume=stop.resume, stop=stop.leave)
    try:
        async with (
            control,
            launch(setup, terminal, incidents) as (meshes, watch),
            timeline(setup.folder / "timeline.json", meshes.all, terminal.note)
            if config.metrics.timeline
            else nullcontext(),
        ):
            status.meshes = meshes
            weights = None
            if meshes.generators is not None:
                weights = WeightSync(meshes.trainers, meshes.generators, clock)
                with terminal.phase("weights: plan, stage, connect"):
                    plan = await watch.drive(weights.connect(config, setup.shape))
                terminal.note(f"{plan.describe(BYTES[config.generator.dtype])}, by {weights.transports}")
                control.offer(scale=Scale(setup, meshes.generators).answer)
            with RunLog(
                setup.folder, setup.name, config, resume_step=resume.kept_rl, cold_start_step=resume.kept_cold_start
            ) as log:
                heldout = len(setup.heldout.prompts)
                report = Report(setup.name, config, setup.folder, terminal, log, clock, heldout=heldout)
                snapshots = Snapshots(meshes.trainers, meshes.critic)
                roles = Roles(setup, meshes, snapshots, incidents, clock)
                recovery = Recovery(setup, meshes, weights, snapshots, watch, incidents, stop, terminal)

                async def attempt() -> None:
                    point = recovery.point()
                    if recovery.attempt > 1:
                        log.rewind(point.kept_rl, point.kept_cold_start)
                    report.ready(point.rl or 0)
                    number, began = recovery.attempt, recovery.began
                    controller = Controller(
                        setup, meshes, weights, roles, report, stop, clock, attempt=number, began=began
                    )
                    if point.rl is None and config.cold_start.steps > 0:
                        await controller.cold_start()
                    if not stop.requested:
                        await controller.train()
                    if not stop.requested:
                        with terminal.phase("export to hf/"):
                            await export(setup, meshes.trainers, setup.folder / "hf")

                await recovery.drive(attempt)
                report.done(finished=not stop.requested)
        return not stop.requested
    finally:
        await shutdown()
