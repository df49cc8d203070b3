"""lora.sync = "auto" is "adapter" wherever vLLM can apply the adapters; a merge in 16 bits is warned of."""

from dataclasses import replace

import pytest

from support.shapes import LLAMA_8B, QWEN_30B_A3B
from titan_rl.config.sections import Config, GeneratorSection, LoraSection
from titan_rl.ext.adapters.adapter_sync import check_adapter_sync, merge_warning
from titan_rl.preflight.added_parameters import with_adapter_sync
from titan_rl.wire.model_shape import ModelShape

RUN = Config(lora=LoraSection(rank=16), generator=GeneratorSection(dtype="bfloat16"))


def with_rank(rank: int, config: Config = RUN) -> Config:
    return replace(config, lora=replace(config.lora, rank=rank))


def on(generator: GeneratorSection) -> Config:
    return replace(RUN, generator=generator)


@pytest.mark.parametrize(
    ("config", "shape", "device", "expected"),
    [
        (RUN, LLAMA_8B, "cuda", "adapter"),
        (RUN, LLAMA_8B, "cpu", "adapter"),
        (on(GeneratorSection(dtype="float32")), LLAMA_8B, "cpu", "adapter"),
        (on(GeneratorSection(dtype="float32")), LLAMA_8B, "cuda", "merge"),
        (on(GeneratorSection(dtype="bfloat16", quantization="fp8")), LLAMA_8B, "cuda", "merge"),
        (with_rank(9), LLAMA_8B, "cuda", "merge"),
        (with_rank(0), LLAMA_8B, "cuda", "merge"),
        (RUN, QWEN_30B_A3B, "cuda", "merge"),
    ],
)
def test_auto_is_adapter_wherever_vllm_can(config: Config, shape: ModelShape, device: str, expected: str) -> None:
    found = with_adapter_sync(config, shape, device)
    assert found.lora.sync == expected
    assert with_adapter_sync(found, shape, device) == found
    if expected == "adapter":
        assert list(check_adapter_sync(found, shape, device)) == []


@pytest.mark.parametrize(
    ("config", "shape", "reason"),
    [
        (with_rank(9), LLAMA_8B, "lora.rank: expected 1, 8, 16"),
        (RUN, QWEN_30B_A3B, "computes experts in another way"),
        (replace(RUN, lora=LoraSection(rank=16, sync="merge")), LLAMA_8B, 'lora.sync = "adapter" is exact'),
    ],
)
def test_what_is_merged_in_16_bits_is_warned_of(config: Config, shape: ModelShape, reason: str) -> None:
    (warning,) = merge_warning(with_adapter_sync(config, shape, "cuda"), shape, "cuda")
    assert "adapters are merged into bfloat16 weights" in warning
    assert reason in warning


def test_nothing_is_warned_of_where_no_bit_is_lost() -> None:
    def warned(config: Config, device: str) -> list[str]:
        return list(merge_warning(with_adapter_sync(config, LLAMA_8B, device), LLAMA_8B, device))

    assert warned(RUN, "cuda") == []
    exact = GeneratorSection(dtype="float32")
    assert warned(replace(with_rank(9), generator=exact), "cpu") == []
    assert warned(with_rank(0), "cuda") == []
