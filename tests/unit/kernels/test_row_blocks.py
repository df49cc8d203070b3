"""Rows computed in blocks: equal bits whatever they are computed with, the plain operation's values and gradients."""

from collections.abc import Iterator

import pytest
import torch
import torch.nn.functional as F

from titan_rl.kernels import row_blocks, row_check
from titan_rl.kernels.row_blocks import Segment, block_attention, block_linear, block_silu, block_token_logprob
from titan_rl.kernels.token_logprob import token_logprob
from titan_rl.wire.model_shape import ModelShape

DTYPES = (torch.float32, torch.bfloat16)


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def drawn(*size: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    return torch.randn(*size, generator=torch.Generator().manual_seed(seed)).to(dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("width", "out"), [(61, 7), (64, 192), (129, 130), (1100, 300)])
def test_a_row_of_a_product_has_the_same_bits_anywhere(width: int, out: int, dtype: torch.dtype) -> None:
    x, weight, bias = drawn(83, width, dtype=dtype), drawn(out, width, dtype=dtype, seed=1), drawn(out, dtype=dtype)
    whole, order = block_linear(x, weight, bias), torch.randperm(83)
    assert torch.equal(block_linear(x[order], weight, bias), whole[order])
    assert torch.equal(torch.cat([block_linear(row[None], weight, bias) for row in x]), whole)
    off_by_one = torch.empty(83 * width + 1, dtype=dtype)[1:].view(83, width).copy_(x)  # memory that is not aligned
    assert torch.equal(block_linear(off_by_one, weight, bias), whole)
    expected = F.linear(x.double(), weight.double(), bias.double())
    torch.testing.assert_close(whole.double(), expected, rtol=1e-5 if dtype == torch.float32 else 2e-2, atol=0.5)


def test_silu_has_no_remainder_that_is_computed_otherwise() -> None:
    x = drawn(300, 89)
    whole = block_silu(x)
    assert torch.equal(torch.stack([block_silu(row.clone()) for row in x]), whole)
    assert torch.equal(block_silu(torch.cat([x, x], 1)[:, 89:]), whole)  # a half of a fused product
    torch.testing.assert_close(whole, F.silu(x))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("window", [0, 9])
def test_attention_of_a_decode_has_the_bits_of_a_prefill(window: int, dtype: torch.dtype) -> None:
    n, scale = 150, 0.3
    q, k, v = drawn(n, 6, 16, dtype=dtype), drawn(n, 2, 16, dtype=dtype, seed=1), drawn(n, 2, 16, dtype=dtype, seed=2)
    whole = block_attention(q, k, v, [Segment(0, n, 0, 0)], scale, window)
    one_by_one = [
        block_attention(q[i : i + 1], k[: i + 1], v[: i + 1], [Segment(0, 1, 0, i)], scale, window) for i in range(n)
    ]
    assert torch.equal(torch.cat(one_by_one), whole)
    # A prefill behind a cached prefix of 37 places, in one batch with a decode of the last place.
    segments = [Segment(0, n - 37, 0, 37), Segment(n - 37, 1, n, n - 1)]
    queries, keys, values = torch.cat([q[37:], q[-1:]]), torch.cat([k, k]), torch.cat([v, v])
    mixed = block_attention(queries, keys, values, segments, scale, window)
    assert torch.equal(mixed, torch.cat([whole[37:], whole[-1:]]))
    place = torch.arange(n)
    seen = (place <= place[:, None]) & (place > place[:, None] - (window or n))
    q_N, k_N, v_N = (x.double().transpose(0, 1) for x in (q, k, v))
    plain = F.scaled_dot_product_attention(q_N, k_N, v_N, seen, scale=scale, enable_gqa=True).transpose(0, 1)
    torch.testing.assert_close(whole.double(), plain, rtol=0, atol=1e-6 if dtype == torch.float32 else 1e-2)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("float32_logits", [False, True])
@pytest.mark.parametrize(("vocabulary", "width"), [(7, 61), (1025, 60)])
def test_log_probs_have_the_same_bits_in_any_batch(
    vocabulary: int, width: int, float32_logits: bool, dtype: torch.dtype
) -> None:
    hidden, weight = drawn(77, width, dtype=dtype), drawn(vocabulary, width, dtype=dtype, seed=1) / 8
    target, order = torch.arange(77) % vocabulary, torch.randperm(77)

    def found(rows: torch.Tensor, temperature: float = 0.7) -> torch.Tensor:
        return torch.stack(
            block_token_logprob(hidden[rows], weight, target[rows], temperature, float32_logits=float32_logits)
        )

    every = torch.arange(77)
    whole = found(every)
    assert torch.equal(found(order), whole[:, order])
    assert torch.equal(torch.cat([found(row[None]) for row in every], 1), whole)
    assert torch.equal(found(every, torch.tensor(0.7).item()), whole)  # as an engine keeps a temperature
    plain = torch.stack(token_logprob(hidden, weight, target, 0.7, float32_logits=float32_logits))
    torch.testing.assert_close(whole, plain, rtol=0, atol=1e-5 if dtype == torch.float32 else 1e-3)
    assert found(every[:0]).shape == (2, 0)


def test_gradients_are_those_of_the_plain_operations() -> None:
    x, weight, bias = (t.requires_grad_() for t in (drawn(2, 21, 30), drawn(40, 30, seed=1), drawn(40, seed=2)))
    out = drawn(2, 21, 40, seed=3)
    found = torch.autograd.grad(block_linear(x, weight, bias), (x, weight, bias), out)
    expected = torch.autograd.grad(F.linear(x, weight, bias), (x, weight, bias), out)
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, theirs)
    hidden, target = drawn(45, 30).requires_grad_(), torch.arange(45) % 40
    for entropy in (False, True):

        def loss(answers: tuple[torch.Tensor, torch.Tensor], entropy: bool = entropy) -> torch.Tensor:
            return answers[0].square().sum() + (answers[1].sum() if entropy else 0)

        ours = torch.autograd.grad(
            loss(block_token_logprob(hidden, weight, target, 0.7, with_entropy_grad=entropy)), (hidden, weight)
        )
        plain = loss(token_logprob(hidden, weight, target, 0.7, with_entropy_grad=entropy))
        for one, other in zip(ours, torch.autograd.grad(plain, (hidden, weight)), strict=True):
            torch.testing.assert_close(one, other)


SHAPE = ModelShape(
    family="qwen3",
    vocab_size=67,
    dim=48,
    n_layers=1,
    n_heads=3,
    n_kv_heads=1,
    head_dim=16,
    hidden_dim=89,
    max_seq_len=64,
    rope_theta=1e4,
    norm_eps=1e-6,
    tied=True,
)


@pytest.mark.parametrize("dtype", DTYPES)
def test_this_machine_passes_its_check(dtype: torch.dtype) -> None:
    row_check.require_independent_rows(SHAPE, dtype)


def test_a_machine_whose_products_depend_on_the_batch_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    product = row_blocks._product

    def uneven(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        out = product(x, weight)
        out[-1] *= 1 + 2**-20  # as a kernel's last row, which other instructions compute
        return out

    monkeypatch.setattr(row_blocks, "_product", uneven)
    with pytest.raises(RuntimeError) as refused:
        row_check.require_independent_rows(SHAPE, torch.float32)
    message = str(refused.value)
    assert message.startswith("debug.exact: expected rows that do not depend on their batch on this machine")
    assert "products 48 x 89" in message
    assert "log-probs" in message
    assert "attention" not in message


def test_a_machine_whose_attention_depends_on_the_batch_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    bmm = torch.bmm
    monkeypatch.setattr(torch, "bmm", lambda a, b: bmm(a, b) * (1 + 2**-20 * (len(a) > 3)))
    with pytest.raises(RuntimeError, match="found that attention in bfloat16 do"):
        row_check.require_independent_rows(SHAPE, torch.bfloat16)
