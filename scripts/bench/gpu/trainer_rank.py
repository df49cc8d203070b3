"""One trainer rank's model, by default of Qwen3's width, and samples in groups."""

import gc
import os
import socket
import tempfile
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from bench.gpu.measured import ON_CPU
from titan_rl.actors.titan import private
from titan_rl.actors.titan.role_model import RoleModel
from titan_rl.config import sections as c
from titan_rl.config.presets import preset
from titan_rl.preflight.memory import on_cpu, on_gpus
from titan_rl.preflight.shapes import shape_of
from titan_rl.wire.cores import host_memory
from titan_rl.wire.model_shape import ModelShape
from titan_rl.wire.types import Column, Sample

QWEN3_0_6B: dict[str, Any] = {
    "dim": 1024,
    "n_heads": 16,
    "n_kv_heads": 8,
    "head_dim": 128,
    "hidden_dim": 3072,
    "vocab_size": 151936,
}
TINY: dict[str, Any] = {"dim": 64, "n_heads": 4, "n_kv_heads": 2, "head_dim": 32, "hidden_dim": 96, "vocab_size": 997}


def config_of(
    layers: int,
    seq_len: int,
    dtype: Any = "bfloat16",
    *,
    rows: int = 1,
    algorithm: Any = "grpo",
    compiled: bool = False,
    recompute: Any = "none",
    deterministic: bool = False,
) -> c.Config:
    """Return a config as a run on this GPU would resolve it, with fewer layers and shorter rows on a CPU."""
    layers, seq_len = (2, 128) if ON_CPU else (layers, seq_len)
    return resolved(
        c.ModelSection(name="qwen3", n_layers=layers, enable_weight_tying=True, **(TINY if ON_CPU else QWEN3_0_6B)),
        c.TrainingSection(steps=20, seq_len=seq_len, local_batch_size=rows, mixed_precision_param=dtype),
        compile=c.CompileSection(enable=compiled),
        activation_checkpoint=c.ActivationCheckpointSection(mode=recompute),
        algorithm=preset(algorithm),
        debug=c.DebugSection(deterministic=deterministic),
    )


def resolved(model: c.ModelSection, training: c.TrainingSection, **sections: Any) -> c.Config:
    """Return a config as a run of one trainer rank on this machine would resolve it."""
    config = c.Config(
        job=c.JobSection(dump_folder=tempfile.mkdtemp()),
        model=model,
        training=training,
        optimizer=c.OptimizerSection(lr=1e-6),
        checkpoint=c.CheckpointSection(enable=False),
        **sections,
    )
    shape = shape_of(config.model)
    return on_cpu(config, shape, host_memory()) if ON_CPU else on_gpus(config, shape, gpu_bytes())


def gpu_bytes() -> int:
    return torch.cuda.get_device_properties(0).total_memory


def model_of(config: c.Config) -> tuple[RoleModel, ModelShape]:
    """Build a trainer of one rank, in its RL phase; the process may have had another one before."""
    if dist.is_initialized():
        dist.destroy_process_group()
        private.forget_shardings()
        gc.collect()  # a module of FSDP2 is in cycles
        torch.cuda.empty_cache()
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    os.environ.update(RANK="0", LOCAL_RANK="0", WORLD_SIZE="1", MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    shape = shape_of(config.model)
    model = RoleModel("trainer", config, shape, config.parallelism)
    model.begin_phase("rl", 0)
    return model, shape


def samples(seed: int, groups: int, size: int, prompt: int, answer: tuple[int, int], vocabulary: int) -> list[Sample]:
    """Draw groups of samples with a prompt in common, and answers of between `answer` tokens."""
    random, made = np.random.default_rng(seed), list[Sample]()
    for _ in range(groups):
        asked = random.integers(3, vocabulary, prompt).tolist()
        for _ in range(size):
            n = int(random.integers(*answer))
            tokens = asked + random.integers(3, vocabulary, n).tolist()
            advantage = np.full(len(tokens), random.standard_normal())
            columns: dict[Column, Any] = {
                "behaviour": np.full(len(tokens), -np.log(vocabulary)),
                "advantage": advantage,
            }
            made.append(Sample(tokens, [0] * prompt + [1] * n, columns, prompt))
    return made
