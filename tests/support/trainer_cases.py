"""Configs, mesh layouts and samples that system tests train on."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from titan_rl.batch.packing import Weighting, pack
from titan_rl.config.sections import (
    AlgorithmSection,
    Config,
    JobSection,
    ModelSection,
    OptimizerSection,
    ParallelismSection,
    TrainingSection,
)
from titan_rl.meshes.model_mesh import ModelMesh
from titan_rl.wire.types import Batch, Sample

STEPS = 4
LAYOUTS = {
    "fsdp2": ParallelismSection(data_parallel_shard_degree=2),
    "tp2": ParallelismSection(tensor_parallel_degree=2),
    "fsdp2_tp2": ParallelismSection(data_parallel_shard_degree=2, tensor_parallel_degree=2),
    "cp2": ParallelismSection(context_parallel_degree=2),
    "fsdp2_cp2": ParallelismSection(data_parallel_shard_degree=2, context_parallel_degree=2),
    "cp2_tp2": ParallelismSection(context_parallel_degree=2, tensor_parallel_degree=2),
    "hsdp": ParallelismSection(data_parallel_replicate_degree=2, data_parallel_shard_degree=1),
}


def config(folder: Path, parallelism: ParallelismSection, **model: object) -> Config:
    return Config(
        job=JobSection(dump_folder=str(folder)),
        model=replace(ModelSection(dim=64, n_layers=2, n_heads=4, n_kv_heads=2, hidden_dim=96), **model),
        training=TrainingSection(steps=10, seq_len=64, local_batch_size=2),  # tests make fewer
        optimizer=OptimizerSection(lr=1e-3),
        algorithm=AlgorithmSection(kl_coef=0.05, entropy_coef=0.01, rejection="geometric", rejection_low=0.2),
        parallelism=parallelism,
    )


def columns_of(random: np.random.Generator, n: int) -> dict[str, np.ndarray]:
    """Return random columns of a sample of `n` tokens, for every role."""
    logprobs = -4.2 + 0.1 * random.standard_normal(n)
    return {
        "behaviour": logprobs,
        "reference": logprobs + 0.1 * random.standard_normal(n),
        "advantage": np.full(n, random.standard_normal()),
        "value": 0.1 * random.standard_normal(n),
        "return": random.standard_normal(n),
    }


def samples(step: int) -> list[Sample]:
    """Return samples of different lengths, with prompts and every role's columns. The first three are one rollout's."""
    random = np.random.default_rng(step)
    made = []
    for _ in range(12):
        n, prompt = int(random.integers(6, 30)), int(random.integers(1, 5))
        columns = columns_of(random, n)
        tokens = random.integers(3, 60, n).tolist()
        owner = 0 if len(made) < 3 else -1
        made.append(Sample(tokens, [0] * prompt + [1] * (n - prompt), {}, sequence=owner).with_columns(**columns))
    return made


def batches(packed: Sequence[Sample], mesh: ModelMesh, together: int = 1) -> list[Batch]:
    how = Weighting("sequence_mean")
    return pack(packed, shards=mesh.dp, seq_len=64, rows_per_microbatch=2, pad_id=0, together=together, weighting=how)
