"""Top tokens: of each trained token of a sample, the tokens that its teacher finds most likely, [M, k] entries.

An id of -1 means unknown, in a whole row: the teacher did not read the sample. Samples have a row for each token under
their mask, in order, so that prompts and observations take no memory.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from titan_rl.wire.side_columns import Places, RankPart, SideColumn
from titan_rl.wire.types import Sample, entries


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


class TopColumn(SideColumn):
    """Of samples and of rows the entries of each token, or target, under the mask."""

    def packed(self, samples: Sequence[Sample]) -> Callable[[Places], np.ndarray]:
        for i, sample in enumerate(samples):
            expected, found = int((np.asarray(sample.mask) > 0).sum()), len(sample.extras.get("top", ()))
            if expected != found:
                raise ValueError(
                    f"sample {i}: expected {expected} rows of top tokens, one per trained token, found {found}"
                )
        top = np.concatenate([sample.extras["top"] for sample in samples if "top" in sample.extras])
        row = (np.concatenate([sample.mask for sample in samples]) > 0).cumsum() - 1  # each token's
        return lambda places: top[row[places.targets[places.on]]]

    def on_device(self, value: np.ndarray, part: RankPart) -> tuple[Any, Any]:
        """Return the ids and the log-probs of the rank's targets under the mask."""
        top = value if part.own is None else value[part.own[part.rows.mask > 0]]
        return part.to(top["id"].astype(np.int64)), part.to(np.ascontiguousarray(top["logprob"]))

    def arrays(self, samples: Sequence[Sample]) -> dict[str, np.ndarray]:
        return {"top": np.concatenate([s.extras["top"] for s in samples if "top" in s.extras])}

    def of_arrays(self, arrays: Mapping[str, np.ndarray]) -> list[np.ndarray]:
        trained = np.append(0, (arrays["mask"] > 0).cumsum())
        return np.split(arrays["top"], trained[arrays["length"].cumsum()[:-1]])


TOP = TopColumn()
