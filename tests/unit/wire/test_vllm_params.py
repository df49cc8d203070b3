"""The parameters of vLLM that the planner expects, and what it refuses."""

from dataclasses import replace

import pytest

from support.weight_layouts import TINY
from titan_rl.wire.vllm_params import param_shapes, pieces, verify_complete


@pytest.mark.parametrize(
    ("change", "tp", "message"),
    [
        ({"n_heads": 3}, 2, "a divisor of 3 attention heads, found 2"),
        ({"hidden_dim": 47}, 2, "a divisor of 47 feed-forward rows, found 2"),
        ({"n_heads": 12, "n_kv_heads": 3}, 2, "a divisor or a multiple of 3 key/value heads, found 2"),
        ({"n_heads": 12, "n_kv_heads": 3}, 4, "a divisor or a multiple of 3 key/value heads, found 4"),
        ({"n_heads": 6}, 3, "a divisor of 128 padded vocabulary rows, found 3"),
    ],
)
def test_impossible_tensor_parallelism_names_the_key(change: dict[str, int], tp: int, message: str) -> None:
    with pytest.raises(ValueError, match=rf"^\[generator\] tensor_parallel_degree: expected {message}$"):
        pieces(replace(TINY, **change), tp=tp, rank=0)


def test_the_live_model_must_be_the_planned_one() -> None:
    live = param_shapes(TINY, 1)
    verify_complete(live, TINY, 1)
    with pytest.raises(ValueError, match=r"lm_head\.weight \(not in the plan\)"):
        verify_complete(live, replace(TINY, tied=True), 1)
    with pytest.raises(ValueError, match=r"layers\.0\.self_attn\.q_norm\.weight \(not in the model\)"):
        verify_complete(live, replace(TINY, family="qwen3"), 1)
    with pytest.raises(ValueError, match=r"norm\.weight \(expected shape \(64,\), found \(0,\)\)"):
        verify_complete(live | {"model.norm.weight": (0,)}, TINY, 1)
