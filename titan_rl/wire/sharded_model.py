"""How a model is cut over the ranks of a mesh, in numbers of parameters."""

from collections.abc import Sequence
from dataclasses import dataclass

from titan_rl.config.sections import Config, ParallelismSection
from titan_rl.wire.model_shape import ModelShape
from titan_rl.wire.weight_plan import Piece


@dataclass(frozen=True, slots=True)
class ShardedModel:
    """Numbers of parameters on the fullest rank of a mesh, and how many of them FSDP2 gathers at once."""

    held: int  # its own shards
    whole: int  # all groups gathered: what tensor parallelism leaves
    block: int  # the largest transformer block gathered
    last: int  # the group of the head gathered
    sent: Sequence[Sequence[int]] = ()  # by rank and reader: what a weight sync moves; empty without readers


@dataclass(frozen=True, slots=True)
class MeshQuestion:
    """What has to be known to cut a model: `config` without "auto", and who reads the weights."""

    config: Config
    shape: ModelShape
    parallelism: ParallelismSection
    readers: Sequence[Sequence[Piece]] = ()
