"""Blocks of vLLM's KV cache for samples that are no vLLM requests.

They come from vLLM's own pool, under vLLM's own hashes: every later sample of the same context finds them. As in vLLM,
a block is found as soon as the step that fills it is planned.

What an ended sample leaves in a block that is not full is found too, for as long as nobody has taken the block: by the
next turn of a rollout, whose context begins with it. That one copies the block, and goes on in its own.
"""

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np
from vllm.utils.hashing import get_hash_fn_by_name
from vllm.v1.core.kv_cache_utils import KVCacheBlock, hash_block_tokens

GROUP = 0  # of layers: they all attend to the whole context


class Hashed(NamedTuple):
    """What vLLM's pool reads of a request."""

    block_hashes: Sequence[Any]


class PlainBlocks:
    def __init__(self, pool: Any, size: int, algorithm: str) -> None:
        self._pool, self.size = pool, size
        self._parts = set[int]()  # how many tokens blocks have that are kept though they are not full
        self._hash = get_hash_fn_by_name(algorithm)

    def hashes(self, tokens: Sequence[int], salt: str, before: Sequence[Any] = ()) -> list[Any]:
        """Return the hashes of a context's full blocks, given those of the blocks `before` these tokens."""
        found, size = [*before], self.size
        for end in range(size, len(tokens) + 1 if self._pool.enable_caching else 0, size):
            found.append(self._hash_after(found, tokens[end - size : end], salt))
        return found

    def _hash_after(self, before: Sequence[Any], tokens: Sequence[int], salt: str) -> Any:
        parent, keys = (before[-1], None) if before else (None, (("cache_salt", salt),))
        return hash_block_tokens(self._hash, parent, tokens, keys)

    def cached(self, hashes: Sequence[Any]) -> list[KVCacheBlock]:
        """Return the blocks of the longest beginning of a context that the cache holds."""
        found = list[KVCacheBlock]()
        for one in hashes:
            if not (blocks := self._pool.get_cached_block(one, [GROUP])):
                break
            found += blocks
        return found

    def fit(self, cached: Sequence[KVCacheBlock], new: int) -> int:
        """Return how many samples have room that read the same cached blocks, and need `new` others each."""
        revived = sum(block.ref_cnt == 0 for block in cached)
        return max(0, self._pool.get_num_free_blocks() - revived) // new

    def take(self, cached: Sequence[KVCacheBlock], new: int, samples: int) -> np.ndarray:
        """Return the numbers of the blocks of each sample, the cached ones first.  # [samples, blocks]"""
        taken = np.empty((samples, len(cached) + new), np.int32)
        taken[:, : len(cached)] = [block.block_id for block in cached]
        if cached:
            for _ in range(samples):
                self._pool.touch(cached)
        blocks = self._pool.get_new_blocks(samples * new)
        taken[:, len(cached) :] = np.reshape([block.block_id for block in blocks], (samples, new))
        return taken

    def keep(self, hashes: Sequence[Any], numbers: Iterable[int], cached: int) -> None:
        """Let others find a sample's full blocks, of which the first `cached` are found already."""
        if len(hashes) > cached:
            blocks = self.of(numbers)
            self._pool.cache_full_blocks(Hashed(hashes), blocks, cached, len(hashes), self.size, GROUP)

    def keep_part(self, before: Sequence[Any], tokens: Sequence[int], salt: str, numbers: Sequence[int]) -> None:
        """Let others find the last of these blocks, of an ended sample: those before it are full, and it is not."""
        if tokens and self._pool.enable_caching:
            self.keep([*before, self._hash_after(before, tokens, salt)], numbers, len(before))
            self._parts.add(len(tokens))

    def part(self, before: Sequence[Any], tokens: Sequence[int], salt: str) -> tuple[int, int]:
        """Return how many of these tokens a kept block begins with, at most, and its number; 0, 0 if there is none."""
        for length in sorted(self._parts, reverse=True):
            if length <= len(tokens):
                found = self._pool.get_cached_block(self._hash_after(before, tokens[:length], salt), [GROUP])
                if found:
                    return length, found[0].block_id
        return 0, 0

    def of(self, numbers: Iterable[int]) -> list[KVCacheBlock]:
        return [self._pool.blocks[number] for number in numbers]

    def free(self, numbers: Iterable[int]) -> None:
        """Return blocks to the pool. The first is taken first for another sample."""
        self._pool.free_blocks(self.of(numbers))
