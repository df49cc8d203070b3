"""Side columns: facts about tokens that are not one number each, such as the experts that a token was sent to.

A carrier has them in its `extras`, by name. Each kind is an optional part, and only that part reads the values:

    engine ──> Completion ── of_branches ──> Sample ── packed ──> Rows ── on_device ──> DeviceRows
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np

from titan_rl.wire.parts import needed_part
from titan_rl.wire.types import Batch, Branch, Completion, Rollout, Rows, Sample


class Places(NamedTuple):
    """Where the tokens of a microbatch are among the tokens of all samples, end to end; -1 is padding."""

    reads: np.ndarray  # [B, L]: the token that each place reads
    targets: np.ndarray  # [B, T]
    on: np.ndarray  # [B, T] bool: targets under the mask


class RankPart(NamedTuple):
    """The part of packed rows that a rank computes."""

    rows: Rows  # whole
    own: np.ndarray | None  # [B, T] bool: the targets that it predicts; None: all
    cut: Callable[[np.ndarray, int], np.ndarray]  # an array of places and its padding -> the rank's places
    to: Callable[[np.ndarray], Any]  # an array -> its tensor on the rank's device


class SideColumn:
    """One kind of side column: its value for a carrier, made from its values for the carriers before."""

    of_policy = False  # True: it counts for the policy's own weights only, and not for the other roles'

    def of_branches(self, branches: Sequence[Branch]) -> Sequence[Any | None]:
        """Return the values for the samples of these branches; None for a branch of which nothing is recorded."""
        return [None] * len(branches)

    def packed(self, samples: Sequence[Sample]) -> Callable[[Places], Any]:
        """Return a function of the places of a microbatch, which returns the value for its rows.

        Raise ValueError if a sample's value does not fit its tokens."""
        raise NotImplementedError

    def on_device(self, value: Any, part: RankPart) -> Any:
        """Return the value of a rank's rows as tensors."""
        raise NotImplementedError

    def arrays(self, samples: Sequence[Sample]) -> Mapping[str, np.ndarray]:
        """Return the samples' values as arrays, to be written to a file."""
        raise NotImplementedError

    def of_arrays(self, arrays: Mapping[str, np.ndarray]) -> Sequence[Any | None]:
        """Return the samples' values from the arrays of a file, which also has their `length` and `mask`."""
        raise NotImplementedError

    def after_context(self, value: Any, context: int, read: int) -> Any | None:
        """Return the value for a sample after another context, of `read` tokens; None if it does not count there."""
        return None

    def logged(self, rollout: Rollout) -> list[int]:
        """Return the numbers about a rollout's values that the log of samples has, if any."""
        return []

    def metrics(self, rollouts: Sequence[Rollout]) -> Mapping[str, float]:
        return {}


def side_column(name: str) -> SideColumn:
    return needed_part(f"column {name}", f"extras.{name}")


def names_in(carriers: Iterable[Completion | Sample]) -> list[str]:
    """Return the names of the side columns that any of these carriers has."""
    return list(dict.fromkeys(name for each in carriers for name in each.extras))


def extras_of(branches: Sequence[Branch]) -> list[dict[str, Any]]:
    """Return the side columns of each branch's sample."""
    found: list[dict[str, Any]] = [{} for _ in branches]
    for name in names_in(turn.completion for branch in branches for turn in branch.turns):
        for extras, value in zip(found, side_column(name).of_branches(branches), strict=True):
            if value is not None:
                extras[name] = value
    return found


def packed_extras(samples: Sequence[Sample]) -> dict[str, Callable[[Places], Any]]:
    return {name: side_column(name).packed(samples) for name in names_in(samples)}


def check_lengths(name: str, samples: Sequence[Sample]) -> None:
    """Raise ValueError unless a side column with an entry for each token has that many."""
    for i, sample in enumerate(samples):
        expected, found = len(sample.tokens), len(sample.extras.get(name, sample.tokens))
        if expected != found:
            raise ValueError(f"sample {i}: expected {expected} entries of {name}, one per token, found {found}")


def for_other_weights(batch: Batch) -> Batch:
    """Return the batch without what counts for the policy's own weights only."""
    rows = batch.microbatches
    dropped = {name for each in rows for name in each.extras if side_column(name).of_policy}
    if not dropped:
        return batch
    others = [replace(r, extras={n: value for n, value in r.extras.items() if n not in dropped}) for r in rows]
    return replace(batch, microbatches=others)


def logged_extras(rollout: Rollout) -> dict[str, list[int]]:
    """Return what the log of samples has about a rollout's side columns."""
    names = names_in(turn.completion for turn in rollout.turns)
    return {name: numbers for name in names if (numbers := side_column(name).logged(rollout))}


def metrics_of_extras(rollouts: Sequence[Rollout]) -> dict[str, float]:
    names = names_in(turn.completion for rollout in rollouts for turn in rollout.turns)
    return {key: value for name in names for key, value in side_column(name).metrics(rollouts).items()}
