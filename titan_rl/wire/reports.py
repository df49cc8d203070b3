"""Reports of meshes and engines about a step and a weight sync: losses, counts and seconds."""

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import NamedTuple

COMPILED = "throughput/compiled"
"""Name in StepStats.hardware of the number of graphs that were compiled in the step."""
MEMORY = "memory/outside_gib"
"""Name in StepStats.hardware of the GPU memory outside torch's allocator; steps on GPUs have it, with memory/max_*."""


@dataclass(frozen=True, slots=True)
class StepStats:
    """Report of a training mesh about one step, already reduced over the mesh."""

    loss: float
    grad_norm: float
    lr: float
    tokens: int  # trained tokens
    seconds: float  # on the slowest rank
    skipped: int = 0  # updates with a gradient that was not finite
    busy: float = 0.0  # seconds in which this rank computed, or waited for a core
    ranks: Mapping[str, float] = field(default_factory=dict)  # busy seconds of every rank, by name
    metrics: dict[str, float] = field(default_factory=dict)  # by logged name
    histograms: dict[str, list[float]] = field(default_factory=dict)
    hardware: dict[str, float] = field(default_factory=dict)  # logged too; unlike metrics, they differ by run and mesh


class Backlog(NamedTuple):
    """Groups in flight."""

    inflight: int
    finished: int  # groups in flight that wait to be trained on
    curriculum: Mapping[str, float] = {}  # metrics of it, if there is one


@dataclass(slots=True)
class EngineStats:
    """Counts of an engine since start-up."""

    steps: int = 0
    tokens: int = 0  # sampled
    prompt_tokens: int = 0  # in finished samples
    cached_tokens: int = 0  # prompt tokens read from the prefix cache
    read_tokens: int = 0  # whose keys and values were computed before a sample's first token
    recomputed: int = 0  # tokens whose keys and values new weights have dropped
    drafted: int = 0  # tokens that were drafted (generator.drafts)
    accepted: int = 0  # drafted tokens that were sampled
    max_batch: int = 0  # largest number of samples in one step
    seconds: float = 0.0  # in add and step

    def since(self, before: "EngineStats") -> "EngineStats":
        return EngineStats(
            **{f.name: getattr(self, f.name) - getattr(before, f.name) for f in fields(self) if f.name != "max_batch"},
            max_batch=self.max_batch,
        )

    @property
    def hit_rate(self) -> float:
        return self.cached_tokens / max(self.prompt_tokens, 1)


@dataclass(frozen=True, slots=True)
class ReaderCost:
    """Cost of a weight sync to a reader: a rank that fetched, or an engine that switched."""

    read: float = 0.0  # seconds, without verification
    write: float = 0.0  # seconds
    verify: float = 0.0  # seconds of comparing checksums
    pause: float = 0.0  # seconds between two steps of an engine
    bytes: int = 0  # fetched
    changed: int = 0  # blocks fetched
    blocks: int = 0  # blocks of the publication
    remote: int = 0  # bytes that this rank, or this engine's ranks, brought to their host from others
    relayed: int = 0  # bytes of `remote` that came from hosts without trainers
    fell_back: str = ""  # why a broadcast or a relay did not bring it all; empty: it did, or there was none
    engine: EngineStats = field(default_factory=EngineStats)  # counts since the previous switch


@dataclass(frozen=True, slots=True)
class SyncStats:
    """Cost of one weight sync: seconds of the slowest rank per part, bytes over all generator ranks."""

    version: int
    bytes: int = 0
    publish: float = 0.0
    read: float = 0.0
    write: float = 0.0
    seconds: float = 0.0  # wall time in the controller
    verify: float = 0.0  # seconds of comparing checksums
    pause: float = 0.0  # seconds that an engine stood still
    changed: float | None = None  # share of the weights' blocks that were fetched; None without weight_sync.delta
    waited: float = 0.0  # seconds of `seconds` in which the controller did nothing else
    engines: Mapping[str, EngineStats] = field(default_factory=dict)  # each replica's counts since the previous sync
    into_host: int = 0  # most bytes that came to one host from others
    relayed: int = 0  # bytes that hosts without trainers sent to others
    fell_back: tuple[str, ...] = ()  # readers that a broadcast or a relay did not reach, each with the reason
    unreached: tuple[str, ...] = ()  # the replica of each of them
    refused: tuple[str, ...] = ()  # replicas that serve nothing, because these are not the announced weights
