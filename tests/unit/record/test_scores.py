"""pass@k against enumeration, and the coverage of intervals."""

import itertools
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from titan_rl.record.scores import bootstrap, estimate, ks_of, pass_at, wilson

draws = st.lists(st.booleans(), min_size=1, max_size=9).flatmap(
    lambda right: st.tuples(st.just(right), st.integers(1, len(right)))
)


@given(draws)
def test_pass_at_k_is_the_share_of_subsets_with_a_correct_answer(drawn: tuple[list[bool], int]) -> None:
    right, k = drawn
    subsets = list(itertools.combinations(right, k))
    assert pass_at(k, len(right), sum(right)) == pytest.approx(sum(map(any, subsets)) / len(subsets), abs=1e-12)


@given(st.integers(1, 300), st.data())
def test_pass_at_k_is_the_product_form_that_others_compute(n: int, data: st.DataObject) -> None:
    """The numerically stable product of the paper that introduced it (arXiv:2107.03374)."""
    correct, k = data.draw(st.integers(0, n)), data.draw(st.integers(1, n))
    product = 1.0 if n - correct < k else 1.0 - float(np.prod(1.0 - k / np.arange(n - correct + 1, n + 1)))
    assert pass_at(k, n, correct) == pytest.approx(product, abs=1e-9)


@given(st.integers(2, 40), st.floats(0, 1), st.data())
def test_pass_at_k_is_unbiased(n: int, p: float, data: st.DataObject) -> None:
    """Its expectation over n answers, each correct with probability p, is 1 - (1 - p)^k for every n."""
    k = data.draw(st.integers(1, n))
    chance = [math.comb(n, c) * p**c * (1 - p) ** (n - c) for c in range(n + 1)]
    expected = sum(share * pass_at(k, n, c) for c, share in enumerate(chance))
    assert expected == pytest.approx(1 - (1 - p) ** k, abs=1e-9)


def test_pass_at_k_refuses_more_draws_than_answers() -> None:
    with pytest.raises(ValueError, match="expected 1 <= k <= n and 0 <= correct <= n, found k = 5, n = 4, correct = 0"):
        pass_at(5, 4, 0)


def test_ks_are_powers_of_two_and_the_number_of_answers() -> None:
    assert [ks_of(n) for n in (1, 2, 3, 8, 10)] == [[1], [1, 2], [1, 2, 3], [1, 2, 4, 8], [1, 2, 4, 8, 10]]


@pytest.mark.parametrize(
    ("successes", "n", "low", "high"),  # the last: Newcombe (1998), table I
    [(0, 10, 0.0, 0.2775), (10, 10, 0.7225, 1.0), (5, 10, 0.2366, 0.7634), (81, 263, 0.2553, 0.3662)],
)
def test_wilson(successes: int, n: int, low: float, high: float) -> None:
    assert wilson(successes, n) == pytest.approx((low, high), abs=6e-5)


def test_a_set_that_is_solved_wholly_has_an_interval_with_a_width() -> None:
    found = estimate([1.0] * 20)
    assert (found.value, found.high) == (1.0, 1.0)
    assert found.low == pytest.approx(0.8389, abs=1e-4)
    assert estimate([0.0]).high > 0.7


@settings(deadline=None)
@given(st.lists(st.floats(-100, 100), min_size=1, max_size=50))
def test_an_interval_holds_its_mean_and_depends_on_the_values_alone(values: list[float]) -> None:
    found = estimate(values)
    assert found.low <= found.value <= found.high
    assert estimate(values) == found


def test_the_bootstrap_draws_problems() -> None:
    """The quantiles of the literal bootstrap, and the coverage of a mean's normal interval."""
    random = np.random.default_rng(3)
    values = random.choice([0.0, 0.25, 0.5, 1.0], size=400)
    literal = np.quantile([random.choice(values, values.size).mean() for _ in range(4000)], [0.025, 0.975])
    assert bootstrap(values) == pytest.approx(tuple(literal), abs=0.004)
    half = 1.96 * values.std() / math.sqrt(values.size)
    assert bootstrap(values) == pytest.approx((values.mean() - half, values.mean() + half), abs=0.006)


def test_intervals_cover_the_truth() -> None:
    """95% of Wilson's and of the bootstrap's intervals hold the true mean, within the noise of 400 draws."""
    random, inside = np.random.default_rng(5), {"wilson": 0, "bootstrap": 0}
    for _ in range(400):
        solved = (random.random(60) < 0.3).astype(float)
        inside["wilson"] += estimate(solved.tolist()).low <= 0.3 <= estimate(solved.tolist()).high
        shares = random.binomial(8, random.beta(1, 2, 60)) / 8
        inside["bootstrap"] += estimate(shares.tolist()).low <= 1 / 3 <= estimate(shares.tolist()).high
    assert all(0.91 <= count / 400 <= 0.99 for count in inside.values()), inside


@pytest.mark.parametrize("values", [[], [math.nan], [1.0, math.inf]])
def test_there_is_no_mean_of_nothing(values: list[float]) -> None:
    with pytest.raises(ValueError, match="expected finite values of at least one problem"):
        estimate(values)
