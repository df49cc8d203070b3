"""The shards of TorchTitan's layouts, without torch."""

from titan_rl.actors.vllm.vllm_params import pieces
from titan_rl.wire.model_shape import ModelShape
from titan_rl.wire.weight_plan import Shard


def shards(shape: ModelShape, rank: int, *, fsdp: int, tp: int = 1) -> list[Shard]:
    """The shards that FSDP2 over tensor parallelism leaves on a rank. HSDP replicas hold the same shards."""
    held = []
    for p in pieces(shape, tp=1, rank=0):
        row, col = (0, p.rows), (0, p.cols)
        if any(name in p.name for name in ("o_proj", "down_proj")):
            col = chunk(*col, tp, rank % tp)
        elif p.cols > 1:
            row = chunk(*row, tp, rank % tp)
        row = chunk(*row, fsdp, rank // tp % fsdp)
        held.append(Shard(p.name, *row, *col))
    return held


def chunk(start: int, size: int, parts: int, index: int) -> tuple[int, int]:
    """Return start and size of one of torch.chunk's parts."""
    each = -(-size // parts)
    skip = min(index * each, size)
    return start + skip, min(each, size - skip)
