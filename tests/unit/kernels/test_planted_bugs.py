"""Plant classic mistakes of policy-gradient code: each must fail a comparison that passes without it."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from golden.gates import TRL, VERL, Ours, gate_loss
from golden.replay import (
    PROMPT,
    Case,
    cases,
    columns,
    compare,
    compare_gradients,
    placed,
    policy_terms,
    samples,
    summed,
    tensor,
    verl_gae_inputs,
    verl_setup,
)
from titan_rl.batch.advantages import gae, whiten
from titan_rl.kernels.policy_loss import policy_loss
from titan_rl.kernels.token_logprob import reference_token_logprob
from titan_rl.wire.types import Sample

CASES = cases("verl_policy.json")
CASE = CASES["entropy"]  # tokens have different advantages; one sequence trains nothing
SURROGATE, AGGREGATION = verl_setup(CASE["settings"])
SAMPLES = samples(CASE["inputs"])
GATES = {"trl": (cases("trl_gates.json"), TRL), "verl": (cases("verl_gates.json"), VERL)}
GAE = cases("verl_advantages.json")["gae"]


def compare_step(trained: list[Sample] = SAMPLES, case: Case = CASE, **changed: torch.Tensor) -> None:
    """Compare the case, with changed samples or columns, with verl's loss and gradients."""
    surrogate, aggregation = verl_setup(case["settings"])
    x = columns(case["inputs"], case["inputs"]["advantage"])
    loss, _ = summed(placed(trained, aggregation), policy_terms(policy_loss, surrogate, {**x, **changed}))
    loss.backward()
    compare(loss, case["outputs"]["loss"])
    compare_gradients(x, case)


def masked(change: Callable[[list[int]], list[int]]) -> list[Sample]:
    return [replace(sample, mask=change(list(sample.mask))) for sample in SAMPLES]


def compare_gae(shift: int = 0, last: float | None = None) -> None:
    """Compare GAE's advantages, with values shifted by `shift` or with a value `last` after the last token."""
    gamma, lam = GAE["settings"]["gamma"], GAE["settings"]["lam"]
    advantages = []
    for rewards, values, mask in verl_gae_inputs(GAE["inputs"]):
        if last is not None and mask.any():
            rewards[np.flatnonzero(mask)[-1]] += gamma * last
        advantages.append(gae(rewards, np.roll(values, shift), mask, gamma=gamma, lam=lam)[0])
    compare(whiten(advantages, GAE["inputs"]["mask"]), GAE["outputs"]["advantages"])


def logprob() -> torch.Tensor:
    """Return [N, L]. Zeros after an answer's end would leave the other token no probability."""
    return tensor(CASE["inputs"]["logprob"]).clamp(max=-1e-3)


def at_temperature(temperature: float) -> torch.Tensor:
    """Return [N, L]: log-probs of a vocabulary of two whose logits give the golden ones at temperature 1."""
    logits = torch.stack([logprob(), torch.log1p(-logprob().exp())], -1)
    targets = torch.zeros(logits.shape[:-1], dtype=torch.long)
    return reference_token_logprob(logits, torch.eye(2, dtype=torch.float64), targets, temperature)[0]


def test_the_planted_bugs_start_from_what_passes() -> None:
    compare_step()
    compare_step(masked(lambda mask: mask))
    compare_gae()
    compare(at_temperature(1.0), logprob())


@pytest.mark.parametrize("shift", [-1, 1])
@pytest.mark.parametrize("name", ["advantage", "old", "logprob", "entropy", "reference"])
def test_a_column_one_place_off_is_caught(name: str, shift: int) -> None:
    case = CASES["kl_k3" if name == "reference" else "entropy"]
    column = tensor(case["inputs"][name])
    compare_step(samples(case["inputs"]), case)
    with pytest.raises(AssertionError):
        compare_step(samples(case["inputs"]), case, **{name: column.roll(shift, dims=1)})


@pytest.mark.parametrize("shift", [-1, 1])
def test_a_value_one_place_off_is_caught(shift: int) -> None:
    with pytest.raises(AssertionError):
        compare_gae(shift=shift)


def test_a_value_after_the_last_token_is_caught() -> None:
    with pytest.raises(AssertionError):
        compare_gae(last=0.5)


def test_training_on_tool_tokens_is_caught() -> None:
    with pytest.raises(AssertionError):
        compare_step(masked(lambda mask: [0] * PROMPT + [int(any(mask))] * (len(mask) - PROMPT)))


def test_training_on_a_prompt_token_is_caught() -> None:
    with pytest.raises(AssertionError):
        compare_step(masked(lambda mask: [int(any(mask))] * PROMPT + mask[PROMPT:]))


def test_an_end_of_sequence_that_is_not_trained_is_caught() -> None:
    with pytest.raises(AssertionError):
        compare_step(masked(lambda mask: [*mask[:-1], 0]))


def test_an_end_of_sequence_counted_twice_is_caught() -> None:
    """The chat template closes an answer that the policy has closed already."""
    x = columns(CASE["inputs"], CASE["inputs"]["advantage"])
    lengths = torch.tensor(CASE["inputs"]["length"])[:, None]
    again = torch.minimum(torch.arange(int(lengths.max()) + 1), lengths - 1)  # [N, L + 1]: the last place once more
    longer = {name: values.gather(1, again) for name, values in x.items()}
    closed = [Sample([*sample.tokens, 1], [*sample.mask, sample.mask[-1]]) for sample in SAMPLES]
    loss, _ = summed(placed(closed, AGGREGATION), policy_terms(policy_loss, SURROGATE, longer))
    with pytest.raises(AssertionError):
        compare(loss, CASE["outputs"]["loss"])


@pytest.mark.parametrize("temperature", [0.7, 1.5])
def test_log_probs_at_another_temperature_are_caught(temperature: float) -> None:
    with pytest.raises(AssertionError):
        compare_step(logprob=at_temperature(temperature))


def ranks(parts: list[slice]) -> torch.Tensor:
    """Average the means over each part's own tokens, as a loss divided per rank or per microbatch does."""
    x = columns(CASE["inputs"], CASE["inputs"]["advantage"])
    means: list[torch.Tensor] = []
    for part in parts:
        terms = policy_terms(policy_loss, SURROGATE, {name: values[part] for name, values in x.items()})
        means.append(summed(placed(SAMPLES[part], AGGREGATION), terms)[0])
    return torch.stack(means).mean()


def test_a_loss_divided_on_each_rank_is_caught() -> None:
    compare(ranks([slice(None)]), CASE["outputs"]["loss"])
    with pytest.raises(AssertionError):
        compare(ranks([slice(3), slice(3, None)]), CASE["outputs"]["loss"])


@pytest.mark.parametrize(
    ("peer", "name", "bug"),
    [
        ("trl", "sapo_sharp", {"sapo_tau_positive": 3.5, "sapo_tau_negative": 2.0}),  # taus of the other sign
        ("verl", "dppo_tv", {"clip": "prob_diff"}),  # a mask that ignores the advantage's sign
        ("verl", "dppo_tv", {"clip_low": 0.08, "clip_high": 0.05}),  # bounds of the other direction
        ("verl", "dppo_kl", {"clip": "dppo_tv"}),
        ("verl", "dppo_tv_limited", {"dual_clip": 0.0}),
        ("verl", "geo_mean", {"clip": "ppo"}),  # a clip after the mean, not before it
        ("verl", "geo_mean", {"clip": "gmpo", "clip_low": 0.08, "clip_high": 0.05}),
        ("trl", "vespo", {"vespo_k_positive": 3.0, "vespo_k_negative": 2.0}),
        ("trl", "luspo_clipped", {"ratio": "token"}),
        ("verl", "clip_cov", {"clip": "ppo"}),
        ("verl", "kl_cov", {"cov_share": 0.25}),
        ("trl", "top_entropy", {"top_entropy_share": 0.35}),
    ],
)
def test_a_gate_with_a_classic_mistake_is_caught(peer: str, name: str, bug: dict[str, Any]) -> None:
    every, ours = GATES[peer]
    case = every[name]

    def compare_gate(of: Ours) -> None:
        loss, _, x = gate_loss(case, of)
        loss.backward()
        compare(loss, case["outputs"]["loss"])
        compare_gradients(x, case)

    compare_gate(ours[name])
    with pytest.raises(AssertionError):
        compare_gate(replace(ours[name], surrogate=replace(ours[name].surrogate, **bug)))


def test_a_length_that_divides_a_sequence_of_luspo_is_caught() -> None:
    case, ours = GATES["trl"][0]["luspo"], TRL["luspo"]
    with pytest.raises(AssertionError):
        compare(gate_loss(case, replace(ours, aggregation="sequence_mean"))[0], case["outputs"]["loss"])


@pytest.mark.parametrize("name", ["kl_cov", "clip_cov"])
def test_a_selection_within_other_microbatches_is_caught(name: str) -> None:
    case = GATES["verl"][0][name]
    with pytest.raises(AssertionError):
        compare(gate_loss(case, replace(VERL[name], whole=False))[0], case["outputs"]["loss"])
