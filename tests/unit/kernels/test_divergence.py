"""The divergence from a teacher's top tokens against formulas written out on whole logits."""

from typing import Any

import pytest
import torch

from titan_rl.kernels import token_logprob as kernel
from titan_rl.kernels.divergence import divergence
from titan_rl.kernels.token_logprob import most_likely, token_logprob

BETAS = (0.0, 0.2, 0.5, 1.0)


@pytest.fixture(autouse=True)
def small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernel, "TILE", (4, 8))
    monkeypatch.setattr(kernel, "LOGITS", 64)


def drawn(seed: int, tokens: int, vocabulary: int, dim: int = 6, dtype: torch.dtype = torch.float64) -> Any:
    generator = torch.Generator().manual_seed(seed)
    hidden = torch.randn(2, tokens, dim, generator=generator).to(dtype)
    weight = torch.randn(2, vocabulary, dim, generator=generator).to(dtype)
    targets = torch.randint(0, vocabulary, (tokens,), generator=generator)
    return (hidden[0].requires_grad_(), weight[0].requires_grad_()), (hidden[1], weight[1]), targets


def kl(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return (a * (a / b).log()).sum(-1)


def written_out(p: torch.Tensor, q: torch.Tensor, beta: float) -> torch.Tensor:
    """Of two distributions, each with the probabilities of all outcomes."""
    if beta in (0, 1):
        return kl(p, q) if beta == 0 else kl(q, p)
    m = beta * p + (1 - beta) * q
    return beta * kl(p, m) + (1 - beta) * kl(q, m)


def with_rest(x: torch.Tensor) -> torch.Tensor:
    return torch.cat([x, 1 - x.sum(-1, keepdim=True)], -1)


@pytest.mark.parametrize("beta", BETAS)
@pytest.mark.parametrize(
    ("seed", "tokens", "vocabulary", "k"), [(0, 9, 21, 5), (1, 5, 13, 1), (2, 3, 8, 8), (3, 0, 9, 2)]
)
def test_it_is_the_formula_on_whole_logits(seed: int, tokens: int, vocabulary: int, k: int, beta: float) -> None:
    """With k = the vocabulary it is the divergence of the whole distributions."""
    (hidden, weight), teacher, targets = drawn(seed, tokens, vocabulary)
    q, p = (h @ w.T / 0.7 for h, w in ((hidden, weight), teacher))
    q, p = q.softmax(-1), p.softmax(-1)
    top = p.topk(k).indices
    pairs = (p, q) if k == vocabulary else (with_rest(p.gather(1, top)), with_rest(q.gather(1, top)))
    want = written_out(*pairs, beta)
    gradients = torch.autograd.grad(want.sum(), (hidden, weight))

    ids = most_likely(teacher[0], teacher[1], k)
    assert torch.equal(ids, top)
    others = [token_logprob(h, w, targets, 0.7, others=ids)[2] for h, w in ((hidden, weight), teacher)]
    found = divergence(others[0], others[1].detach(), beta)
    torch.testing.assert_close(found, want, rtol=0, atol=1e-6)
    for ours, theirs in zip(torch.autograd.grad(found.sum(), (hidden, weight)), gradients, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-6)


@pytest.mark.parametrize("beta", BETAS)
def test_equal_models_have_no_divergence_and_no_gradient(beta: float) -> None:
    (hidden, weight), _, targets = drawn(4, 7, 20, dtype=torch.float32)
    ids = most_likely(hidden, weight, 6)
    student = token_logprob(hidden, weight, targets, others=ids)[2]
    found = divergence(student, student.detach(), beta)
    found.sum().backward()
    assert found.abs().max() < 1e-6
    assert hidden.grad is not None
    assert hidden.grad.abs().max() < 1e-5


@pytest.mark.parametrize("beta", BETAS)
def test_extreme_distributions_stay_finite(beta: float) -> None:
    certain = torch.tensor([[0.0, -1e4], [-1e4, 0.0], [0.0, 0.0]], requires_grad=True)
    found = divergence(certain, torch.tensor([[-1e4, 0.0], [-1e4, 0.0], [-1e-9, -1e4]]), beta)
    found.sum().backward()
    assert certain.grad is not None
    assert torch.isfinite(found).all()
    assert torch.isfinite(certain.grad).all()


@pytest.mark.parametrize("entropy", [False, True])
def test_gradients_of_other_ids_join_those_of_target_and_entropy(entropy: bool) -> None:
    """Also of ids that repeat the target, and of one outside the vocabulary, whose gradient is 0."""
    (hidden, weight), _, targets = drawn(5, 5, 11, 3)
    ids = torch.stack([targets, (targets + 1) % 11, torch.full_like(targets, -1)], 1)

    def ours(h: torch.Tensor, w: torch.Tensor) -> tuple[torch.Tensor, ...]:
        logprob, nats, others = token_logprob(h, w, targets, 0.7, with_entropy_grad=entropy, others=ids)
        return (logprob, nats, others[:, :2]) if entropy else (logprob, others[:, :2])

    assert torch.autograd.gradcheck(ours, (hidden, weight))
    logprobs = (hidden @ weight.T / 0.7).log_softmax(-1)
    torch.testing.assert_close(ours(hidden, weight)[-1], logprobs.gather(1, ids[:, :2]))


@pytest.mark.parametrize("float32", [False, True])
def test_in_bf16_others_have_the_targets_logits(float32: bool) -> None:
    (hidden, weight), _, targets = drawn(6, 33, 70, 16, torch.bfloat16)
    logprob, _, others = token_logprob(hidden, weight, targets, float32_logits=float32, others=targets[:, None])
    assert torch.equal(others[:, 0], logprob)
    (logprob.sum() + others.sum()).backward()
    assert hidden.grad is not None
    twice, hidden.grad = hidden.grad.float(), None
    (2 * token_logprob(hidden, weight, targets, float32_logits=float32)[0].sum()).backward()
    assert hidden.grad is not None
    torch.testing.assert_close(twice, hidden.grad.float(), rtol=2e-2, atol=2e-2)
