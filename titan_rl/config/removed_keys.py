"""Keys of earlier versions. A config that set one to its default loads as before; any other value is refused."""

from typing import Any, NamedTuple


class Removed(NamedTuple):
    default: Any
    advice: str


KEYS = {
    "debug.exact": Removed(
        False,
        "it was retired: in float32 log-probs of trainers and generators differ by less than 1e-5, and a run whose "
        "engines compute something else ends at its first weight sync (weight_sync.gap_tolerance)",
    ),
}
