"""A step's rows are cut by request, and a sample without a row for each token that it read is an error."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from titan_rl.ext.routing_replay.ranks.routed_tokens import RouteRecorder, cut, engine_args, routes_of
from titan_rl.ext.routing_replay.routes import Routes

ROWS = np.arange(40).astype(np.uint8).reshape(10, 2, 2)


def scheduled(**counts: int) -> Any:
    """A step with a request that is prefilled, the first; all others have read 9 tokens."""
    new, *others = counts
    cached = SimpleNamespace(req_ids=others, num_computed_tokens=[9] * len(others))
    first = SimpleNamespace(req_id=new, num_computed_tokens=32)
    return SimpleNamespace(num_scheduled_tokens=counts, scheduled_new_reqs=[first], scheduled_cached_reqs=cached)


def test_rows_are_cut_in_the_order_of_the_batch() -> None:
    found = cut(ROWS, scheduled(a=4, b=1, c=5), ["b", "a", "c"])
    assert [(id, first, rows[:, 0, 0].tolist()) for id, first, rows in found] == [
        ("b", 9, [0]),
        ("a", 32, [4, 8, 12, 16]),
        ("c", 9, [20, 24, 28, 32, 36]),
    ]


@pytest.mark.parametrize(("order", "count"), [(["a", "b"], 5), (["a", "b", "c"], 5), (["b"], 4)])
def test_a_batch_that_differs_from_what_was_scheduled_is_refused(order: list[str], count: int) -> None:
    with pytest.raises(RuntimeError, match="expected the experts of 4 tokens of requests a, b, found"):
        cut(ROWS[:count], scheduled(a=3, b=1), order)


def test_later_rows_replace_earlier_ones() -> None:
    """As after a preemption: the context is computed again, and a part of it may be cached."""
    recorded = [(2, ROWS[:3]), (5, ROWS[3:4]), (6, ROWS[4:5]), (4, ROWS[5:8])]
    found = routes_of(7, recorded, None, cached=2, sample="sample 1")
    assert found.cached == 2
    assert np.array_equal(found.ids, ROWS[[0, 1, 5, 6, 7]])


def test_rows_of_another_engine_count_where_there_are_no_new_ones() -> None:
    before = Routes(1, ROWS[:4])
    found = routes_of(7, [(3, ROWS[6:10])], before, cached=1, sample="sample 1")
    assert found.cached == 1
    assert np.array_equal(found.ids, ROWS[[0, 1, 6, 7, 8, 9]])


@pytest.mark.parametrize(
    ("recorded", "message"),
    [
        ([(2, ROWS[:2]), (5, ROWS[:2])], "tokens 2 to 6, found none of 4"),  # lost
        ([(3, ROWS[:4])], "tokens 2 to 6, found none of 2"),
        ([(2, ROWS[:4])], "tokens 2 to 6, found none of 6"),
        ([(2, ROWS[:6])], "7 tokens, found a row of token 7"),  # one too many
        ([(3, ROWS[:5])], "7 tokens, found a row of token 7"),  # shifted
    ],
)
def test_a_sample_without_exactly_the_rows_that_it_read_is_refused(recorded: Any, message: str) -> None:
    with pytest.raises(RuntimeError, match=f"sample 1: expected the experts of {message}"):
        routes_of(7, recorded, None, cached=2, sample="sample 1")


def test_a_gpu_returns_routes_under_vllms_names() -> None:
    """tests/system/test_cuda_extra.py samples with model runner V2."""
    from dataclasses import fields

    from vllm import CompletionOutput, EngineArgs

    assert engine_args(on_cpu=False).keys() <= {field.name for field in fields(EngineArgs)}
    assert "routed_experts" in {field.name for field in fields(CompletionOutput)}
    assert engine_args(on_cpu=True) == {}
    config = SimpleNamespace(get_num_experts=lambda: 256, hf_config=SimpleNamespace(first_k_dense_replace=1))
    experts = SimpleNamespace(model_config=config)
    recorder = RouteRecorder(on_cpu=False)
    recorder.begin(SimpleNamespace(vllm_config=experts))
    ((first, rows),) = recorder.take("7", np.full((3, 2, 2), 255, np.uint8))
    found = routes_of(3, [(first, rows)], None, cached=0, sample="sample 7")
    assert (found.ids == 255).all(), "an expert"
    assert found.ids.shape == (3, 1, 2), "the first layer has no experts"
