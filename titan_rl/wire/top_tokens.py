"""Top tokens: of each trained token of a sample, the tokens that its teacher finds most likely, [M, k] entries.

An id of -1 means unknown, in a whole row: the teacher did not read the sample. Samples have a row for each token under
their mask, in order, so that prompts and observations take no memory.
"""

from collections.abc import Sequence

import numpy as np

ENTRY = np.dtype([("id", "<i4"), ("logprob", "<f4")])


def entries(ids: np.ndarray, logprobs: np.ndarray | np.float32) -> np.ndarray:
    found = np.empty(ids.shape, ENTRY)
    found["id"], found["logprob"] = ids, logprobs
    return found


def without_teacher(logprobs: np.ndarray, k: int) -> np.ndarray:
    """Return entries of M trained tokens and their unknown top tokens, [M, 1 + k]."""
    found = entries(np.full((len(logprobs), 1 + k), -1), np.float32(0))
    found["logprob"][:, 0] = logprobs
    return found


def of_trained(entries_M: np.ndarray, mask: Sequence[int] | np.ndarray) -> np.ndarray:
    """Return the log-prob of one entry for each trained token, 0 for the others."""
    logprobs = np.zeros(len(mask))
    logprobs[np.asarray(mask) > 0] = entries_M["logprob"]
    return logprobs


def joined_entries(parts: Sequence[np.ndarray | None]) -> np.ndarray | None:
    """Return the rows of all samples; None if none has any."""
    return np.concatenate([part for part in parts if part is not None]) if any(p is not None for p in parts) else None
