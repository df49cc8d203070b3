"""Real TorchTitan under real Monarch: the mesh must not show in the numbers."""

import asyncio
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from titan_rl.clock import Clock
from titan_rl.config import Algorithm, Config, Job, Model, Optimizer, Parallelism, Training
from titan_rl.meshes.trainers import TrainerMesh
from titan_rl.model_shape import shape_of
from titan_rl.packing import pack
from titan_rl.types import Sample, StepStats

STEPS = 10
LAYOUTS = {
    "fsdp2": Parallelism(data_parallel_shard_degree=2),
    "tp2": Parallelism(tensor_parallel_degree=2),
    "fsdp2_tp2": Parallelism(data_parallel_shard_degree=2, tensor_parallel_degree=2),
    "hsdp": Parallelism(data_parallel_replicate_degree=2, data_parallel_shard_degree=1),
}


def config(folder: Path, parallelism: Parallelism, **model: object) -> Config:
    return Config(
        job=Job(dump_folder=str(folder)),
        model=replace(Model(dim=64, n_layers=2, n_heads=4, n_kv_heads=2, hidden_dim=96), **model),
        training=Training(steps=STEPS, seq_len=64, local_batch_size=2),
        optimizer=Optimizer(lr=1e-3),
        algorithm=Algorithm(kl_coef=0.05),
        parallelism=parallelism,
    )


def samples(step: int) -> list[Sample]:
    """Ragged, with prompts, log-probs and advantages."""
    random = np.random.default_rng(step)
    made = []
    for _ in range(12):
        n, prompt = int(random.integers(6, 40)), int(random.integers(1, 5))
        made.append(
            Sample(
                tokens=random.integers(3, 60, n).tolist(),
                mask=[0] * prompt + [1] * (n - prompt),
                logprobs=(-4.2 + 0.1 * random.standard_normal(n)).tolist(),
                advantage=float(random.standard_normal()),
            )
        )
    return made


async def run(config: Config) -> list[StepStats]:
    from monarch.actor import this_host

    mesh = await TrainerMesh.spawn(this_host(), config, shape_of(config.model), {}, Clock())
    try:
        await mesh.start()
        assert await mesh.begin("rl") == (0, "{}")
        stats = []
        for step in range(STEPS):
            batches = pack(samples(step), shards=mesh.dp, seq_len=64, rows_per_microbatch=2, pad_id=0)
            stats.append(await mesh.step(batches))
        return stats
    finally:
        await mesh.stop()


@pytest.fixture(scope="module", params=["llama3", "qwen3"])
def family(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(scope="module")
def one_proc(family: str, tmp_path_factory: pytest.TempPathFactory) -> list[StepStats]:
    return asyncio.run(run(config(tmp_path_factory.mktemp("one"), Parallelism(), name=family)))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_loss_and_gradients_are_those_of_one_process(
    layout: str, family: str, one_proc: list[StepStats], tmp_path: Path
) -> None:
    stats = asyncio.run(run(config(tmp_path, LAYOUTS[layout], name=family)))
    for ours, one in zip(stats, one_proc, strict=True):
        assert ours.loss == pytest.approx(one.loss, abs=1e-5)
        assert ours.grad_norm == pytest.approx(one.grad_norm, abs=1e-5)
        assert ours.entropy == pytest.approx(one.entropy, abs=1e-5)
        assert ours.kl == pytest.approx(one.kl, abs=1e-5)
        assert ours.gap_max == pytest.approx(one.gap_max, abs=1e-4)


def test_the_numbers_move(one_proc: list[StepStats]) -> None:
    """An invariance of constants would prove nothing."""
    assert len({s.loss for s in one_proc}) == STEPS
    assert one_proc[0].kl == pytest.approx(0, abs=1e-6)
    assert one_proc[-1].kl > 1e-4
