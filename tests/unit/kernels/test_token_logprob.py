import os
import socket
import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.multiprocessing.spawn import spawn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode

from titan_rl.kernels import token_logprob as kernel
from titan_rl.kernels import triton_kernels
from titan_rl.kernels.kept_bits import kept_bits
from titan_rl.kernels.token_logprob import most_likely, reference_token_logprob, token_logprob

Case = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
Results = tuple[torch.Tensor, ...]

BF16 = 0.03  # absolute and relative


@pytest.fixture(autouse=True)
def _small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernel, "TILE", (4, 8))


def case(tokens: int, vocabulary: int, size: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Case:
    generator = torch.Generator().manual_seed(seed)
    hidden = torch.randn(tokens, size, generator=generator).to(dtype).requires_grad_()
    weight = torch.randn(vocabulary, size, generator=generator).to(dtype).requires_grad_()
    return hidden, weight, torch.randint(0, vocabulary, (tokens,), generator=generator)


def results(
    function: Any, hidden: torch.Tensor, weight: torch.Tensor, *rest: Any, entropy: bool, **keys: Any
) -> Results:
    """Return values, and gradients of a loss that weights each token differently."""
    hidden, weight = (x.detach().clone().requires_grad_() for x in (hidden, weight))
    logprob, entropies = function(hidden, weight, *rest, **keys)
    by_token = torch.linspace(-1, 2, max(logprob.numel(), 1), dtype=logprob.dtype)[: logprob.numel()].view(
        logprob.shape
    )
    loss = (logprob * by_token).sum()
    if entropy:
        loss = loss + (entropies * (1 - by_token)).sum()
    loss.backward()
    assert hidden.grad is not None
    assert weight.grad is not None
    return logprob.detach(), entropies.detach(), hidden.grad, weight.grad


def assert_same(found: Results, want: Results, tolerance: float | None = None) -> None:
    for name, a, b in zip(("logprob", "entropy", "hidden.grad", "weight.grad"), found, want, strict=True):
        torch.testing.assert_close(a, b, atol=tolerance, rtol=tolerance, msg=lambda text, name=name: f"{name}: {text}")


@given(
    tokens=st.integers(0, 13),
    vocabulary=st.integers(1, 27),
    size=st.integers(1, 9),
    temperature=st.sampled_from([1.0, 0.6, 1.7]),
    entropy=st.booleans(),
    seed=st.integers(0, 1000),
)
@settings(deadline=None, max_examples=60)
def test_values_and_gradients_are_the_references(
    tokens: int, vocabulary: int, size: int, temperature: float, entropy: bool, seed: int
) -> None:
    arguments = (*case(tokens, vocabulary, size, torch.float64, seed), temperature)
    found = results(token_logprob, *arguments, entropy=entropy, with_entropy_grad=entropy)
    assert_same(found, results(reference_token_logprob, *arguments, entropy=entropy))


@pytest.mark.parametrize("entropy", [False, True])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, None), (torch.bfloat16, BF16)])
@pytest.mark.parametrize("shape", [(0, 5, 3), (1, 1, 1), (1, 8, 4), (4, 9, 4), (5, 7, 6), (33, 70, 16)])
def test_training_dtypes_agree_with_the_reference(
    shape: tuple[int, int, int], dtype: torch.dtype, tolerance: float | None, entropy: bool
) -> None:
    arguments = (*case(*shape, dtype), 0.8)
    found = results(token_logprob, *arguments, entropy=entropy, with_entropy_grad=entropy)
    assert found[0].dtype == found[1].dtype == torch.float32
    assert found[2].dtype == found[3].dtype == dtype
    assert_same(found, results(reference_token_logprob, *arguments, entropy=entropy), tolerance)


@pytest.mark.parametrize("entropy", [False, True])
@pytest.mark.parametrize("shape", [(0, 5, 3), (5, 7, 6), (33, 70, 16)])
def test_float32_logits_are_those_of_float32_products(shape: tuple[int, int, int], entropy: bool) -> None:
    def reference(hidden: torch.Tensor, weight: torch.Tensor, *rest: Any) -> tuple[torch.Tensor, torch.Tensor]:
        return reference_token_logprob(hidden.float(), weight.float(), *rest)

    arguments = (*case(*shape, torch.bfloat16), 0.8)
    want = results(reference, *arguments, entropy=entropy)
    found = results(token_logprob, *arguments, entropy=entropy, with_entropy_grad=entropy, float32_logits=True)
    assert found[2].dtype == found[3].dtype == torch.bfloat16
    assert_same(found, want, BF16)
    for precise, exact in zip(found[:2], want[:2], strict=True):
        torch.testing.assert_close(precise, exact)
    if shape[0] > 1:
        rounded = results(token_logprob, *arguments, entropy=entropy, with_entropy_grad=entropy)
        assert (rounded[0] - want[0]).abs().max() > 1e-3


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_float32_logits_change_nothing_where_logits_are_that_wide_anyhow(dtype: torch.dtype) -> None:
    arguments = (*case(33, 70, 16, dtype), 0.8)
    found = results(token_logprob, *arguments, entropy=True, with_entropy_grad=True, float32_logits=True)
    want = results(token_logprob, *arguments, entropy=True, with_entropy_grad=True)
    assert all(torch.equal(a, b) for a, b in zip(found, want, strict=True))


@given(
    tokens=st.integers(0, 13),
    vocabulary=st.integers(1, 27),
    size=st.integers(1, 9),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float16, torch.float64]),
    entropy=st.booleans(),
    wide=st.booleans(),
    truncated=st.booleans(),
    others=st.integers(0, 3),
    seed=st.integers(0, 1000),
)
@settings(deadline=None, max_examples=40)
def test_kept_logits_change_no_bit(
    tokens: int,
    vocabulary: int,
    size: int,
    dtype: torch.dtype,
    entropy: bool,
    wide: bool,
    truncated: bool,
    others: int,
    seed: int,
) -> None:
    hidden, weight, targets = case(tokens, vocabulary, size, dtype, seed)
    keys: dict[str, Any] = {"with_entropy_grad": entropy, "float32_logits": wide}
    if truncated:
        keys["kept"] = kept_bits(torch.ones_like(targets), targets, vocabulary)
    function = of_most_likely(most_likely(hidden, weight, others)) if others and tokens else token_logprob
    want = results(function, hidden, weight, targets, 0.7, entropy=entropy, **keys)
    found = results(function, hidden, weight, targets, 0.7, entropy=entropy, keep_logits=True, **keys)
    assert all(torch.equal(a, b) for a, b in zip(found, want, strict=True))


@pytest.mark.parametrize(("frozen", "products"), [(False, [4, 3]), (True, [3, 2])])
def test_kept_logits_save_a_product(frozen: bool, products: list[int]) -> None:
    """Of the head's: logits, again in the backward, hidden's gradient, and weight's unless it is frozen."""
    hidden, weight, targets = case(33, 70, 16, torch.bfloat16)
    found = []
    for keep in (False, True):
        with FlopCounterMode(display=False) as counter:
            token_logprob(hidden, weight.detach() if frozen else weight, targets, keep_logits=keep)[0].sum().backward()
        found.append(counter.get_total_flops() / (2 * 33 * 70 * 16))
    assert found == products


@pytest.mark.parametrize(("wide", "each"), [(False, 2), (True, 4)])
def test_kept_logits_take_two_or_four_bytes_each(wide: bool, each: int) -> None:
    hidden, weight, targets = case(9, 50, 2, torch.bfloat16)

    def saved(**keys: Any) -> int:
        found: list[torch.Tensor] = []
        with torch.autograd.graph.saved_tensors_hooks(lambda x: found.append(x) or x, lambda x: x):
            token_logprob(hidden, weight, targets, float32_logits=wide, **keys)
        return sum(x.nbytes for x in found)

    assert saved(keep_logits=True) - saved() == 9 * 50 * each
    with torch.no_grad():
        assert saved(keep_logits=True) == 0


def test_a_second_backward_finds_kept_logits_as_they_were() -> None:
    hidden, weight, targets = case(33, 70, 16, torch.bfloat16)
    logprob, _ = token_logprob(hidden, weight, targets, 0.7, keep_logits=True)
    first, second = (torch.autograd.grad(logprob.sum(), (hidden, weight), retain_graph=True) for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def test_gradcheck_passes_on_the_reference_and_on_the_chunked_version() -> None:
    hidden, weight, targets = case(5, 11, 3, torch.float64)
    assert torch.autograd.gradcheck(lambda h, w: reference_token_logprob(h, w, targets, 0.7), (hidden, weight))
    chunked = lambda h, w: token_logprob(h, w, targets, 0.7, with_entropy_grad=True)  # noqa: E731
    assert torch.autograd.gradcheck(chunked, (hidden, weight))


@pytest.mark.parametrize("entropy", [False, True])
@pytest.mark.parametrize("shape", [(0, 5, 3), (5, 7, 6), (33, 70, 16)])
@pytest.mark.parametrize("cap", [0.7, 3.0])
def test_capped_logits_agree_with_the_reference(shape: tuple[int, int, int], cap: float, entropy: bool) -> None:
    arguments = (*case(*shape, torch.float64), 0.8)
    want = results(reference_token_logprob, *arguments, entropy=entropy, cap=cap)
    found = results(token_logprob, *arguments, entropy=entropy, with_entropy_grad=entropy, cap=cap)
    assert_same(found, want)
    hidden, weight, targets, _ = arguments
    others = most_likely(hidden.detach(), weight.detach(), 3)
    read = token_logprob(hidden, weight, targets, 0.8, others=others, cap=cap)[2]
    logits = cap * torch.tanh(hidden @ weight.T / cap) / 0.8
    torch.testing.assert_close(read, logits.log_softmax(-1).gather(1, others))


def test_the_shipped_tile_agrees_with_the_reference(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    arguments = (*case(kernel.TILE[0] + 3, kernel.TILE[1] + 5, 8), 1.0)
    found = results(token_logprob, *arguments, entropy=True, with_entropy_grad=True)
    assert_same(found, results(reference_token_logprob, *arguments, entropy=True), 1e-4)


def test_it_is_log_softmax_at_the_temperature() -> None:
    hidden, weight, targets = case(6, 20, 4)
    logprob, entropy = token_logprob(hidden, weight, targets, 0.7)
    distribution = torch.distributions.Categorical(logits=hidden @ weight.T / 0.7)
    torch.testing.assert_close(logprob, distribution.log_prob(targets))
    torch.testing.assert_close(entropy, distribution.entropy())


def test_leading_shapes_are_kept() -> None:
    hidden, weight, targets = case(6, 20, 4)
    flat = token_logprob(hidden, weight, targets)
    for whole, part in zip(token_logprob(hidden.view(2, 3, 4), weight, targets.view(2, 3)), flat, strict=True):
        assert whole.shape == (2, 3)
        torch.testing.assert_close(whole.flatten(), part)


def test_strided_inputs_do() -> None:
    hidden, weight, targets = case(6, 20, 8)
    found = results(token_logprob, hidden[:, ::2], weight[::2, 1::2], targets // 2, entropy=False)
    assert_same(found, results(reference_token_logprob, hidden[:, ::2], weight[::2, 1::2], targets // 2, entropy=False))


def test_extreme_logits_stay_finite() -> None:
    """A certain token: log-prob 0, entropy 0, no gradient; an impossible one: its logits' difference."""
    hidden = torch.full((2, 1), 1e4, requires_grad=True)
    weight = torch.tensor([[1.0], [-1.0], [0.5]], requires_grad=True)
    logprob, entropy = token_logprob(hidden, weight, torch.tensor([0, 1]), with_entropy_grad=True)
    (logprob + entropy).sum().backward()
    assert logprob.tolist() == [0, -2e4]
    assert entropy.tolist() == [0, 0]
    assert hidden.grad is not None
    assert hidden.grad.flatten().tolist() == [0, -2]


def test_a_confident_token_keeps_its_gradient_in_bf16() -> None:
    """p = 0.9991 is 1 in bf16: p - 1 must be taken before the cast."""
    hidden = torch.tensor([[7.0]], dtype=torch.bfloat16, requires_grad=True)
    weight = torch.tensor([[1.0], [0.0]], dtype=torch.bfloat16, requires_grad=True)
    token_logprob(hidden, weight, torch.tensor([0]))[0].sum().backward()
    assert weight.grad is not None
    assert float(weight.grad[0]) == pytest.approx(7 * torch.sigmoid(torch.tensor(-7.0)).item(), rel=0.01)


def test_the_entropy_is_detached_unless_asked_for() -> None:
    hidden, weight, targets = case(3, 5, 2)
    assert not token_logprob(hidden, weight, targets)[1].requires_grad
    assert token_logprob(hidden, weight, targets, with_entropy_grad=True)[1].requires_grad


def test_the_entropy_alone_can_be_a_loss() -> None:
    hidden, weight, targets = case(3, 5, 2)
    found = torch.autograd.grad(token_logprob(hidden, weight, targets, with_entropy_grad=True)[1].sum(), hidden)
    torch.testing.assert_close(
        found, torch.autograd.grad(reference_token_logprob(hidden, weight, targets)[1].sum(), hidden)
    )


def test_a_frozen_input_gets_no_gradient() -> None:
    hidden, weight, targets = case(3, 5, 2)
    token_logprob(hidden, weight.detach(), targets)[0].sum().backward()
    assert hidden.grad is not None
    assert weight.grad is None
    hidden_grad, hidden.grad = hidden.grad, None
    token_logprob(hidden.detach(), weight, targets)[0].sum().backward()
    assert hidden.grad is None
    assert weight.grad is not None
    token_logprob(hidden, weight, targets)[0].sum().backward()
    torch.testing.assert_close(hidden.grad, hidden_grad)


def test_without_gradients_nothing_is_kept() -> None:
    hidden, weight, targets = case(3, 5, 2)
    with torch.no_grad():
        assert not token_logprob(hidden, weight, targets)[0].requires_grad
    assert not token_logprob(hidden.detach(), weight.detach(), targets)[0].requires_grad


def test_only_inputs_and_columns_are_saved_for_the_backward_pass() -> None:
    hidden, weight, targets = case(9, 50, 2)
    saved: list[torch.Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: saved.append(x) or x, lambda x: x):
        token_logprob(hidden, weight, targets)
    assert sum(x.numel() for x in saved) == hidden.numel() + weight.numel() + 3 * len(targets)


class Largest(TorchDispatchMode):
    """Record the largest number of elements in any operation's result."""

    numel = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self.numel = max(self.numel, *(x.numel() for x in tree_leaves(result) if isinstance(x, torch.Tensor)), 0)
        return result


@pytest.mark.parametrize(("function", "fits"), [(token_logprob, True), (reference_token_logprob, False)])
def test_no_tensor_is_larger_than_the_inputs(function: Any, fits: bool) -> None:
    arguments = case(64, 256, 4)
    with Largest() as largest:
        results(function, *arguments, entropy=True, **({"with_entropy_grad": True} if fits else {}))
    assert largest.numel == (256 * 4 if fits else 64 * 256)


def test_a_target_outside_the_vocabulary_is_refused() -> None:
    hidden, weight, _ = case(2, 5, 2)
    with pytest.raises(IndexError, match=r"expected targets in 0\.\.4, found 0\.\.5"):
        token_logprob(hidden, weight, torch.tensor([0, 5]))


def test_targets_of_another_shape_are_refused() -> None:
    hidden, weight, targets = case(4, 5, 2)
    with pytest.raises(ValueError, match=r"expected targets \[4\] for hidden \[4, \d+\], found \[2, 2\]"):
        token_logprob(hidden, weight, targets.view(2, 2))


def test_a_missing_triton_announces_itself_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton_kernels, "find_spec", lambda name: None)
    found = triton_kernels.triton_kernels
    found.cache_clear()
    try:
        with pytest.warns(UserWarning, match="triton is not installed: it is slow"):
            assert found("token_logprob", "it is slow") is None
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            assert found("token_logprob", "it is slow") is None
    finally:
        found.cache_clear()


SHARDS = [[[0, 20, 37], [0, 30, 33], [0, 0, 17]], [[0, 11, 30, 37], [0, 19, 37, 37]]]  # over two ranks, over three


def rank_matches_single(rank: int, port: int) -> None:
    """One rank's rows give the results of the whole vocabulary, its rows of weight's gradient and all of hidden's."""
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=3)
    kernel.TILE = (4, 8)
    groups = dist.new_group([0, 1]), dist.group.WORLD
    for shards, group in zip(SHARDS, groups, strict=True):
        if rank < len(shards[0]) - 1:
            shards_match(rank, shards, group)
    dist.destroy_process_group()


def of_most_likely(others: torch.Tensor) -> Any:
    """Return a function as token_logprob, whose first result has other ids' log-probs too."""

    def function(*arguments: Any, **keys: Any) -> tuple[torch.Tensor, torch.Tensor]:
        logprob, nats, logprobs = token_logprob(*arguments, **keys, others=others)
        weights = torch.arange(1, others.shape[1] + 1, dtype=logprobs.dtype)
        return logprob + logprobs @ weights, nats

    return function


def shards_match(rank: int, shards: list[list[int]], group: Any) -> None:
    for cuts in shards:
        rows = slice(cuts[rank], cuts[rank + 1])
        keys: dict[str, Any] = {"shard": (group, rows.start)}
        for dtype, tolerance in ((torch.float64, None), (torch.float32, None), (torch.bfloat16, BF16)):
            for entropy in (False, True):
                keys["with_entropy_grad"] = entropy
                hidden, weight, targets = case(9, cuts[-1], 6, dtype)
                want = results(token_logprob, hidden, weight, targets, 0.7, entropy=entropy, with_entropy_grad=entropy)
                found = results(token_logprob, hidden, weight[rows], targets, 0.7, entropy=entropy, **keys)
                assert_same(found, (*want[:3], want[3][rows]), tolerance)
                kept = results(
                    token_logprob, hidden, weight[rows], targets, 0.7, entropy=entropy, keep_logits=True, **keys
                )
                assert all(torch.equal(a, b) for a, b in zip(kept, found, strict=True))
        hidden, weight, targets = case(9, cuts[-1], 6, torch.float64)
        kept = [sorted({int(target), *range(0, cuts[-1], 2 + i)}) for i, target in enumerate(targets)]
        counts, ids = (
            torch.tensor([0, *map(len, kept[1:])]),
            torch.tensor([id for each in kept[1:] for id in each]),
        )  # the first keeps all
        bits, own = kept_bits(counts, ids, cuts[-1]), kept_bits(counts, ids, rows.stop - rows.start, rows.start)
        keys["with_entropy_grad"] = True
        want = results(token_logprob, hidden, weight, targets, entropy=True, with_entropy_grad=True, kept=bits)
        found = results(token_logprob, hidden, weight[rows], targets, entropy=True, kept=own, **keys)
        assert_same(found, (*want[:3], want[3][rows]))
        others = most_likely(hidden, weight, 12)
        assert torch.equal(most_likely(hidden, weight[rows], 12, keys["shard"]), others)  # also of fewer rows than 12
        of_others = of_most_likely(others)
        want = results(of_others, hidden, weight, targets, entropy=True, with_entropy_grad=True)
        assert_same(results(of_others, hidden, weight[rows], targets, entropy=True, **keys), (*want[:3], want[3][rows]))
    hidden, weight, targets = case(9, shards[0][-1], 6)
    rows = slice(shards[0][rank], shards[0][rank + 1])
    reduced: list[tuple[int, ...]] = []
    all_reduce = dist.all_reduce
    keys = {"shard": (group, rows.start), "with_entropy_grad": True}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            dist, "all_reduce", lambda each, *rest: (reduced.append(tuple(each.shape)), all_reduce(each, *rest))
        )
        results(token_logprob, hidden, weight[rows], targets, entropy=True, **keys)
    assert reduced == [(9,), (3, 9), (9, 6)]  # a maximum, the sums, hidden's gradient


def test_vocabulary_shards_give_what_the_whole_gives() -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    spawn(rank_matches_single, (port,), nprocs=3)
