"""A run folder of a version that kept Llama's q and k in another order of rows: it resumes, and exports, as it did."""

import pytest

from support.earlier_checkpoints import resumed
from support.gloo_ranks import on_ranks


@pytest.mark.parametrize(("ranks", "layout"), [(1, "one"), (4, "fsdp2_tp2")])
def test_an_earlier_checkpoint_resumes_to_the_last_bit(ranks: int, layout: str) -> None:
    """Weights and Adam's moments are reordered; on four ranks each has half a head of k_proj."""
    answer = on_ranks(ranks, resumed, layout)
    assert answer["resumed"] == answer["uninterrupted"]
    assert answer["misread"] != answer["uninterrupted"]
    assert answer.get("exports are equal", True)
