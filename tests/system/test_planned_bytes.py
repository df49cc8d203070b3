"""A dry run's bytes are the bytes that ranks allocate: FSDP2, TP, both, and experts over ranks, with an optimizer."""

from typing import Literal

import pytest

from support.gloo_ranks import on_ranks
from support.rank_bytes import allocated, config_of
from support.slow_cases import slow_except
from titan_rl.ext.run_plan.sharding import ask_titan, questions
from titan_rl.preflight.memory import trained
from titan_rl.preflight.shapes import shape_of
from titan_rl.wire.weight_source import SLOTS


@pytest.mark.parametrize(
    ("layout", "tied", "moments"),
    slow_except([("tp2", True, "master"), ("fsdp2_tp2", False, "bfloat16"), ("fsdp2_ep2", False, "master")], 1),
)
def test_ranks_allocate_what_was_planned(layout: str, tied: bool, moments: Literal["master", "bfloat16"]) -> None:
    config = config_of(layout, tied=tied, moments=moments)
    shape, p = shape_of(config.model), config.parallelism
    sharded = ask_titan(questions(config, shape))["trainer"]
    planned = {name: part.nbytes for name, part in trained(config, shape, p, sharded).parts.items()}
    found = on_ranks(p.world_size, allocated, layout, tied, moments)

    assert found["weights"] == planned["weights"]
    assert found["gradients"] == planned["gradients"]
    assert found["unsharded gradients"] == 4 * sharded.whole
    assert found["optimizer"] == pytest.approx(planned["optimizer"], rel=0.001)  # and a step count for each parameter
    assert found["staging"] == pytest.approx(SLOTS * 4 * max(map(sum, sharded.sent)), rel=0.05)  # in whole pages
