"""A rank's shards of the model, as rectangles of Hugging Face's tensors: the trainer's half of the weight plan."""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache

from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor import Shard as ShardPlacement

from titan_rl.actors.titan.private import StridedShard
from titan_rl.wire.weight_plan import Shard

Coordinates = Callable[[DeviceMesh], Sequence[int] | None]


def own_coordinates(mesh: DeviceMesh) -> Sequence[int] | None:
    return mesh.get_coordinate()


def coordinates_of(rank: int) -> Coordinates:
    """Return a function that finds a rank's place in a mesh."""

    @cache
    def coordinates(mesh: DeviceMesh) -> Sequence[int] | None:
        places = (mesh.mesh == rank).nonzero().tolist()
        return places[0] if places else None

    return coordinates


def shards_of(
    named_parameters: Iterable[tuple[str, Tensor]],
    hf_names: Mapping[str, str],
    coordinates: Coordinates = own_coordinates,
) -> list[Shard]:
    """Return the rectangle of each Hugging Face tensor that a rank holds, by default this one. `hf_names` is keyed by
    TorchTitan's names; `coordinates` returns the rank's place in a mesh. A stack of experts' matrices is a tensor of
    each of its experts."""
    shards = []
    for name, param in named_parameters:
        if name not in hf_names:
            raise ValueError(f"{name}: expected a Hugging Face name for every parameter of the trainer, found none")
        stacked = "{}" in hf_names[name]
        if param.dim() not in ((3,) if stacked else (1, 2)):
            expected = "a stack of matrices" if stacked else "a vector or a matrix"
            raise ValueError(f"{name}: expected {expected}, found shape {tuple(param.shape)}")
        extents = [_extent(name, param, dim, coordinates) for dim in range(param.dim())]
        first, count = extents.pop(0) if stacked else (0, 1)
        (row0, rows), (col0, cols) = [*extents, (0, 1)][:2]
        shards += [Shard(hf_names[name].format(i), row0, rows, col0, cols) for i in range(first, first + count)]
    return shards


def local_tensors(params: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return this rank's part of each Hugging Face tensor, which shares memory with the parameters. `params` is keyed
    by Hugging Face's names; the name of a stack of experts has {} for the expert's number."""
    tensors = dict[str, Tensor]()
    for name, param in params.items():
        part = param.to_local() if isinstance(param, DTensor) else param
        if "{}" in name:
            first, _ = _extent(name, param, 0, own_coordinates)
            tensors |= {name.format(first + i): matrix for i, matrix in enumerate(part)}
        else:
            tensors[name] = part
    return tensors


def whole(tensor: Tensor) -> Tensor:
    """Return a tensor with the parts of all ranks."""
    tensor = tensor.detach()
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def part_of(name: str, param: Tensor) -> list[tuple[int, int]]:
    """Return (first index, size) of this rank's part of each dimension."""
    return [_extent(name, param, dim, own_coordinates) for dim in range(param.dim())]


def _extent(name: str, param: Tensor, dim: int, coordinates: Coordinates) -> tuple[int, int]:
    """Return (first index, size) of a rank's part of a dimension, by torch.chunk's arithmetic.

    FSDP2 cuts shards of tensor parallelism, though its mesh dimension comes first: StridedShard means that. DTensor's
    own offsets emulate it by striding, which is wrong where tensor parallelism is uneven (13 rows over dp 3 x tp 2), so
    the cuts are applied here in the order in which they were made.
    """
    start, size = 0, param.shape[dim]
    if not isinstance(param, DTensor):
        return start, size
    mesh, coordinate = param.device_mesh, coordinates(param.device_mesh)
    if coordinate is None:
        raise ValueError(f"{name}: expected this rank in the parameter's mesh {mesh}")
    if any(placement.is_partial() for placement in param.placements):
        raise ValueError(f"{name}: expected sharded or replicated values, found placements {param.placements}")
    cuts = [i for i, p in enumerate(param.placements) if isinstance(p, ShardPlacement) and p.dim == dim]
    late = {i: p.split_factor for i, p in enumerate(param.placements) if isinstance(p, StridedShard) and p.dim == dim}
    for i, split in late.items():
        if len(late) > 1 or split != math.prod(mesh.size(j) for j in cuts) or min(cuts) < i:
            raise ValueError(f"{name}: expected FSDP2 over tensor parallelism, found placements {param.placements}")
    for i in [*cuts, *late]:
        chunk = -(-size // mesh.size(i))
        skip = min(coordinate[i] * chunk, size)
        start, size = start + skip, min(chunk, size - skip)
    if coordinates is own_coordinates and size != param.to_local().shape[dim]:
        raise ValueError(
            f"{name}: expected {size} local entries in dimension {dim} under placements {param.placements}, "
            f"found {param.to_local().shape[dim]}"
        )
    return start, size
