"""A dense DeepSeek V3 of a user's function for model.spec is sampled from, by weights of which vLLM makes others."""

from pathlib import Path
from typing import Any

import pytest

from support.own_specs import MLA, make_mla_folder
from support.running import Runs
from support.slow_cases import slow_except

ENGINES_SIZES = {"kv_lora_rank": 512, "qk_rope_head_dim": 64}  # the only ones of vLLM's CPU kernel
PAIRS: dict[str, tuple[dict[str, Any], float]] = {  # keys, and the most that log-probs of trainer and engine differ
    "two engine ranks": ({"generator__tensor_parallel_degree": 2, "optimizer__lr": 1e-2}, 1e-4),
    "merged adapters": ({"lora__rank": 8, "optimizer__lr": 1e-2}, 1e-4),
    "16 bits and a lag": (
        {
            **{"generator__dtype": "bfloat16", "training__mixed_precision_param": "bfloat16"},
            **{"rollout__max_staleness_steps": 1, "optimizer__lr": 1e-5},  # a lag adds the change of a step
        },
        5e-2,
    ),
}


@pytest.mark.parametrize("pair", slow_except(PAIRS, 1, 2))
def test_engines_sample_with_the_trainers_weights(
    runs: Runs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, pair: str
) -> None:
    from titan_rl.text.tokenizer import build

    for key, value in ENGINES_SIZES.items():
        monkeypatch.setitem(MLA, key, value)
    folder = make_mla_folder(tmp_path / "model")
    config = (folder / "config.json").read_text()
    build(folder)
    (folder / "config.json").write_text(config)
    keys, most = PAIRS[pair]
    keys |= {"model__name": "auto", "model__hf_assets_path": folder, "model__spec": "own_specs:mla"}
    run = runs.finish(tmp_path / "run", **keys, cold_start__steps=2, training__steps=3)
    gaps = [line["logprob_gap/mean"] for line in run.lines("metrics.jsonl") if "logprob_gap/mean" in line]
    assert len(gaps) == 3
    assert max(gaps) < most
