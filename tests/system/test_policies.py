"""Several policies over one base: each gives the same numbers on ranks as alone, to the last bit."""

from typing import Any

import pytest

from support.gloo_ranks import on_ranks
from support.policy_ranks import LR, banked, interleaved
from support.rank_programs import MESHES
from support.slow_cases import slow_except


@pytest.mark.parametrize("layout", ["one", "fsdp2"])
def test_a_bank_exchanges_values_and_gradients(layout: str) -> None:
    found = on_ranks(MESHES[layout].world_size, banked, layout)
    assert found["fresh"] == {"gradients": True, "other": True}
    assert all(found[name] for name in ("back", "kept", "two", "again"))
    assert found["refused"] == {"add": "ValueError", "use": "KeyError", "drop": "KeyError"}
    assert found["names"] == ["a", "b"]


@pytest.mark.parametrize(("layout", "saves"), slow_except([("one", "async"), ("fsdp2", "disabled"), ("tp2", "")], 0, 2))
def test_interleaved_policies_are_each_as_if_alone(layout: str, saves: str) -> None:
    """Between any two verbs; also if all resume from their own checkpoints."""
    found: dict[str, Any] = on_ranks(MESHES[layout].world_size, interleaved, layout, saves)
    assert found["policies"] == {name: dict.fromkeys(found["policies"][name], True) for name in LR}
    assert found["base_kept"]
    assert found["apart"] > 1e-3
