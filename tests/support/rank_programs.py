"""What gloo_ranks.on_ranks runs on the ranks of a mesh: training steps, and exports."""

import hashlib
import traceback
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from importlib import import_module
from pathlib import Path
from typing import Any, Literal

import numpy as np

from support.flash_on_cpu import flash_on_cpu
from support.trainer_cases import LAYOUTS, config
from titan_rl.batch.packing import pack
from titan_rl.config.choices import Family
from titan_rl.config.sections import ActivationCheckpointSection, Config, Dtype, LoraSection, ParallelismSection
from titan_rl.wire.types import Batch, Sample

STEPS = 2
COPIES = {"copy_", "_foreach_copy_", "_to_copy", "clone", "cat", "chunk_cat", "all_gather_copy_in"}
COPIES |= {"split_with_sizes_copy"}
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
    gather: Literal["update", "microbatch"] = "update"
    keep_logits: bool = False
    microbatches: int = MICROBATCHES
    share: bool | None = None  # the prompts of groups; None: each document has its own
    family: Family = "llama3"
    layers: int = 2
    lora: int = 0  # rank of adapters


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
            parameter_gather=case.gather,
            keep_logits=case.keep_logits,
        ),
        activation_checkpoint=ActivationCheckpointSection(mode=case.recompute),
        compile=replace(base.compile, enable=case.compiled),
        checkpoint=replace(base.checkpoint, enable=False),
        algorithm=replace(base.algorithm, name="sft"),
        lora=LoraSection(rank=case.lora),
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
    from titan_rl.actors.titan.role_model import RoleModel
    from titan_rl.preflight.shapes import shape_of

    real = titan_model.titan_config

    def traced(*arguments: Any) -> Any:  # inductor's C++ is not what CUDA runs; graphs and their fullgraph rule are
        made = real(*arguments)
        made.compile.backend = "aot_eager"
        return made

    titan_model.titan_config = traced
    with flash_on_cpu() if case.flash else nullcontext() as calls:
        model = RoleModel("trainer", config, shape_of(config.model), config.parallelism)
        model.begin_phase("rl", 0)
        yield model
        model.close()
    torch._dynamo.reset()  # the next case is another program: its compilations do not count with these
    titan_model.titan_config = real
    if calls is not None:
        assert calls["forward"] >= calls["backward"] >= STEPS * MICROBATCHES * config.model.n_layers


def trained(folder: Path, case: Case, last: AbstractContextManager[Any] | None = None) -> list[list[float]]:
    """Return loss, gradient norm and router metrics of each step, of which the last is taken in `last`."""
    import torch.distributed as dist

    given = config_of(case, folder)
    with built(given, case) as model:
        row, found = dist.get_rank() // given.parallelism.row_ranks, []
        for step in range(STEPS):
            shards = given.parallelism.dp
            made = samples(step, shards * case.microbatches) if case.share is None else groups(step)
            share = bool(case.share)
            batch = pack(made, shards=shards, seq_len=LENGTH, rows_per_microbatch=1, pad_id=0, share=share)[row]
            assert case.share is not None or len(batch.microbatches) == case.microbatches
            assert share == any(rows.segments[:, 3].any() for rows in batch.microbatches)
            with last if last and step == STEPS - 1 else nullcontext():
                stats = model.step([batch]) if case.parts == 1 else streamed(model, batch, case.parts)
            routed = [value for name, value in stats.metrics.items() if name.startswith("router/")]
            found.append([stats.loss, stats.grad_norm, *routed])
    return found


def train_and_count(folder: Path, cases: Sequence[Case]) -> list[tuple[list[list[float]], int, int]]:
    """Return loss and gradient norm of each step of each case; and how often the last step gathered parameters, and how
    many operations copied parameters and gradients, in FSDP2 or in ComputeCopies. On a GPU each is a launch."""
    dispatch: Any = import_module("torch.utils._python_dispatch")

    class Counts(dispatch.TorchDispatchMode):
        def __init__(self) -> None:
            super().__init__()
            self.gathers = self.copies = 0

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            name = func.__name__.split(".")[0]
            if name in COPIES or name == "_allgather_base_":
                files = {frame.f_code.co_filename for frame, _ in traceback.walk_stack(None)}
                own = any("_fully_shard/" in file or "compute_copies" in file for file in files)
                self.gathers += own and name not in COPIES
                self.copies += own and name in COPIES
            return func(*args, **(kwargs or {}))

    answers = []
    for number, case in enumerate(cases):
        losses = trained(folder / str(number), case, counts := Counts())
        answers.append((losses, counts.gathers, counts.copies))
    return answers


def saved_and_stepped(_: Path, shared: str, case: Case, at: int) -> list[float]:
    """Resume from the checkpoint of step `at` in `shared`, or begin there, take a step and save it. Return loss and
    gradient norm of the next."""
    import torch.distributed as dist

    from titan_rl.actors.titan.role_model import RoleModel
    from titan_rl.preflight.shapes import shape_of

    given = config_of(case, Path(shared))
    given = replace(given, checkpoint=replace(given.checkpoint, enable=True))
    model, row = RoleModel("trainer", given, shape_of(given.model), given.parallelism), dist.get_rank()
    model.begin_phase("rl", at)
    stats: Any = None
    for step in (at, at + 1):
        made = samples(step, 2 * MICROBATCHES)
        batch = pack(made, shards=given.parallelism.dp, seq_len=LENGTH, rows_per_microbatch=1, pad_id=0)[row]
        stats = model.step([batch])
        if step == at:
            model.phase.save(at + 1, "{}", on_disk=True)
    model.close()
    return [stats.loss, stats.grad_norm]


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
