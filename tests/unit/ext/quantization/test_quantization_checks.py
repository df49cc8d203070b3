"""What generator.quantization refuses."""

from pathlib import Path

import pytest

from support.checked_configs import config
from titan_rl.preflight.checks import problems
from titan_rl.wire.gpus import Gpus


@pytest.mark.parametrize(
    ("toml", "message"),
    [
        (
            '[generator]\nquantization = "fp8"\ndtype = "float32"\n[training]\nmixed_precision_param = "bfloat16"',
            'generator.dtype: expected "bfloat16" or "auto", because vLLM\'s fp8 kernels take no other, found',
        ),
        (
            '[model]\nhidden_dim = 392\n[generator]\nquantization = "fp8"',
            'generator.quantization: expected "none", because vLLM pads fp8 weights, a rank of which has 392 hid',
        ),
        (
            '[model]\nname = "qwen3_moe"\n[generator]\nquantization = "int8"',
            'generator.quantization: expected "none", because the experts of qwen3_moe are not quantized, found "int8"',
        ),
    ],
)
def test_weights_that_vllm_does_not_take_in_8_bits_are_refused(tmp_path: Path, toml: str, message: str) -> None:
    (problem,) = problems(config(tmp_path, toml))
    assert message in problem


def test_int8_is_for_cpus(tmp_path: Path) -> None:
    quantized = config(tmp_path, '[generator]\nquantization = "int8"')
    assert problems(quantized) == []
    (problem,) = problems(quantized, gpus=Gpus(2))
    assert problem == (
        'generator.quantization: expected "fp8" or "none", because vLLM has no int8 kernel that a sync can '
        'write, found "int8"'
    )
