"""Adapters through the core's seams, beside a whole model."""

from typing import Any

import pytest
import torch

from support.shapes import LLAMA_8B
from titan_rl.actors.titan.adaptation import Adaptation, adaptation_of
from titan_rl.actors.vllm.engine_adapters import EngineAdapters, engine_adapters
from titan_rl.config.sections import Config, LoraSection
from titan_rl.preflight.added_parameters import added_parameters, trained_parameters

WEIGHT = "layers.0.feed_forward.w1.weight"
A, B = WEIGHT.replace(".weight", ".lora_a.weight"), WEIGHT.replace(".weight", ".lora_b.weight")
HF = "model.layers.0.mlp.gate_proj"


def adaptation(**lora: Any) -> Adaptation:
    return adaptation_of(Config(lora=LoraSection(**lora)))


def test_a_whole_model_has_nothing_added() -> None:
    whole = adaptation()
    assert not whole.freezes
    assert not whole.adds(A)
    assert added_parameters(LoraSection(), LLAMA_8B).number() == 0
    assert trained_parameters(LoraSection(), LLAMA_8B) == LLAMA_8B.parameters
    assert engine_adapters(None, LLAMA_8B, 2) == EngineAdapters(slots=2)


def test_adapters_are_named_after_their_weight() -> None:
    names = {name: adaptation(rank=4).hf_name(name, {WEIGHT: f"{HF}.weight"}.__getitem__) for name in (WEIGHT, A, B)}
    assert names == {WEIGHT: f"{HF}.weight", A: f"{HF}.lora_A.weight", B: f"{HF}.lora_B.weight"}


@pytest.mark.parametrize(("sync", "moved"), [("adapter", [WEIGHT, A, B]), ("merge", [WEIGHT])])
def test_a_sync_moves_adapters_only_where_vllm_applies_them(sync: str, moved: list[str]) -> None:
    adapters = adaptation(rank=4, sync=sync)
    assert [name for name in (WEIGHT, A, B) if adapters.syncs(name)] == moved
    assert [name for name in (WEIGHT, A, B) if adapters.adds(name)] == [A, B]


@pytest.mark.parametrize("sync", ["adapter", "merge"])
def test_engines_get_scaled_adapters_in_memory_or_weights_that_are_merged_when_read(sync: str) -> None:
    params = {f"{HF}.weight": torch.randn(6, 4), f"{HF}.lora_A.weight": torch.randn(2, 4)}
    params[f"{HF}.lora_B.weight"] = torch.randn(6, 2)
    weight, a, b = params.values()
    packed = adaptation(rank=2, alpha=6.0, sync=sync).packed(params)
    assert isinstance(packed, dict) == (sync == "adapter")  # which Staging asks
    whole, scale = packed[f"{HF}.weight"], 3.0 if sync == "adapter" else 1.0
    torch.testing.assert_close(whole, weight if sync == "adapter" else weight + 3.0 * b @ a)
    assert torch.equal(packed[f"{HF}.lora_B.weight"], scale * b)
