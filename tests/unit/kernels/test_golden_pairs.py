"""SimPO, ORPO and KTO against TRL 1.16.0 (tests/golden/README.md), and against the formulas of their papers."""

import math
from dataclasses import fields
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from golden.replay import Case, cases, compare, pairs_loss
from titan_rl.ext.preference.ranks.preference_loss import Preference

CASES = cases("trl_pairs.json")


def setup(name: str) -> Preference:
    known = {field.name for field in fields(Preference)}
    keys: dict[str, Any] = {key: value for key, value in CASES[name]["settings"].items() if key in known}
    return Preference(name=name.partition("_")[0], **keys)  # pyright: ignore[reportArgumentType]


def mean_kl(inputs: Case) -> float:
    """Return TRL's KL of the answers to other prompts."""
    ratio = np.array(inputs["unrelated_logprob"]) - np.array(inputs["unrelated_reference"])
    return max(0.0, (ratio * np.array(inputs["unrelated_mask"])).sum(1).mean())


@pytest.mark.parametrize("name", sorted(CASES.keys() - {"orpo_ragged"}))
def test_losses_gradients_and_metrics_are_trls(name: str) -> None:
    case = CASES[name]
    theirs = case["outputs"]
    kl = mean_kl(case["inputs"]) if "kl" in theirs else None
    loss, sums, logprob = pairs_loss(case, setup(name), kl)
    loss.backward()
    compare(loss, theirs["loss"])
    compare(logprob.grad, case["gradients"]["logprob"])
    for key in (key for key in theirs if "/" in key):
        compare(sums[key] / len(case["inputs"]["mask"]), theirs[key])
    if kl is not None:
        compare(sums["rewards/kl"] / len(case["inputs"]["mask"]), theirs["kl"])


def test_trl_averages_orpos_supervised_part_over_tokens_and_ours_over_answers() -> None:
    case = CASES["orpo_ragged"]
    inputs, theirs = case["inputs"], case["outputs"]
    loss, _, _ = pairs_loss(case, setup("orpo_ragged"))
    on, logprob = np.array(inputs["mask"]), np.array(inputs["logprob"])
    chosen = slice(0, len(on) // 2)
    sums, tokens = (logprob * on)[chosen].sum(1), on[chosen].sum(1)
    by_answer, by_token = -(sums / tokens).mean(), -sums.sum() / tokens.sum()
    assert abs(by_answer - by_token) > 1e-3
    compare(loss.item() - by_answer, theirs["loss"] - by_token)


def sigmoid(x: float) -> float:
    return 1 / (1 + math.exp(-x))


def plain(s: Preference, chosen: list[float], rejected: list[float], kl: float, moved: float) -> float:
    """Return the loss of one pair, as the papers write it. The reference is lower by `moved` on each token."""
    c, r = sum(chosen) / len(chosen), sum(rejected) / len(rejected)
    if s.name == "simpo":
        right = sigmoid(s.beta * c - s.beta * r - s.simpo_gamma)
        return -(1 - s.label_smoothing) * math.log(right) - s.label_smoothing * math.log(1 - right)
    if s.name == "orpo":
        odds = [math.exp(x) / (1 - math.exp(x)) for x in (c, r)]
        return -c - s.beta * math.log(sigmoid(math.log(odds[0] / odds[1])))
    ratios = moved * len(chosen), moved * len(rejected)
    desirable = s.desirable_weight * (1 - sigmoid(s.beta * (ratios[0] - kl)))
    return (desirable + s.undesirable_weight * (1 - sigmoid(s.beta * (kl - ratios[1])))) / 2


@pytest.mark.parametrize("name", ["simpo", "orpo", "kto"])
@given(data=st.data())
def test_losses_of_any_lengths_are_the_papers(name: Any, data: st.DataObject) -> None:
    seed, pairs = data.draw(st.integers(0, 10**6)), data.draw(st.integers(1, 5))
    random = np.random.default_rng(seed)
    s = Preference(
        name=name,
        beta=random.uniform(0.05, 3),
        label_smoothing=random.uniform(0, 0.5),
        simpo_gamma=random.uniform(0, 2),
        desirable_weight=random.uniform(0, 2),
        undesirable_weight=random.uniform(0, 2),
    )
    kl, moved = random.uniform(0, 2), random.uniform(-0.5, 0.5)
    lengths = random.integers(1, 9, 2 * pairs)
    logprobs = [(-random.exponential(1.0, n) - 0.01).tolist() for n in lengths]  # all chosen, then all rejected
    padded = np.array([row + [0.0] * (8 - len(row)) for row in logprobs])
    mask = (np.arange(8) < lengths[:, None]).astype(int)
    inputs = {"mask": mask.tolist(), "length": lengths.tolist(), "logprob": padded.tolist()}
    if name == "kto":
        inputs["reference"] = ((padded - moved) * mask).tolist()
    loss, sums, leaf = pairs_loss({"inputs": inputs}, s, kl if name == "kto" else None)
    expected = [plain(s, logprobs[i], logprobs[pairs + i], kl, moved) for i in range(pairs)]
    compare(loss, sum(expected) / pairs)
    loss.backward()
    assert leaf.grad is not None
    assert (leaf.grad[torch.tensor(mask) == 0] == 0).all()
    assert ("rewards/kl" in sums) == (name == "kto")


@pytest.mark.parametrize("certain", [0.0, -1e-9])
def test_orpos_odds_of_a_certain_answer_are_finite(certain: float) -> None:
    inputs = {"mask": [[1, 1], [1, 1]], "length": [2, 2], "logprob": [[certain] * 2, [-1.0, -2.0]]}
    loss, _, logprob = pairs_loss({"inputs": inputs}, Preference(name="orpo"))
    loss.backward()
    assert logprob.grad is not None
    assert loss.isfinite()
    assert logprob.grad.isfinite().all()
