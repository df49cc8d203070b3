"""Plant classic mistakes of policy-gradient code: each must fail a comparison that passes without it."""

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
import torch

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
