"""What generator.drafts refuses, in a config and when an engine is built."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from support.checked_configs import config
from support.shapes import LLAMA_8B
from titan_rl.actors.vllm.engine import EngineSettings
from titan_rl.ext.drafts.ranks.drafts import Drafts
from titan_rl.preflight.checks import problems
from titan_rl.wire.gpus import Gpus

REFUSED = 'generator.drafts: expected "none", because '


@pytest.mark.parametrize("drafts", ["siblings", "ngram"])
@pytest.mark.parametrize(
    ("toml", "why"),
    [
        ("[generator]\nasync_scheduling = true", "generator.async_scheduling launches a step before the drafts of"),
        ("[rollout]\ntop_k = 8", "rollout.top_p, top_k and min_p record one token of a step"),
        (
            '[model]\nname = "qwen3_moe"\n[algorithm]\nrouting_replay = true',
            "algorithm.routing_replay records one token of a step",
        ),
    ],
)
def test_a_config_whose_engines_could_not_draft_is_refused(tmp_path: Path, drafts: str, toml: str, why: str) -> None:
    generator = "" if "[generator]" in toml else "\n[generator]"
    assert problems(config(tmp_path, toml)) == []
    (problem,) = problems(config(tmp_path, f'{toml}{generator}\ndrafts = "{drafts}"'))
    assert problem.startswith(REFUSED + why)
    assert problem.endswith(f', found "{drafts}"')


def test_drafts_are_for_cpus(tmp_path: Path) -> None:
    drafting = config(tmp_path, '[generator]\ndrafts = "ngram"')
    assert problems(drafting) == []
    (problem,) = problems(drafting, gpus=Gpus(2))
    why = "drafts are unproven on GPUs, where vLLM's model runner V2 draws by another rule"
    assert problem == f'{REFUSED}{why}, found "ngram"'


@pytest.mark.parametrize(
    ("settings", "on_cpu", "why"),
    [
        ({}, False, "drafts are unproven on GPUs"),
        ({"async_scheduling": True}, True, "generator.async_scheduling launches"),
        ({"records": ("kept",)}, True, "rollout.top_p, top_k and min_p record"),
        ({"records": ("routes",)}, True, "algorithm.routing_replay records"),
        (
            {"shape": replace(LLAMA_8B, recurrent_heads=2)},
            True,
            "the recurrent state of llama3 has read a refused draft",
        ),
    ],
)
def test_an_engine_that_could_not_draft_is_refused(settings: dict[str, Any], on_cpu: bool, why: str) -> None:
    with pytest.raises(ValueError, match=REFUSED + why):
        Drafts(EngineSettings(model_dir="", drafts="ngram", **settings), {}, on_cpu=on_cpu)
