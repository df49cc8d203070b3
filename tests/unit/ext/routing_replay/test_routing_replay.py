"""A trainer that replays routes: its own change nothing, and misplaced ones show in the agreement."""

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from support.routed_rows import drawn, recorded, with_routes
from support.shapes import TINY
from support.whole_model import whole_model
from titan_rl.actors.titan.experts import Router, take_routed
from titan_rl.actors.titan.model import DeviceRows, TitanModel
from titan_rl.actors.titan.reduction import replay_metrics
from titan_rl.batch.packing import pack
from titan_rl.config.sections import Config, Dtype, TrainingSection
from titan_rl.ext.routing_replay.routes import filled_places
from titan_rl.tools.diagnosis.engine_rules import AGREEMENT
from titan_rl.wire.types import Batch, Rows, Sample

CPU = torch.device("cpu")
EXPERTS, K, LENGTH = 8, 2, 32
SHAPE = replace(TINY, family="qwen3_moe", experts=EXPERTS, experts_per_token=K)
ALONE: Any = SimpleNamespace(tp_enabled=False, ep_enabled=False, get_optional_mesh=lambda name: None)


@cache
def model(compute: Dtype = "float32") -> TitanModel:
    return whole_model(SHAPE, Config(training=TrainingSection(seq_len=LENGTH)), compute=compute)


def packed(seed: int = 0) -> Batch:
    random = np.random.default_rng(seed)
    lengths = random.integers(4, LENGTH, 8).tolist()
    samples = [Sample(random.integers(3, SHAPE.vocab_size, n).tolist(), [0, 0] + [1] * (n - 2)) for n in lengths]
    (batch,) = pack(samples, shards=1, seq_len=LENGTH, rows_per_microbatch=4, pad_id=0)
    return batch


def replaying(rows: Rows, routes: np.ndarray) -> Rows:
    return replace(rows, extras={"routes": routes})


def learnt(rows: Rows, on: TitanModel) -> tuple[torch.Tensor, list[torch.Tensor], dict[str, float]]:
    """Return log-probs, gradients and metrics of a backward."""
    on.model.zero_grad()
    logprobs, _ = on.logprobs(DeviceRows.of(rows, CPU), temperature=1.0)
    (-logprobs.sum()).backward()
    routed = take_routed(on.model, ALONE)
    assert routed is not None
    gradients = [p.grad.clone() for p in on.model.parameters() if p.grad is not None]
    return logprobs.detach(), gradients, replay_metrics(routed.replay_3)


def own_routes(rows: Rows, on: TitanModel) -> np.ndarray:
    """Return what the routers choose themselves; at padding nothing is known."""
    with recorded(on.model) as last:
        on.score(replace(rows, extras={}))
        routes = last()
    return np.where(filled_places(rows)[..., None, None], routes, np.int16(-1))


@pytest.mark.parametrize("compute", ["float32", "bfloat16"])
def test_a_replay_of_its_own_routes_changes_nothing(compute: Dtype) -> None:
    on = model(compute)
    (rows,) = packed().microbatches
    logprobs, gradients, metrics = learnt(rows, on)
    assert metrics == {}
    again, replayed, metrics = learnt(replaying(rows, own_routes(rows, on)), on)
    assert metrics == {"routing/replayed": 1.0, "routing/agreement": 1.0}
    assert torch.equal(again, logprobs)
    assert all(torch.equal(a, b) for a, b in zip(replayed, gradients, strict=True))
    backwards = np.ascontiguousarray(own_routes(rows, on)[..., ::-1])
    reversed_, _, metrics = learnt(replaying(rows, backwards), on)
    assert metrics["routing/agreement"] == 1.0, "the order of a token's experts does not count"
    torch.testing.assert_close(reversed_, logprobs, rtol=0, atol=1e-6 if compute == "float32" else 0.05)


def test_unknown_routes_are_the_routers_own() -> None:
    (rows,) = packed().microbatches
    nothing = np.full((*rows.tokens.shape, SHAPE.n_layers, K), -1, np.int16)
    logprobs, gradients, _ = learnt(rows, model())
    again, replayed, metrics = learnt(replaying(rows, nothing), model())
    assert metrics == {"routing/replayed": 0.0}, "no agreement of nothing"
    assert torch.equal(again, logprobs)
    assert all(torch.equal(a, b) for a, b in zip(replayed, gradients, strict=True))


@pytest.mark.parametrize("norm", [True, False])
def test_weights_of_replayed_experts_are_the_routers_own_probabilities(norm: bool) -> None:
    """Compare with softmax, and its gradient, written out."""
    torch.manual_seed(0)
    router: Any = next(m for m in whole_model(SHAPE, model().config).model.modules() if isinstance(m, Router))
    router.route_norm = norm
    x_BLD = torch.randn(2, 5, SHAPE.dim)
    ids_BLK = torch.rand(2, 5, EXPERTS).argsort(-1)[..., :K]
    router.replayed_BLK, router.filled_BL = ids_BLK.short(), torch.ones(2, 5, dtype=torch.bool)
    weights, ids, _ = router(x_BLD)
    pull = torch.randn_like(weights)
    (weights * pull).sum().backward()
    found, router.gate.weight.grad = router.gate.weight.grad, None
    logits = x_BLD @ router.gate.weight.T
    chosen = logits.exp().gather(-1, ids_BLK) / (1 if norm else logits.exp().sum(-1, keepdim=True))
    expected = chosen / chosen.sum(-1, keepdim=True) if norm else chosen
    (expected * pull).sum().backward()
    assert torch.equal(ids, ids_BLK)
    torch.testing.assert_close(weights, expected, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(found, router.gate.weight.grad, rtol=1e-4, atol=1e-6)
    assert found.abs().max() > 0.01


def lost_row(routes: np.ndarray) -> np.ndarray:
    """One row is missing near the beginning, so that all later ones move up."""
    flat = routes.reshape(-1, *routes.shape[2:])
    return np.concatenate([flat[:5], flat[6:], np.full_like(flat[:1], -1)]).reshape(routes.shape)


def shifted(routes: np.ndarray) -> np.ndarray:
    return np.roll(routes, 1, axis=1)


def of_another_sample(routes: np.ndarray) -> np.ndarray:
    return routes[::-1].copy()


def of_another_layer(routes: np.ndarray) -> np.ndarray:
    return np.roll(routes, 1, axis=2)


@pytest.mark.parametrize("plant", [lost_row, shifted, of_another_sample, of_another_layer])
def test_misplaced_routes_show_in_the_agreement(plant: Callable[[np.ndarray], np.ndarray]) -> None:
    (rows,) = packed().microbatches
    logprobs, _, _ = learnt(rows, model())
    moved, _, metrics = learnt(replaying(rows, plant(own_routes(rows, model()))), model())
    assert metrics["routing/agreement"] < AGREEMENT - 0.1, "titan_rl.tools.why names it"
    assert (moved - logprobs).abs().max() > 1e-3


def test_routes_of_another_models_layers_are_refused() -> None:
    batch = with_routes(packed(), drawn(0, SHAPE.n_layers + 1, EXPERTS, K))
    with pytest.raises(
        ValueError, match=r"expected routes of \(2, 2\) layers and experts for each token, found \(3, 2\)"
    ):
        learnt(batch.microbatches[0], model())


@pytest.mark.parametrize("share", [False, True])
def test_shared_prompts_count_as_tokens_and_padding_does_not(share: bool) -> None:
    prompt = [*range(3, 13)]
    samples = [Sample([*prompt, last, 2], [0] * 10 + [1] * 2, {}, 10) for last in (3, 4, 5)]
    (batch,) = pack(samples, shards=1, seq_len=40, rows_per_microbatch=1, pad_id=0, share=share)
    (rows,) = batch.microbatches
    assert filled_places(rows).sum() == (10 + 3 if share else 3 * 11) < rows.tokens.size
    _, _, metrics = learnt(replaying(rows, own_routes(rows, model())), model())
    assert metrics == {"routing/replayed": 1.0, "routing/agreement": 1.0}


def test_only_a_backwards_routes_are_counted() -> None:
    (rows,) = with_routes(packed(), drawn(0, SHAPE.n_layers, EXPERTS, K)).microbatches
    model().score(rows)
    routed = take_routed(model().model, ALONE)
    assert routed is None or not routed.replay_3.any()
