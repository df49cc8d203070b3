"""After a sync, what vLLM holds is bit for bit what vLLM's own loader makes of the trainer's export."""

import asyncio
import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from monarch.actor import this_host

from titan_rl.actors.vllm import vllm_cpu
from titan_rl.actors.vllm.engine import EngineSettings
from titan_rl.batch.packing import pack
from titan_rl.config import sections as c
from titan_rl.config.auto import on_device
from titan_rl.config.choices import Quantization
from titan_rl.meshes.generator_mesh import GeneratorMesh
from titan_rl.meshes.model_mesh import ModelMesh
from titan_rl.preflight.shapes import shape_of
from titan_rl.train.weight_sync import WeightSync
from titan_rl.wire.model_shape import ModelShape
from titan_rl.wire.spans import Clock
from titan_rl.wire.types import Request, Sample, Sampling

MODEL = c.ModelSection(dim=64, n_layers=2, n_heads=4, n_kv_heads=2, head_dim=0, hidden_dim=96, vocab_size=128)
CASES = {
    "llama_fsdp2_to_tp1": (replace(MODEL, dim=128), c.ParallelismSection(data_parallel_shard_degree=2), 1, "float32"),
    "llama_tied_fsdp2_tp2_to_tp2": (
        replace(MODEL, dim=128, enable_weight_tying=True),
        c.ParallelismSection(data_parallel_shard_degree=2, tensor_parallel_degree=2),
        2,
        "float32",
    ),
    "qwen3_tied_hsdp_to_tp2_bf16": (
        replace(MODEL, name="qwen3", head_dim=32, enable_weight_tying=True),
        c.ParallelismSection(data_parallel_replicate_degree=2),
        2,
        "bfloat16",
    ),
    "llama_fsdp2_to_tp1_in_fp8": (
        replace(MODEL, dim=128),
        c.ParallelismSection(data_parallel_shard_degree=2),
        1,
        "bfloat16",
    ),
}
QUANTIZED = ("llama_fsdp2_to_tp1_in_fp8",)  # as vLLM's own loader quantizes the export

STARTS_FROM_A_FOLDER = ("llama_tied_fsdp2_tp2_to_tp2",)


def run_config(
    folder: Path,
    model: c.ModelSection,
    parallelism: c.ParallelismSection,
    tp: int,
    dtype: str,
    quantization: Quantization = "none",
) -> c.Config:
    return on_device(
        c.Config(
            job=c.JobSection(dump_folder=str(folder)),
            model=model,
            training=c.TrainingSection(steps=5, seq_len=64, local_batch_size=2),
            optimizer=c.OptimizerSection(lr=1e-2),
            parallelism=parallelism,
            generator=c.GeneratorSection(
                tensor_parallel_degree=tp,
                dtype="bfloat16" if dtype == "bfloat16" else "float32",
                quantization=quantization,
            ),
        ),
        "cpu",
    )


def model_folder(folder: Path, shape: ModelShape) -> str:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(shape.hf_config(bos=1, eos=2, pad=0)))
    return str(folder)


async def generators(config: c.Config, folder: str, *, load: bool) -> GeneratorMesh:
    g = config.generator
    settings = EngineSettings(
        model_dir=folder,
        shape=shape_of(config.model),
        max_model_len=64,
        dtype=g.dtype,
        quantization=g.quantization,
        max_num_seqs=8,
        tensor_parallel_degree=g.tensor_parallel_degree,
        kv_cache_memory_mb=16,
        load_format="auto" if load else "dummy",
    )
    mesh = await GeneratorMesh.spawn(this_host(), settings, replicas=1, env=vllm_cpu.ENV)
    await mesh.start()
    return mesh


def batches(shards: int) -> list[Sample]:
    random = np.random.default_rng(0)
    columns = {"behaviour": np.full(20, -4.0), "advantage": np.ones(20)}
    return [Sample(random.integers(3, 90, 20).tolist(), [1] * 20, {}).with_columns(**columns) for _ in range(8)]


def made_by_transformers(folder: Path, model: c.ModelSection) -> c.ModelSection:
    """Write the model as a Hugging Face folder with weights, which the trainer then starts from."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    model_folder(folder, shape_of(model))
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder)).save_pretrained(folder)
    return replace(model, hf_assets_path=str(folder))


async def of_a_fresh_engine(config: c.Config, folder: str) -> list[dict[str, str]]:
    """Return the fingerprints of an engine that vLLM's own loader has filled from a folder."""
    mesh = await generators(config, folder, load=True)
    found = await mesh.fingerprint()
    await mesh.close()
    await mesh.stop()
    return found


async def fingerprints(folder: Path, case: str) -> list[list[dict[str, str]]]:
    """Return the fingerprints of an engine that loads the trainer's first weights (if those come from a folder), of the
    live engine after the first sync, of it after training and more syncs, and of an engine that loads the export."""
    model, parallelism, tp, dtype = CASES[case]
    if case in STARTS_FROM_A_FOLDER:
        model = made_by_transformers(folder / "assets", model)
    config = run_config(folder, model, parallelism, tp, dtype, "fp8" if case in QUANTIZED else "none")
    shape, clock = shape_of(model), Clock()
    trainers = ModelMesh(this_host(), "trainer", config, shape, {})
    live, _ = await asyncio.gather(
        generators(config, model_folder(folder / "model", shape), load=False), trainers.start()
    )
    await trainers.begin_phase("rl", 0)
    weights = WeightSync(trainers, live, clock)
    await weights.connect(config, shape)

    first = await weights.sync(0)
    before = await live.fingerprint()
    samples = batches(trainers.dp)
    await trainers.step([pack(samples, shards=trainers.dp, seq_len=64, rows_per_microbatch=2, pad_id=0)])
    second = await weights.sync(1)
    after = await live.fingerprint()
    assert first.bytes == second.bytes == sum(shape_bytes(shape, tp, dtype))
    (completion,) = await live.generate(Request("r", [5, 6, 7], [0], Sampling(4)))
    assert set(completion.versions) == {1}
    after = await by_other_ways(config, shape, trainers, live, after)

    await trainers.export(str(folder / "hf"))
    await asyncio.gather(live.close(), trainers.close())
    await asyncio.gather(live.stop(), trainers.stop())
    fresh = await of_a_fresh_engine(config, model_folder(folder / "hf", shape))
    assets = config.model.hf_assets_path
    start = await of_a_fresh_engine(config, assets) if assets else before
    return [start, before, after, fresh]


WAYS = (
    c.WeightSyncSection(transport="shm", verify="transfer", block_kb=4, delta=True),
    c.WeightSyncSection(transport="rdma", verify="transfer", block_kb=4),
    c.WeightSyncSection(transport="rdma", verify="live", block_kb=4, delta=True),
    c.WeightSyncSection(transport="broadcast", verify="transfer", block_kb=4, delta=True),
)
NAMES = {"shm": "shared memory", "rdma": "RDMABuffer (TCP fallback)", "broadcast": "broadcast (gloo)"}


async def by_other_ways(
    config: c.Config, shape: ModelShape, trainers: ModelMesh, live: GeneratorMesh, held: list[dict[str, str]]
) -> list[dict[str, str]]:
    """Sync one more step by each way; a sync by the usual way must then change nothing."""
    for version, way in enumerate(WAYS, start=2):
        samples = batches(trainers.dp)
        await trainers.step([pack(samples, shards=trainers.dp, seq_len=64, rows_per_microbatch=2, pad_id=0)])
        weights = WeightSync(trainers, live, Clock())
        await weights.connect(replace(config, weight_sync=way), shape)
        assert weights.transports == NAMES[way.transport]
        stats = await weights.sync(version)
        assert not stats.fell_back
        before, held = held, await live.fingerprint()
        assert different(before, held) == set(before[0])
        if way.delta:
            again = await weights.sync(version)
            assert (stats.changed, again.changed, again.bytes) == (1, 0, 0)
        usual = WeightSync(trainers, live, Clock())
        await usual.connect(config, shape)
        await usual.sync(version)
        assert different(held, await live.fingerprint()) == set()
    return held


def shape_bytes(shape: ModelShape, tp: int, dtype: str) -> list[int]:
    """Return the bytes that each generator rank must read: its parameters, less the rows that pad the vocabulary."""
    from titan_rl.actors.vllm.vllm_params import pieces

    return [
        sum(p.rows * p.cols for p in pieces(shape, tp=tp, rank=rank)) * (2 if dtype == "bfloat16" else 4)
        for rank in range(tp)
    ]


@pytest.mark.parametrize("case", CASES)
def test_live_parameters_are_the_exported_ones(case: str, tmp_path: Path) -> None:
    start, before, after, fresh = asyncio.run(fingerprints(tmp_path, case))
    assert different(start, before) == set()
    assert different(after, fresh) == set()
    assert different(before, after) == set(before[0]), "training changes every parameter, so syncing does"


def different(one: list[dict[str, str]], other: list[dict[str, str]]) -> set[str]:
    """Return the parameters that differ on any rank."""
    return {name for a, b in zip(one, other, strict=True) for name in a if a[name] != b[name]}
