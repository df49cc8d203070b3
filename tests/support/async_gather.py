"""What local_map hands to a function after a gather that is not waited for. Needs torch alone, and two ranks."""

from pathlib import Path

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
