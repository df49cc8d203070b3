"""Indices of runs of array entries."""

import numpy as np


def ranges(begins: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    """Return begins[0], begins[0] + 1, ..., lengths[0] numbers, then those of the next."""
    return np.repeat(begins - (lengths.cumsum() - lengths), lengths) + np.arange(lengths.sum())
