"""One process's share of a run: bring everything up, drive it to the end or to a stop, take everything down."""

import asyncio
from contextlib import nullcontext

from titan_rl.clock import Clock
from titan_rl.config import BYTES
from titan_rl.controller import Controller
from titan_rl.export import export
from titan_rl.meshes.launch import launch, shutdown
from titan_rl.report import Report
from titan_rl.run_log import RunLog
from titan_rl.setup import Setup
from titan_rl.stop import Stop
from titan_rl.terminal import Terminal
from titan_rl.timeline import timeline
from titan_rl.weights import WeightSync


async def session(setup: Setup, terminal: Terminal) -> bool:
    """True when the run is finished, False when it was asked to stop and saved itself."""
    task = asyncio.current_task()
    assert task is not None
    stop, clock = Stop(task), Clock()
    config, resume = setup.config, setup.resume
    try:
        async with (
            launch(setup, terminal) as meshes,
            timeline(setup.folder / "timeline.json", meshes.all, terminal.note)
            if config.metrics.timeline
            else nullcontext(),
        ):
            weights = None
            if meshes.generators is not None:
                weights = WeightSync(meshes.trainers, meshes.generators, clock)
                with terminal.phase("weights: plan, stage, connect"):
                    plan = await weights.connect(config, setup.shape)
                terminal.note(f"{plan.describe(BYTES[config.generator.dtype])}, by {weights.transports}")
            with RunLog(
                setup.folder, setup.name, config, resume_step=resume.kept_rl, cold_start_step=resume.kept_cold_start
            ) as log:
                report = Report(setup, terminal, log, clock)
                report.ready(resume.rl or 0)
                controller = Controller(setup, meshes, weights, report, stop, clock)
                if resume.rl is None and config.cold_start.steps > 0:
                    await controller.cold_start()
                if not stop.requested:
                    await controller.train()
                if not stop.requested:
                    with terminal.phase("export to hf/"):
                        await export(setup, meshes.trainers, setup.folder / "hf")
                report.done(finished=not stop.requested)
        return not stop.requested
    finally:
        await shutdown()
