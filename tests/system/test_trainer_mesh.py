"""Real TorchTitan under real Monarch: the mesh must not show in the numbers, of the policy or of the other roles."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors import safe_open

from support.slow_cases import slow_except
from support.tiny import tiny_llama
from support.trainer_cases import LAYOUTS, STEPS, batches, config, samples
from titan_rl.batch.packing import unpack
from titan_rl.config.sections import (
    ActivationCheckpointSection,
    AlgorithmSection,
    Config,
    CriticSection,
    ModelSection,
    ParallelismSection,
    ReferenceSection,
)
from titan_rl.meshes.model_mesh import ModelMesh
from titan_rl.preflight.shapes import shape_of
from titan_rl.tasks.prompts import to_judge
from titan_rl.wire.reports import StepStats

ROLE_STEPS = 3
TINY = ModelSection(dim=64, n_layers=2, n_heads=2, n_kv_heads=2, hidden_dim=96)


@asynccontextmanager
async def trainer(config: Config) -> AsyncIterator[ModelMesh]:
    from monarch.actor import this_host

    mesh = ModelMesh(this_host(), "trainer", config, shape_of(config.model), {})
    try:
        await mesh.start()
        yield mesh
    finally:
        await mesh.stop()


async def run(config: Config) -> list[StepStats]:
    async with trainer(config) as mesh:
        assert await mesh.begin_phase("rl", 0) == (0, "{}")
        return [await mesh.step([batches(samples(step), mesh)]) for step in range(STEPS)]


@pytest.fixture(scope="module")
def one_process(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[StepStats]]:
    """Return the steps of each model family without a mesh."""
    folder, whole = tmp_path_factory.mktemp("one"), ParallelismSection()
    return {name: asyncio.run(run(config(folder / name, whole, name=name))) for name in ("llama3", "qwen3")}


@pytest.mark.parametrize(
    ("family", "layout"),
    slow_except([*(("llama3", layout) for layout in LAYOUTS), ("qwen3", "fsdp2_tp2")], 0, 2, 4, 7),
    ids=str,
)
def test_loss_and_gradients_are_those_of_one_process(
    family: str, layout: str, one_process: dict[str, list[StepStats]], tmp_path: Path
) -> None:
    assert_same(asyncio.run(run(config(tmp_path, LAYOUTS[layout], name=family))), one_process[family])


def test_the_numbers_move(one_process: dict[str, list[StepStats]]) -> None:
    """An invariance of constants would prove nothing."""
    for steps in one_process.values():
        assert len({s.loss for s in steps}) == STEPS
        assert steps[-1].metrics["kl/k3"] > 1e-4
        assert steps[0].metrics["off_policy/masked"] < 1


def test_recomputed_activations_change_no_loss_and_no_name(
    one_process: dict[str, list[StepStats]], tmp_path: Path
) -> None:
    """Generators and exports know weights by these names."""
    recomputing = replace(
        config(tmp_path, LAYOUTS["fsdp2"], name="llama3"),
        activation_checkpoint=ActivationCheckpointSection(mode="full"),
    )

    async def body() -> tuple[list[StepStats], set[str]]:
        async with trainer(recomputing) as mesh:
            await mesh.begin_phase("rl", 0)
            stats = [await mesh.step([batches(samples(step), mesh)]) for step in range(STEPS)]
            names = {shard.name for shards in await mesh.shards() for shard in shards}
            await mesh.export(str(tmp_path / "hf"))
            return stats, names

    stats, names = asyncio.run(body())
    assert_same(stats, one_process["llama3"])
    (file,) = (tmp_path / "hf").glob("*.safetensors")
    with safe_open(file, "pt") as exported:
        assert set(exported.keys()) == names


def assert_same(stats: Sequence[StepStats], one: Sequence[StepStats]) -> None:
    for ours, theirs in zip(stats, one, strict=True):
        assert ours.loss == pytest.approx(theirs.loss, abs=1e-5)
        assert ours.grad_norm == pytest.approx(theirs.grad_norm, abs=1e-5)
        assert ours.metrics.keys() == theirs.metrics.keys()
        for name, value in ours.metrics.items():
            assert value == pytest.approx(theirs.metrics[name], abs=1e-4), name
        assert ours.histograms == theirs.histograms


# -- critic, reward model, reference ------------------------------------------------------------------------------


async def roles(
    folder: Path, weights: Path, parallelism: ParallelismSection
) -> tuple[list[StepStats], list[np.ndarray]]:
    """A critic and a reward model, both trained a few steps, and a reference: losses, and the reference's log-probs."""
    from monarch.actor import this_host

    host = this_host()
    shape = shape_of(TINY)
    role: dict[str, Any] = {
        "data_parallel_shard_degree": parallelism.data_parallel_shard_degree,
        "tensor_parallel_degree": parallelism.tensor_parallel_degree,
        "context_parallel_degree": parallelism.context_parallel_degree,
    }
    base = replace(
        config(folder, parallelism),
        model=replace(TINY, hf_assets_path=str(weights)),
        critic=CriticSection(lr=1e-3, **role),
        reference=ReferenceSection(**role),
        checkpoint=replace(config(folder, parallelism).checkpoint, enable=False),
    )
    judging = replace(base, algorithm=AlgorithmSection(name="reward_model"))
    critic = ModelMesh(host, "critic", base, shape.with_value_head(), {})
    reward_model = ModelMesh(host, "trainer", judging, shape.with_value_head(), {})
    reference = ModelMesh(host, "reference", base, shape, {})
    meshes = [critic, reward_model, reference]
    try:
        await asyncio.gather(*(mesh.start() for mesh in meshes))
        await asyncio.gather(critic.load_weights(str(weights)), reference.load_weights(str(weights)))
        await asyncio.gather(critic.begin_phase("rl", 0), reward_model.begin_phase("rl", 0))
        stats = []
        for step in range(ROLE_STEPS):
            stats.append(await critic.step([batches(samples(step), critic)]))
            pairs = [to_judge(sample.tokens, 0) for sample in samples(step)]
            stats.append(await reward_model.step([batches(pairs, reward_model, together=2)]))
        asked = samples(0)
        answers, checksums = await reference.scores(batches(asked, reference))
        assert (await reference.scores(batches(asked, reference)))[1] == checksums
        return stats, unpack(batches(asked, reference), answers, asked)
    finally:
        for mesh in meshes:
            await mesh.stop()


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("weights")
    tiny_llama(num_key_value_heads=2).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def one_proc_roles(weights: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[list[StepStats], list[np.ndarray]]:
    return asyncio.run(roles(tmp_path_factory.mktemp("roles"), weights, ParallelismSection()))


@pytest.mark.parametrize("layout", slow_except(["fsdp2", "fsdp2_tp2", "fsdp2_cp2", "cp2_tp2"], 1, 2))
def test_critic_reward_model_and_reference_are_those_of_one_process(
    layout: str, weights: Path, one_proc_roles: tuple[list[StepStats], list[np.ndarray]], tmp_path: Path
) -> None:
    stats, logprobs = asyncio.run(roles(tmp_path, weights, LAYOUTS[layout]))
    one_stats, one_logprobs = one_proc_roles
    assert_same(stats, one_stats)
    for ours, one in zip(logprobs, one_logprobs, strict=True):
        np.testing.assert_allclose(ours, one, atol=1e-5)
    assert len({s.loss for s in stats}) == 2 * ROLE_STEPS
