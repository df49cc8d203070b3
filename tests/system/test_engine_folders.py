"""A real vLLM that reads adapters from folders, as Tinker's clients publish them: more adapters than slots, and a base.

As in test_engine.py, one test runs this file's check_* functions in a separate pytest process.
"""

from pathlib import Path
from typing import Any

import pytest

from support.engine_runs import gap, run, run_checks
from support.lora_weights import adapters, merged
from support.tiny import tiny_llama
from titan_rl.actors.vllm.engine import Engine, EngineSettings
from titan_rl.config.sections import LoraSection
from titan_rl.ext.adapters.ranks.lora import write_peft
from titan_rl.ext.tinker.ranks.folder_adapters import FolderAdapters
from titan_rl.ext.tinker.served import MAX_TOGETHER
from titan_rl.wire.model_shape import ModelShape
from titan_rl.wire.types import Request, Sampling

LORA = LoraSection(rank=8, alpha=12, sync="adapter")
CONTEXT = [1, 5, 6, 7, 8, 9, 11, 13]
VERSIONS = 5
BASE = -1


def test_folders_in_a_process_of_its_own() -> None:
    run_checks(__file__)


@pytest.fixture(scope="module")
def model() -> Any:
    return tiny_llama(max_position_embeddings=128)


@pytest.fixture(scope="module")
def engine(folder: Path, shape: ModelShape) -> Engine:
    room: dict[str, Any] = {"max_model_len": 128, "max_num_seqs": 32, "kv_cache_memory_mb": 32, "load_format": "auto"}
    engine = Engine(EngineSettings(model_dir=str(folder), adapters=FolderAdapters(LORA, shape), **room))
    engine.set_version(0)
    return engine


@pytest.fixture(scope="module")
def versions(model: Any, shape: ModelShape, folder: Path) -> list[Path]:
    """Folders of adapters, of which more exist than vLLM has slots."""
    assert VERSIONS > MAX_TOGETHER
    for seed in range(VERSIONS):
        write_peft(folder / f"version{seed}", adapters(model, shape, LORA, seed), LORA, shape, str(folder))
    return [folder / f"version{seed}" for seed in range(VERSIONS)]


def check_the_base_beside_five_adapters_is_the_base(
    engine: Engine, model: Any, shape: ModelShape, versions: list[Path]
) -> None:
    """In every order in which slots are filled, and alone."""
    wholes = {seed: merged(model, adapters(model, shape, LORA, seed), LORA) for seed in range(VERSIONS)}
    wholes[BASE] = model
    everyone = [*range(VERSIONS), BASE]
    for count, others in enumerate(([BASE], *([BASE, seed] for seed in range(VERSIONS)), everyone, everyone[::-1])):
        requests = [
            Request(
                f"{count} {seed}", CONTEXT, [0, 1], Sampling(6), adapter="" if seed == BASE else str(versions[seed])
            )
            for seed in others
        ]
        done = run(engine, *requests)
        for seed in others:
            gaps = [max(gap(wholes[seed], each, context=CONTEXT)) for each in done[f"{count} {seed}"]]
            assert max(gaps) < 1e-5, (others, seed)
