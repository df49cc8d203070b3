"""Every random choice of a run derives from the one seed in its config."""

import hashlib


def derive(seed: int, *path: object) -> int:
    """A 63-bit seed for what `path` names; independent of order of calls and of the process."""
    digest = hashlib.blake2b("/".join(map(str, (seed, *path))).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1


def sample_seed(seed: int, prompt_id: int, sample: int) -> int:
    """For the generator: one stream per sample of each prompt, whichever replica draws it and in whatever batch."""
    return derive(seed, "sample", prompt_id, sample) % 2**31
