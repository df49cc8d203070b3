"""Programs for two ranks: what local_map hands to a function after a gather that is not waited for.

They go with the work-around, see docs/upstream/local-map-gradient.
"""

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.experimental import local_map

from titan_rl.actors.meeting import meet_in_file


def needs_gradient(_: Path) -> dict[str, bool]:
    """Return whether an input of one row, which requires a gradient and was gathered over the ranks, still requires one
    where a function under local_map sees it."""
    meet_in_file()
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (2,))
    half = DTensor.from_local(torch.ones(1, 4, 2, requires_grad=True), mesh, [Shard(1)])

    def asked(*, asynchronous: bool, copied: bool) -> bool:
        seen = list[bool]()

        def function(x: torch.Tensor) -> torch.Tensor:
            seen.append(x.requires_grad)
            return x

        whole = half.redistribute(placements=[Replicate()], async_op=asynchronous)
        inner = local_map(function, out_placements=[Replicate()], in_placements=([Replicate()],), device_mesh=mesh)
        inner(whole.clone() if copied else whole)
        return seen[0]

    return {
        "waited for": asked(asynchronous=False, copied=False),
        "unfinished": asked(asynchronous=True, copied=False),
        "unfinished, copied": asked(asynchronous=True, copied=True),
    }


def train_tensor_parallel(folder: Path) -> tuple[list[bool], list[list[float]]]:
    """Train a mixture of experts with tensor parallelism. Return which of its layers copy their input, and loss,
    gradient norm and router metrics of each step."""
    from support.rank_programs import Case, trained
    from titan_rl.actors.titan.experts import Mixture

    kind: Any = Mixture
    copies, parallelize = list[bool](), kind.parallelize

    def parallelized(layer: Mixture, dims: Any) -> None:
        parallelize(layer, dims)
        copies.append(layer.copies_input)

    kind.parallelize = parallelized
    return copies, trained(folder, Case(family="qwen3_moe", layout="tp2", share=False))
