"""Drawn models of several families sample the same tokens with drafts and without."""

import os
from pathlib import Path
from random import Random
from typing import Any

import pytest

from bench.family_folders import drawn, write_folder
from support.engine_runs import run, run_checks
from support.slow_cases import slow_except
from titan_rl.actors.vllm.engine import Engine, EngineSettings
from titan_rl.wire.model_shape import shape_of_folder
from titan_rl.wire.types import Completion, Request, Sampling

FAMILY, SEED = "FAMILY", 1
FAMILIES = ("deepseek_v3", "gemma4_text", "muse_glimmer", "gpt_oss", "qwen3_moe", "olmo3")


@pytest.mark.parametrize("family", slow_except(FAMILIES, 0))
def test_tokens_are_those_without_drafts(family: str) -> None:
    run_checks(__file__, **{FAMILY: family})


def check_drafts_change_no_token(tmp_path: Path) -> None:
    write_folder(tmp_path, os.environ[FAMILY], drawn(os.environ[FAMILY], SEED), seed=str(SEED))
    room: dict[str, Any] = {"max_model_len": 128, "kv_cache_memory_mb": 64, "max_num_seqs": 16}
    room |= {"model_dir": str(tmp_path), "load_format": "auto", "shape": shape_of_folder(str(tmp_path), "a test")}
    engines = [Engine(EngineSettings(**room, drafts=drafts)) for drafts in ("none", "siblings")]
    answers = list[dict[str, list[Completion]]]()
    for engine in engines:
        engine.set_version(0)
        answers.append({id: samples for half in requests() for id, samples in run(engine, *half).items()})
    for id, (plain,) in answers[0].items():
        (drafting,) = answers[1][id]
        assert drafting.tokens == plain.tokens
        assert drafting.logprobs == pytest.approx(plain.logprobs, abs=1e-4)
    assert engines[0].stats().accepted == 0 < engines[1].stats().accepted


def requests() -> list[list[Request]]:
    """Return two halves of groups that read repetitive prompts. Siblings draft for the second half."""
    draw, asked = Random(SEED), list[Request]()
    for group in range(4):
        context = [1, *draw.choices(range(4, 60), k=5) * 6]
        for i in range(6):
            wish = Sampling(60, draw.choice([0.3, 1.0]), stop_token_ids=(2,))
            names = (f"{group}.{i}", f"group{group}")
            asked.append(Request(names[0], context, [draw.randrange(2**31)], wish, affinity=names))
    return [asked[::2], asked[1::2]]
