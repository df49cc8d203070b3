"""Microbatches, ranks and updates become one step's numbers."""

import math
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from titan_rl.actors.titan import reduction
from titan_rl.actors.titan.experts import Routed
from titan_rl.actors.titan.reduction import Reduction, derived, finish
from titan_rl.kernels.policy_loss import Tokens, policy_loss
from titan_rl.kernels.statistics import Statistics
from titan_rl.kernels.surrogate import Surrogate
from titan_rl.kernels.value_loss import value_loss
from titan_rl.wire.reports import StepStats
from titan_rl.wire.types import RATIO_EDGES, Batch


def statistics(loss: float = 0.0, **kinds: dict[str, Any]) -> Statistics:
    tensors = {kind: {name: torch.tensor(v) for name, v in values.items()} for kind, values in kinds.items()}
    return Statistics(**{**tensors, "sums": {"loss": torch.tensor(loss)}})


def reduced(*microbatches: Statistics, tokens: int = 1, sequences: int = 1) -> Reduction:
    return Reduction.of(microbatches, Batch([], tokens, sequences), None)


def one_step(*updates: Reduction) -> StepStats:
    return finish(updates, lr=0.1, seconds=2.0, busy=1.0)


def test_means_are_over_the_batchs_tokens_and_sequences() -> None:
    one = statistics(tokens={"entropy": 6.0}, sequences={"margin": 3.0})
    two = statistics(tokens={"entropy": 2.0}, sequences={"margin": 5.0})
    assert reduced(one, two, tokens=16, sequences=4).means == {"entropy": 0.5, "margin": 2.0}


def test_extrema_are_over_microbatches() -> None:
    one = statistics(maxima={"high": 1.5}, minima={"low": 0.5})
    two = statistics(maxima={"high": 1.25}, minima={"low": 0.75})
    got = reduced(one, two)
    assert (got.maxima, got.minima) == ({"high": 1.5}, {"low": 0.5})


def test_histograms_and_losses_add_up_over_microbatches() -> None:
    one = statistics(0.25, counts={"ratio/histogram": [1.0, 2.0, 0.0]})
    two = statistics(0.5, counts={"ratio/histogram": [0.0, 5.0, 1.0]})
    got = reduced(one, two)
    assert got.histograms == {"ratio/histogram": [1.0, 7.0, 1.0]}
    assert got.loss == 0.75


def test_many_small_numbers_add_up_in_double_precision() -> None:
    """In float32, 1 + 2e-8 is 1: a thousand microbatches would lose their tails."""
    parts = [statistics(tokens={"entropy": 1.0}), *[statistics(tokens={"entropy": 2e-8})] * 1000]
    assert reduced(*parts).means["entropy"] == pytest.approx(1 + 2e-5, rel=1e-9)


def test_a_step_averages_its_updates_keeps_extrema_and_adds_counts() -> None:
    first = reduced(
        statistics(1.0, tokens={"entropy": 4.0}, maxima={"high": 1.5}, minima={"low": 0.5}, counts={"h": [1.0, 0.0]}),
        tokens=4,
    )
    first = replace(first, grad_norm=3.0)
    second = reduced(
        statistics(2.0, tokens={"entropy": 18.0}, maxima={"high": 1.1}, minima={"low": 0.9}, counts={"h": [2.0, 4.0]}),
        tokens=6,
    )
    second = replace(second, grad_norm=5.0)
    assert one_step(first, second) == StepStats(
        loss=1.6,
        grad_norm=4.0,
        lr=0.1,
        tokens=10,
        seconds=2.0,
        busy=1.0,
        metrics={"entropy": 2.2, "high": 1.5, "low": 0.5},
        histograms={"h": [3.0, 4.0]},
    )


def test_routes_of_a_steps_updates_add_up() -> None:
    """Two layers of four experts: in the first all tokens meet two of them, in the second each gets the same number."""
    parts = [[[4.0, 0.0, 0.0, 0.0], [1.0, 1.0, 1.0, 1.0]], [[2.0, 2.0, 0.0, 0.0], [1.0, 1.0, 1.0, 1.0]]]
    replays = [[8.0, 4.0, 3.0], [8.0, 4.0, 1.0]]
    updates = [
        replace(reduced(statistics(0.0)), routed=Routed(torch.tensor(experts), torch.tensor(replay)))
        for experts, replay in zip(parts, replays, strict=True)
    ]
    assert one_step(*updates).metrics == {
        **{"router/imbalance": 2.0, "router/imbalance_max": 3.0, "router/idle": 0.25},
        **{"routing/replayed": 0.5, "routing/agreement": 0.75},  # measured in the first update
    }


def test_a_steps_gap_is_its_first_updates() -> None:
    """Later updates have moved away from the weights that sampled."""
    gaps = [
        reduced(statistics(tokens={"logprob_gap/mean": mean, "entropy": 1.0}, maxima={"logprob_gap/max": most}))
        for mean, most in ((0.25, 0.5), (4.0, 8.0))
    ]
    assert one_step(*gaps).metrics == {"logprob_gap/mean": 0.25, "logprob_gap/max": 0.5, "entropy": 1.0}


def test_an_empty_microbatch_changes_no_extremum() -> None:
    empty = statistics(maxima={"high": -math.inf}, minima={"low": math.inf})
    full = statistics(maxima={"high": 1.5}, minima={"low": 0.5})
    assert one_step(reduced(empty, full)).metrics == {"high": 1.5, "low": 0.5}


def test_an_extremum_over_nothing_is_0() -> None:
    empty = statistics(maxima={"high": -math.inf, "logprob_gap/max": -math.inf}, minima={"low": math.inf})
    assert one_step(reduced(empty)).metrics == {"high": 0.0, "logprob_gap/max": 0.0, "low": 0.0}


def test_a_number_that_is_none_still_shows() -> None:
    assert math.isnan(one_step(reduced(statistics(maxima={"high": math.nan}))).metrics["high"])


@given(st.lists(st.floats(0, 4), min_size=1, max_size=20))
def test_the_effective_sample_size_is_the_squared_sum_over_the_sum_of_squares(weights: list[float]) -> None:
    """Kish: (sum w)^2 / (n sum w^2), 1 for equal weights, 1/n where one has it all."""
    n, square = len(weights), math.fsum(w * w for w in weights)
    metrics = {"off_policy/weight_mean": math.fsum(weights) / n, "off_policy/weight_square": square / n}
    ess = derived(metrics)["off_policy/ess"]
    assert ess == pytest.approx(math.fsum(weights) ** 2 / (n * square) if square / n > 0 else 0.0)
    assert "off_policy/weight_square" in metrics  # the caller's dictionary is unchanged
    assert "off_policy/weight_square" not in derived(metrics)


def test_the_effective_sample_size_of_one_weight_among_many() -> None:
    moments = {"off_policy/weight_mean": 1 / 8, "off_policy/weight_square": 1 / 8}
    assert derived(moments)["off_policy/ess"] == pytest.approx(1 / 8)


@pytest.mark.parametrize(("values", "explained"), [([0.0, 1.0, 2.0], 1.0), ([5.0, 6.0, 7.0], 1.0), ([1.0] * 3, 0.0)])
def test_explained_variance_by_hand(values: list[float], explained: float) -> None:
    """A critic that is right up to a constant explains all; one with a constant value explains nothing."""
    old, returns, on = torch.tensor(values), torch.tensor([0.0, 1.0, 2.0]), torch.ones(3)
    _, statistics = value_loss(old, old_T=old, return_T=returns, mask_T=on, weight_T=on / 3, clip=0.0)
    metrics = one_step(reduced(statistics, tokens=3)).metrics
    assert metrics["value/explained_variance"] == pytest.approx(explained, abs=1e-6)
    assert not metrics.keys() & {"return/square", "residual/mean", "residual/square"}


def test_equal_returns_leave_nothing_to_explain() -> None:
    old, on = torch.tensor([0.0, 1.0]), torch.ones(2)
    _, statistics = value_loss(old, old_T=old, return_T=on, mask_T=on, weight_T=on / 2, clip=0.0)
    assert one_step(reduced(statistics, tokens=2)).metrics["value/explained_variance"] == 0.0


def statistics_of(places: slice, mask_T: torch.Tensor) -> Statistics:
    """Of these places of twelve tokens, whose ratios run from 1/e to e."""
    logprob_T, log_ratio_T = torch.linspace(-2, 0, 12), torch.linspace(-1, 1, 12)
    columns = (logprob_T - log_ratio_T, log_ratio_T, mask_T, mask_T / 12, torch.zeros(12, dtype=torch.int64))
    tokens = Tokens(*(column[places] for column in columns), sequences=1)
    return policy_loss(logprob_T[places], -logprob_T[places], tokens, Surrogate())[1]


@settings(deadline=None)  # a dozen losses an example
@given(st.integers(1, 12), st.lists(st.integers(0, 1), min_size=12, max_size=12))
def test_microbatching_changes_no_metric_of_the_policys_loss(size: int, on: list[int]) -> None:
    mask = torch.tensor(on, dtype=torch.float32)
    tokens = max(sum(on), 1)
    whole = one_step(reduced(statistics_of(slice(0, 12), mask), tokens=tokens))
    parts = [statistics_of(slice(i, i + size), mask) for i in range(0, 12, size)]
    split = one_step(reduced(*parts, tokens=tokens))
    assert split.metrics == pytest.approx(whole.metrics, rel=1e-5, abs=1e-6)
    assert split.loss == pytest.approx(whole.loss, rel=1e-5, abs=1e-6)
    assert split.histograms == whole.histograms
    assert sum(whole.histograms["ratio/histogram"]) == sum(on)
    assert len(whole.histograms["ratio/histogram"]) == len(RATIO_EDGES) - 1
    assert all(map(math.isfinite, whole.metrics.values()))


def test_ranks_share_sums_and_extrema_in_one_collective(monkeypatch: pytest.MonkeyPatch) -> None:
    """The other rank has twice these values."""
    calls = []

    def all_gather(every: list[torch.Tensor], own: torch.Tensor, group: object) -> None:
        calls.append(group)
        every[0].copy_(own)
        every[1].copy_(2 * own)

    monkeypatch.setattr(reduction.dist, "get_world_size", lambda group: 2)
    monkeypatch.setattr(reduction.dist, "all_gather", all_gather)
    mesh: Any = SimpleNamespace(get_group=lambda: "group")
    own = statistics(
        0.5, tokens={"entropy": 6.0}, maxima={"high": 1.5}, minima={"low": -0.5}, counts={"seen": [1.0, 2.0]}
    )
    got = Reduction.of([own], Batch([], 9, 1), mesh)
    assert calls == ["group"]
    assert (got.means, got.maxima, got.minima) == ({"entropy": 2.0}, {"high": 3.0}, {"low": -1.0})
    assert (got.histograms, got.loss) == ({"seen": [3.0, 6.0]}, 1.5)
