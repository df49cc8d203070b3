"""What gloo_ranks.on_ranks runs on the ranks of a mesh: training steps, and exports."""

import hashlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from importlib import import_module
from pathlib import Path
from typing import Any, Literal

import numpy as np

from support.flash_on_cpu import flash_on_cpu
from support.trainer_cases import LAYOUTS, config
from titan_rl.config.choices import Family
from titan_rl.config.sections import ActivationCheckpointSection, Config, Dtype, ParallelismSection
from titan_rl.wire.types import Batch, Sample

STEPS = 2
MICROBATCHES = 4
LENGTH = 32


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """How one model is trained."""

    layout: str = "one"
    recompute: Literal["none", "selective", "full", "offload"] = "none"
    compiled: bool = False
    flash: bool = False  # the attention of CUDA
    compute: Dtype = "float32"
    sync: Literal["update", "microbatch"] = "update"
    parts: int = 1  # in which each update is accumulated
    gathers_once: bool = True  # if the host has the memory
    share: bool | None = None  # the prompts of groups; None: each document has its own
    family: Family = "llama3"
    layers: int = 2


MESHES = {
    "one": ParallelismSection(),
    **LAYOUTS,
    "hsdp_2x2": ParallelismSection(data_parallel_replicate_degree=2, data_parallel_shard_degree=2),
    "hsdp_2x2_ep2": ParallelismSection(
        data_parallel_replicate_degree=2, data_parallel_shard_degree=2, expert_parallel_degree=2
    ),
    "fsdp2_ep2": replace(LAYOUTS["fsdp2"], expert_parallel_degree=2),
    "tp2_ep2": replace(LAYOUTS["tp2"], expert_parallel_degree=2),
    "fsdp2_tp2_ep2": replace(LAYOUTS["fsdp2_tp2"], expert_parallel_degree=2),
    "hsdp_cp2": ParallelismSection(data_parallel_replicate_degree=2, context_parallel_degree=2),
    "cp4": ParallelismSection(context_parallel_degree=4),
    "cp2_ep2": replace(LAYOUTS["cp2"], expert_parallel_degree=2),
    "cp2_tp2_ep4": replace(LAYOUTS["cp2_tp2"], expert_parallel_degree=4),
    "fsdp2_tp2_ep4": replace(LAYOUTS["fsdp2_tp2"], expert_parallel_degree=4),
}


def config_of(case: Case, folder: Path) -> Config:
    base = config(folder, MESHES[case.layout], name=case.family, n_layers=case.layers)
    return replace(
        base,
        training=replace(
            base.training,
            seq_len=LENGTH,
            local_batch_size=1,
            mixed_precision_param=case.compute,
            gradient_sync=case.sync,
        ),
        activation_checkpoint=ActivationCheckpointSection(mode=case.recompute),
        compile=replace(base.compile, enable=case.compiled),
        checkpoint=replace(base.checkpoint, enable=False),
        algorithm=replace(base.algorithm, name="sft"),
    )


def samples(step: int, rows: int) -> list[Sample]:
    """Return two documents of random lengths for each row."""
    random = np.random.default_rng(step)
    cuts = random.integers(8, LENGTH - 8, rows)
    lengths = [length for cut in cuts for length in (cut, LENGTH - cut)]
    return [Sample(random.integers(3, 60, n).tolist(), [0, 0] + [1] * (n - 2)) for n in lengths]


def groups(step: int) -> list[Sample]:
    """Return groups of four samples, with prompts and answers of random lengths."""
    random = np.random.default_rng(step)
    made = []
    for _ in range(8):
        asked = random.integers(3, 60, random.integers(2, 12)).tolist()
        for size in random.integers(1, 8, 4).tolist():
            answer = random.integers(3, 60, size).tolist()
            made.append(Sample(asked + answer, [0] * len(asked) + [1] * size, {}, len(asked)))
    return made


def train_and_export(folder: Path, cases: Sequence[Case], exports: Sequence[Case]) -> tuple[list[Any], list[Any]]:
    """Return loss, gradient norm and router metrics of each step of each case; and the digest of each tensor of each
    export."""
    losses = [trained(folder / f"trained-{number}", case) for number, case in enumerate(cases)]
    return losses, [exported(folder / f"exported-{number}", case) for number, case in enumerate(exports)]


@contextmanager
def built(config: Config, case: Case) -> Iterator[Any]:
    """Build the trainer's model of a case, which has begun its phase; close it at the end."""
    import torch

    from titan_rl.actors.titan import model as titan_model
    from titan_rl.actors.titan import titan_cpu
    from titan_rl.actors.titan.role_model import RoleModel
    from titan_rl.preflight.shapes import shape_of

    real = titan_model.titan_config

    def traced(*arguments: Any) -> Any:  # inductor's C++ is not what CUDA runs; graphs and their fullgraph rule are
        made = real(*arguments)
        made.compile.backend = "aot_eager"
        return made

    titan_model.titan_config = traced
    if not case.gathers_once:
        titan_cpu.gathers_once = lambda *_: False
    with flash_on_cpu() if case.flash else nullcontext() as calls:
        model = RoleModel("trainer", config, shape_of(config.model), config.parallelism)
        model.begin_phase("rl", 0)
        yield model
        model.close()
    torch._dynamo.reset()  # the next case is another program: its compilations do not count with these
    titan_model.titan_config = real
    if calls is not None:
        assert calls["forward"] >= calls["backward"] >= STEPS * MICROBATCHES * config.model.n_layers


def trained(folder: Path, case: Case) -> list[list[float]]:
    import torch.distributed as dist

    from titan_rl.batch.packing import pack

    given = config_of(case, folder)
    with built(given, case) as model:
        row, found = dist.get_rank() // given.parallelism.row_ranks, []
        for step in range(STEPS):
            shards = given.parallelism.dp
            made = samples(step, shards * MICROBATCHES) if case.share is None else groups(step)
            share = bool(case.share)
            batch = pack(made, shards=shards, seq_len=LENGTH, rows_per_microbatch=1, pad_id=0, share=share)[row]
            assert case.share is not None or len(batch.microbatches) == MICROBATCHES
            assert share == any(rows.segments[:, 3].any() for rows in batch.microbatches)
            stats = model.step([batch]) if case.parts == 1 else streamed(model, batch, case.parts)
            routed = [value for name, value in stats.metrics.items() if name.startswith("router/")]
            found.append([stats.loss, stats.grad_norm, *routed])
    return found


def train_and_count(folder: Path, cases: Sequence[Case]) -> list[tuple[list[list[float]], int]]:
    """Return loss and gradient norm of each step of each case, and how often it gathered parameters."""
    groups: Any = import_module("torch.distributed.fsdp._fully_shard._fsdp_param_group")
    real, answers = groups.foreach_all_gather, []
    for number, case in enumerate(cases):
        calls: list[None] = []

        def counted(*arguments: Any, calls: list[None] = calls, **keywords: Any) -> Any:
            calls.append(None)
            return real(*arguments, **keywords)

        groups.foreach_all_gather = counted
        answers.append((trained(folder / str(number), case), len(calls)))
    groups.foreach_all_gather = real
    return answers


def streamed(model: Any, batch: Batch, parts: int) -> Any:
    size = MICROBATCHES // parts
    for start in range(0, MICROBATCHES, size):
        model.accumulate(replace(batch, microbatches=batch.microbatches[start : start + size]))
    return model.phase.update(batch, 1.0)


def exported(folder: Path, case: Case) -> dict[str, str]:
    import torch.distributed as dist
    from safetensors.numpy import load_file

    from titan_rl.actors.titan.role_model import RoleModel
    from titan_rl.preflight.shapes import shape_of

    given = config_of(case, folder)
    model = RoleModel("trainer", given, shape_of(given.model), given.parallelism)
    model.write(folder / "hf")
    dist.barrier()
    (file,) = (folder / "hf").glob("*.safetensors")
    return {name: hashlib.sha256(value.tobytes()).hexdigest() for name, value in load_file(file).items()}
