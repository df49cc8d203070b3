"""Derive every random choice of a run from the one seed in its config."""

import hashlib

import numpy as np


def derive(seed: int, *path: object) -> int:
    """Return a 63-bit seed for `path`; it does not depend on the order of calls or on the process."""
    digest = hashlib.blake2b("/".join(map(str, (seed, *path))).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1


def sample_seed(seed: int, prompt_id: int, sample: int) -> int:
    """Return the generator's seed for one sample of a prompt, the same in every replica and batch."""
    return derive(seed, "sample", prompt_id, sample) % 2**31


def turn_seed(seed: int, prompt_id: int, sample: int, turn: int) -> int:
    """Return the generator's seed for one turn of a rollout: `sample_seed` for the first, and another for each later
    one, or all turns would draw the same noise."""
    if turn == 0:
        return sample_seed(seed, prompt_id, sample)
    return derive(seed, "sample", prompt_id, sample, turn) % 2**31


def shuffled(size: int, seed: int, *stream: int) -> np.ndarray:
    """Return a permutation of 0..size-1 that depends only on (seed, stream). It sorts raw bits of PCG64, which numpy
    keeps stable across versions and machines, unlike its shuffles: a resumed run must see the same order."""
    bits = np.random.PCG64(np.random.SeedSequence(seed, spawn_key=stream))
    return np.argsort(bits.random_raw(size), kind="stable")
