"""A tiny model whose parameters are sharded as TorchTitan shards them, and what a generator holds after a sync."""

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, distribute_tensor
from torch.distributed.tensor import Shard as ShardPlacement

from titan_rl.actors.sync.held_shards import shards_of
from titan_rl.actors.vllm.vllm_params import param_shapes, pieces
from titan_rl.wire.model_shape import ModelShape
from titan_rl.wire.weight_plan import Shard

# Rows that neither tensor parallelism nor FSDP divides evenly: 13 vocabulary rows, vectors of 7.
SHAPE = ModelShape(
    family="llama3",
    vocab_size=13,
    dim=7,
    n_layers=1,
    n_heads=4,
    n_kv_heads=2,
    head_dim=6,
    hidden_dim=10,
    max_seq_len=8,
    rope_theta=1e4,
    norm_eps=1e-6,
    tied=False,
)
BY_ROWS = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj", "embed_tokens", "lm_head")
BY_COLS = ("o_proj", "down_proj")
READERS = [pieces(SHAPE, tp=2, rank=rank) for rank in range(2)]


def hf_tensors() -> dict[str, Tensor]:
    """Every tensor as Hugging Face stores it, no two elements equal, not even in bfloat16's 8 bits per tensor."""
    generator = torch.Generator().manual_seed(0)
    sizes: dict[str, tuple[int, ...]] = {}
    for piece in pieces(SHAPE, tp=1, rank=0):
        sizes[piece.name] = (piece.rows,) if piece.cols == 1 else (piece.rows, piece.cols)
    return {name: torch.randn(size, generator=generator) for name, size in sizes.items()}


def generator_parameters(reader: int, dtype: torch.dtype, scale: float = 1.0) -> dict[str, Tensor]:
    """Return what a reader must hold after a sync of the weights times `scale`."""
    params = {name: torch.zeros(size, dtype=dtype) for name, size in param_shapes(SHAPE, 2).items()}
    tensors = hf_tensors()
    for p in READERS[reader]:
        whole = (tensors[p.name] * scale).to(dtype)
        if whole.dim() == 1:
            params[p.param][p.dst_row0 : p.dst_row0 + p.rows] = whole[p.row0 : p.row0 + p.rows]
        else:
            part = whole[p.row0 : p.row0 + p.rows, p.col0 : p.col0 + p.cols]
            params[p.param][p.dst_row0 : p.dst_row0 + p.rows, p.dst_col0 : p.dst_col0 + p.cols] = part
    return params


class Weights(nn.Module):
    """The parameters as TorchTitan shards them: tensor parallelism first, then FSDP2 or HSDP."""

    def __init__(self, replicate: int, fsdp: int, tp: int) -> None:
        super().__init__()
        mesh = init_device_mesh("cpu", (replicate, fsdp, tp), mesh_dim_names=("replicate", "fsdp", "tp"))
        for name, w in hf_tensors().items():
            if tp > 1:
                rows, cols = any(part in name for part in BY_ROWS), any(part in name for part in BY_COLS)
                placement = ShardPlacement(0) if rows else ShardPlacement(1) if cols else Replicate()
                w = distribute_tensor(w, mesh["tp"], [placement], src_data_rank=None)
            self.register_parameter(name.replace(".", "/"), nn.Parameter(w))
        fully_shard(self, mesh=mesh["replicate", "fsdp"] if replicate > 1 else mesh["fsdp"])
        self.hf_names = {name: name.replace("/", ".") for name, _ in self.named_parameters()}

    def shards(self) -> list[Shard]:
        return shards_of(self.named_parameters(), self.hf_names)

    def by_hf_name(self) -> dict[str, nn.Parameter]:
        return {self.hf_names[name]: param for name, param in self.named_parameters()}
