"""Log-probs over the tokens that truncated sampling kept, compared with full logits and explicit masks."""

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from titan_rl.kernels import token_logprob as kernel
from titan_rl.kernels.kept_bits import dropped, keeps, kept_bits
from titan_rl.kernels.token_logprob import reference_token_logprob, token_logprob


@pytest.fixture(autouse=True)
def _small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernel, "TILE", (4, 8))


def kept_sets(tokens: int, vocabulary: int, targets: torch.Tensor, seed: int) -> torch.Tensor:
    """Return sets of every size, [T, V] bool: small ones, the target alone, nearly all, all."""
    generator = torch.Generator().manual_seed(seed)
    share = torch.tensor([0.1, 0.0, 0.9, 1.0])[torch.arange(tokens) % 4].unsqueeze(1)
    kept = torch.rand(tokens, vocabulary, generator=generator) < share
    kept[torch.arange(tokens), targets] = True
    return kept


def bits_of(kept: torch.Tensor) -> torch.Tensor:
    counts = kept.sum(1)
    counts[counts == kept.shape[1]] = 0
    return kept_bits(counts, kept[counts > 0].nonzero()[:, 1], kept.shape[1])


def case(tokens: int, vocabulary: int, size: int, dtype: torch.dtype, seed: int = 0) -> Any:
    generator = torch.Generator().manual_seed(seed)
    hidden = torch.randn(tokens, size, generator=generator).to(dtype).requires_grad_()
    weight = torch.randn(vocabulary, size, generator=generator).to(dtype).requires_grad_()
    targets = torch.randint(0, vocabulary, (tokens,), generator=generator)
    return hidden, weight, targets, kept_sets(tokens, vocabulary, targets, seed)


def results(found: tuple[torch.Tensor, ...], hidden: Any, weight: Any, entropy: bool) -> list[torch.Tensor]:
    logprob, entropies = found
    by_token = torch.linspace(-1, 2, max(len(logprob), 1), dtype=logprob.dtype)[: len(logprob)]
    loss = (logprob * by_token).sum() + ((entropies * (1 - by_token)).sum() if entropy else 0)
    return [logprob.detach(), entropies.detach(), *torch.autograd.grad(loss, (hidden, weight))]


@given(
    tokens=st.integers(1, 13),
    vocabulary=st.integers(2, 41),
    temperature=st.sampled_from([1.0, 0.6]),
    entropy=st.booleans(),
    seed=st.integers(0, 1000),
)
@settings(deadline=None, max_examples=60)
def test_values_and_gradients_are_those_of_masked_logits(
    tokens: int, vocabulary: int, temperature: float, entropy: bool, seed: int
) -> None:
    hidden, weight, targets, kept = case(tokens, vocabulary, 5, torch.float64, seed)
    assert (dropped(bits_of(kept), vocabulary) == ~kept).all()
    assert keeps(bits_of(kept), targets).all()
    found = token_logprob(hidden, weight, targets, temperature, with_entropy_grad=entropy, kept=bits_of(kept))
    logits = (hidden @ weight.T / temperature).masked_fill(~kept, -torch.inf)
    logprobs = logits.log_softmax(-1)
    want = (
        logprobs.gather(1, targets.unsqueeze(1)).squeeze(1),
        -(logprobs.exp() * logprobs.masked_fill(~kept, 0)).sum(1),
    )
    for a, b in zip(results(found, hidden, weight, entropy), results(want, hidden, weight, entropy), strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 0.05)])
@pytest.mark.parametrize("float32_logits", [False, True])
def test_training_dtypes_agree_with_the_reference(dtype: torch.dtype, tolerance: float, float32_logits: bool) -> None:
    hidden, weight, targets, kept = case(33, 70, 16, dtype)
    keys: Any = {"with_entropy_grad": True, "float32_logits": float32_logits, "kept": bits_of(kept)}
    want = results(reference_token_logprob(hidden, weight, targets, 0.8, kept), hidden, weight, True)
    found = results(token_logprob(hidden, weight, targets, 0.8, **keys), hidden, weight, True)
    for a, b in zip(found, want, strict=True):
        torch.testing.assert_close(a, b, atol=tolerance, rtol=tolerance)


def test_whole_sets_leave_every_bit_as_it_is() -> None:
    hidden, weight, targets, _ = case(33, 70, 16, torch.float32)
    whole = bits_of(torch.ones(33, 70, dtype=torch.bool))
    found = results(token_logprob(hidden, weight, targets, 0.8, kept=whole), hidden, weight, False)
    want = results(token_logprob(hidden, weight, targets, 0.8), hidden, weight, False)
    assert all(torch.equal(a, b) for a, b in zip(found, want, strict=True))


def test_dropped_tokens_get_no_gradient_and_the_only_token_none_either() -> None:
    hidden, weight, targets, _ = case(2, 20, 4, torch.float32)
    kept = torch.zeros(2, 20, dtype=torch.bool)
    kept[torch.arange(2), targets] = True
    kept[0, (targets[0] + 1) % 20] = True
    logprob, _ = token_logprob(hidden, weight, targets, kept=bits_of(kept))
    of_hidden, of_weight = torch.autograd.grad(logprob.sum(), (hidden, weight))
    assert logprob[1] == 0
    assert of_hidden[1].abs().max() == 0
    moved = of_weight.abs().sum(1) > 0
    assert moved.nonzero().flatten().tolist() == kept[0].nonzero().flatten().tolist()


def test_a_target_outside_its_set_is_refused() -> None:
    hidden, weight, targets, kept = case(5, 20, 4, torch.float32)
    kept[1] = True
    kept[1, targets[1]] = False
    with pytest.raises(IndexError, match=f"in its kept set, found token {targets[1]} of place 1 dropped"):
        token_logprob(hidden, weight, targets, kept=bits_of(kept))
