"""Derive every random choice of a run from the one seed in its config."""

import hashlib


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
