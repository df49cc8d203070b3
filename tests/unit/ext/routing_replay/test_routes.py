"""Routes of a sample: a cached beginning takes them from another sample, and each turn has its own."""

import numpy as np
import pytest

from titan_rl.ext.routing_replay.routes import (
    BLOCK,
    Routes,
    fill_cached,
    id_type,
    joined,
    known,
    rows_of,
    signed,
    unknown_rows,
)
from titan_rl.wire.types import Branch, Completion, Turn

LAYERS, K, EXPERTS = 3, 2, 8


def rows(seed: int, tokens: int, dtype: type = np.uint8) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, EXPERTS, (tokens, LAYERS, K)).astype(dtype)


def turn(context: int, sampled: int, routes: Routes | None, index: int = 0) -> Turn:
    completion = Completion(
        [5] * sampled, [-0.5] * sampled, [0] * sampled, "stop", extras={} if routes is None else {"routes": routes}
    )
    return Turn([1] * context, completion, index=index)


def test_the_largest_id_is_no_expert() -> None:
    assert [id_type(experts) for experts in (8, 255, 256, 512)] == [np.uint8, np.uint8, np.uint16, np.uint16]
    for dtype in (np.uint8, np.uint16):
        made = np.concatenate([rows(0, 2, dtype), unknown_rows(1, rows(0, 1, dtype))])
        assert known(made).tolist() == [True, True, False]
        assert signed(made).dtype == np.int16
        assert (signed(made)[2] == -1).all()
        assert np.array_equal(signed(made)[:2], rows(0, 2))


def test_rows_that_were_cached_are_unknown() -> None:
    routes = Routes(3, rows(0, 4))
    assert len(routes) == 7
    for begin in range(8):
        found = routes.rows(begin)
        assert known(found).tolist() == [token >= 3 for token in range(begin, 7)]
        assert np.array_equal(found[known(found)], rows(0, 4)[max(begin - 3, 0) :])


def test_a_branch_has_each_turns_own_routes() -> None:
    """The second turn reads the first one's last token, and has the tokens before it cached or reads them again."""
    first, again = rows(1, 5), rows(2, 10)
    for cached in (0, 3, 5):
        branch = Branch([turn(4, 2, Routes(0, first)), turn(2, 3, Routes(cached, again[cached:]), 1)])
        routes = rows_of(branch)
        assert routes is not None
        assert np.array_equal(routes[:10], np.concatenate([first, again[5:]]))
        assert known(routes).tolist() == [True] * 10 + [False]
    assert rows_of(Branch([turn(4, 2, None)])) is None


@pytest.mark.parametrize("wrong", [9, 11, None])
def test_a_turn_with_another_number_of_rows_is_refused(wrong: int | None) -> None:
    second = turn(2, 3, None if wrong is None else Routes(0, rows(2, wrong)), 1)
    with pytest.raises(ValueError, match=f"turn 1: expected the experts of 10 tokens, found {wrong or 'none'}"):
        rows_of(Branch([turn(4, 2, Routes(0, rows(1, 5))), second]))


def test_a_cached_beginning_takes_the_rows_of_a_sample_that_begins_with_the_same_tokens() -> None:
    system, asked, asked_too = [1] * 2 * BLOCK, [2] * BLOCK, [3] * BLOCK

    def sample(seed: int, tokens: list[int], cached: int) -> tuple[np.ndarray, np.ndarray]:
        tokens = [*tokens, 7, seed, 9]
        own = rows(seed, len(tokens) - 1 - cached)
        return np.array(tokens), np.concatenate([Routes(cached, own).rows(), unknown_rows(1, own)])

    whole = sample(0, [*system, *asked], 0)
    sibling, cousin = sample(1, [*system, *asked], 3 * BLOCK), sample(2, [*system, *asked_too], 2 * BLOCK)
    orphan, after = sample(3, [4, *system], BLOCK), sample(4, [*system, *asked_too, 8, 8], 3 * BLOCK)
    own = [made[1].copy() for made in (sibling, cousin, orphan, after)]
    fill_cached([sibling, orphan, whole, after, cousin])
    assert np.array_equal(sibling[1], np.concatenate([whole[1][: 3 * BLOCK], own[0][3 * BLOCK :]]))
    assert np.array_equal(cousin[1], np.concatenate([whole[1][: 2 * BLOCK], own[1][2 * BLOCK :]]))
    assert np.array_equal(after[1][: 3 * BLOCK], cousin[1][: 3 * BLOCK])
    assert np.array_equal(orphan[1], own[2]), "nothing begins with its tokens"


def test_parts_without_rows_are_unknown() -> None:
    assert joined([(3, None)]) is None
    made = joined([(2, None), (3, rows(0, 3))])
    assert made is not None
    assert known(made).tolist() == [False, False, True, True, True, False]
