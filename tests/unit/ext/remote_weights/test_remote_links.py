"""Links between trainer ranks and readers of other hosts."""

import pytest
import torch

from titan_rl.actors.sync.landing import Landing
from titan_rl.wire.manifest import layout
from titan_rl.wire.weight_plan import Copy
from titan_rl.wire.weight_source import Offer, Source


def test_a_trainer_rank_that_has_registered_nothing_is_refused_by_name() -> None:
    copy = Copy("a", 0, 0, 4, 2, "p", 1, 0)
    elsewhere = Offer("another host", 1, 1, 1 << 20, (4096, 8192), 32, layout((copy,), "float32", 8), None)
    with pytest.raises(RuntimeError, match="expected registered slices from the trainer process 1, found none"):
        Landing({"p": torch.zeros(5, 2)}, [Source(3, elsewhere, (copy,), "float32", 8)])
