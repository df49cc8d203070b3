"""Checks that the KV cache of an engine holds the sequences that it samples at once."""

import math
from collections.abc import Iterator
from dataclasses import dataclass

from titan_rl.config.sections import Config
from titan_rl.preflight.checks.environment import in_flight
from titan_rl.preflight.checks.gpu_memory import needs, on_gpus, role_shapes
from titan_rl.preflight.device_memory import cache_bytes_per_token
from titan_rl.preflight.quantities import size
from titan_rl.wire.model_shape import ModelShape

FEWEST = 4  # whole sequences in a cache: with fewer, an engine computes hardly anything at a time


@dataclass(frozen=True, slots=True)
class CacheRoom:
    """How many sequences of full length the KV cache of an engine holds, and how many it samples at once."""

    nbytes: int
    longest: int  # tokens of a sequence
    block: int  # bytes
    block_size: int  # tokens
    wanted: int

    @property
    def whole(self) -> int:
        return self._blocks // math.ceil(self.longest / self.block_size)

    @property
    def fewest(self) -> int:
        return min(FEWEST, self.wanted)

    def mib(self, sequences: int) -> int:
        """Return the size of a cache that holds this number of them."""
        return math.ceil((sequences * math.ceil(self.longest / self.block_size) + 1) * self.block / 2**20)

    def length(self, sequences: int) -> int:
        """Return the longest length at which this cache holds this number of sequences."""
        return self._blocks // sequences * self.block_size

    @property
    def _blocks(self) -> int:
        return max(0, self.nbytes // self.block - 1)  # vLLM keeps one for itself


def cache_room(config: Config, shape: ModelShape, gpu_bytes: int) -> CacheRoom | None:
    """Return the room in the KV cache of one engine, from a config; None if nothing is sampled, if an
    engine measures the room itself, or if it does not fit its GPU, which check_gpu_memory refuses."""
    g = config.generator
    if not config.samples_rollouts or shape.head == "value":
        return None
    nbytes = g.kv_cache_memory_mb << 20
    if not nbytes and gpu_bytes:
        found = on_gpus(config, shape, gpu_bytes)
        need = needs(found, shape, gpu_bytes, role_shapes(config, shape))["generator"]
        nbytes = need.own.kept["KV cache"].nbytes if need.fits else 0
    if not nbytes:
        return None
    samples = config.eval.size or 1
    if config.algorithm.kind == "rl":
        r = config.rollout
        samples = in_flight(config) if config.rollout_code else r.groups_per_step * r.group_size * (1 + r.lag)
    block = g.block_size * cache_bytes_per_token(config, shape)
    wanted = min(g.max_num_seqs, math.ceil(samples / g.replicas))
    return CacheRoom(nbytes, g.max_model_len or config.training.seq_len, block, g.block_size, wanted)


def check_cache_room(config: Config, shape: ModelShape, gpu_bytes: int) -> Iterator[str]:
    room, g = cache_room(config, shape, gpu_bytes), config.generator
    if config.samples_rollouts and config.placement.kind == "colocated" and not (g.kv_cache_memory_mb or gpu_bytes):
        why = 'because with placement.kind = "colocated" it is planned, and the memory of the GPUs is unknown'
        yield f"generator.kv_cache_memory_mb: expected a size, {why}, found 0"
    if room is None or room.whole >= room.fewest:
        return
    sequences = f"{room.fewest} sequences" if room.fewest > 1 else "one sequence"
    if g.kv_cache_memory_mb:
        cache = f"the KV cache of {sequences} of {room.longest} tokens"
        least = room.mib(room.fewest)
        yield f"generator.kv_cache_memory_mb: expected at least {least}, {cache}, found {g.kv_cache_memory_mb}"
    else:
        cache = f"of which the KV cache of {size(room.nbytes)} by estimate holds {sequences}"
        yield f"generator.max_model_len: expected at most {room.length(room.fewest)}, {cache}, found {room.longest}"


def cache_warning(config: Config, shape: ModelShape, gpu_bytes: int) -> Iterator[str]:
    room = cache_room(config, shape, gpu_bytes)
    if room is None or not room.fewest <= room.whole < room.wanted:
        return
    advice = "lower generator.max_model_len if no sequence is as long"
    if config.generator.kv_cache_memory_mb:
        advice = f"generator.kv_cache_memory_mb = {room.mib(room.wanted)} holds them all"
    yield (
        f"generator: the KV cache of {size(room.nbytes)} holds {room.whole} sequences of {room.longest} tokens, of the "
        f"{room.wanted} that an engine samples at once: if they grow as long, some wait or are computed again; {advice}"
    )
