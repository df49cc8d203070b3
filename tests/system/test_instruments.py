"""TorchTitan's asynchronous checkpoints, profiler and spans under a real trainer mesh."""

import asyncio
from dataclasses import replace
from pathlib import Path

from support.trainer_cases import LAYOUTS, batches, config, samples
from titan_rl.config.sections import CheckpointSection, Config, ProfilingSection
from titan_rl.meshes.model_mesh import ModelMesh
from titan_rl.preflight.shapes import shape_of
from titan_rl.wire.reports import StepStats


async def run(config: Config, *, resumed_at: int, last: int) -> tuple[list[float], set[str]]:
    """Losses, and the names of all spans; saves after step 2."""
    from monarch.actor import this_host

    mesh = ModelMesh(this_host(), "trainer", config, shape_of(config.model), {})
    try:
        await mesh.start()
        assert await mesh.begin_phase("rl", resumed_at) == (resumed_at, '{"next": 7}' if resumed_at else "{}")
        stats: list[StepStats] = []
        for step in range(resumed_at, last):
            stats.append(await mesh.step([batches(samples(step), mesh)]))
            if step == 1:
                await mesh.save(2, '{"next": 7}')
        assert all(each.hardware["throughput/tflops"] > 0 for each in stats)
        recorded = [await answer for answer in mesh.spans().values()]
        await mesh.close()
        return [each.loss for each in stats], {span.name for each in recorded for span in each.spans}
    finally:
        await mesh.stop()


def test_an_asynchronous_checkpoint_resumes_to_the_same_losses(tmp_path: Path) -> None:
    made = replace(config(tmp_path, LAYOUTS["fsdp2"]), checkpoint=CheckpointSection(async_mode="async"))
    profiled = replace(made, profiling=ProfilingSection(enable_profiling=True, profile_freq=4))
    whole, names = asyncio.run(run(profiled, resumed_at=0, last=5))
    assert {"checkpoint_save", "gc_collect", "kineto_profiler_step_call"} <= names
    traces = {path.relative_to(tmp_path) for path in tmp_path.glob("profiling/traces/*/*/*")}
    folder = Path("profiling/traces/iteration_4/checkpoint")
    assert {folder / f"rank{rank}_trace.json.gz" for rank in (0, 1)} <= traces
    resumed, _ = asyncio.run(run(made, resumed_at=2, last=5))
    assert resumed == whole[2:]
