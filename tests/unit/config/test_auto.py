"""What "auto" means, by config and device."""

from dataclasses import replace
from typing import Any

import pytest

from titan_rl.config.auto import compiles, gradient_sync, resolved
from titan_rl.config.sections import CompileSection, Config, Switch, TrainingSection


@pytest.mark.parametrize(
    ("enable", "device", "compute", "expected"),
    [
        ("auto", "cuda", "bfloat16", True),
        ("auto", "cuda", "float32", False),
        ("auto", "cpu", "bfloat16", False),
        ("auto", "cpu", "float32", False),
        (False, "cuda", "bfloat16", False),
        (True, "cuda", "bfloat16", True),
    ],
)
def test_blocks_are_compiled_where_their_attention_can_be(
    enable: Switch, device: str, compute: Any, expected: bool
) -> None:
    config = Config(
        compile=CompileSection(enable=enable), training=replace(TrainingSection(), mixed_precision_param=compute)
    )
    assert compiles(config, device) is expected
    assert resolved(config, device).compile.enable is expected


def test_gradients_are_synced_once_per_update_if_their_memory_allows_it() -> None:
    assert gradient_sync(Config(), fits=True) == "update"
    assert gradient_sync(Config(), fits=False) == "microbatch"
    for chosen in ("update", "microbatch"):
        config = Config(training=TrainingSection(gradient_sync=chosen))
        assert {gradient_sync(config, fits=fits) for fits in (True, False)} == {chosen}


def test_a_resolved_config_resolves_to_itself() -> None:
    for device in ("cpu", "cuda"):
        once = resolved(Config(), device, gradients_fit=False)
        assert resolved(once, device) == once
        assert once == replace(Config(), compile=once.compile, training=once.training)
