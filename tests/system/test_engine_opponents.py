"""A real vLLM in which opponents' adapters, from folders, share batches with the policy, whose slot is in memory.

As in test_engine.py, one test runs this file's check_* functions in a separate pytest process.
"""

import hashlib
import random
from pathlib import Path
from typing import Any

import pytest

from support.engine_runs import gap, run, run_checks
from support.lora_weights import adapters, merged
from support.tiny import tiny_llama
from titan_rl.actors.vllm.engine import Engine, EngineSettings
from titan_rl.config.sections import LoraSection
from titan_rl.ext.adapters.layers import PEFT_WEIGHTS
from titan_rl.ext.adapters.ranks.lora import write_peft
from titan_rl.ext.adapters.ranks.vllm_adapter import SlotAdapters
from titan_rl.wire.model_shape import ModelShape
from titan_rl.wire.types import Request, Sampling

LORA = LoraSection(rank=8, alpha=12, sync="adapter")
CONTEXT = [1, 5, 6, 7, 8, 9, 11, 13]
OPPONENTS, TOGETHER, POLICY = 5, 3, -1


def test_opponents_in_a_process_of_its_own() -> None:
    run_checks(__file__)


@pytest.fixture(scope="module")
def model() -> Any:
    return tiny_llama(max_position_embeddings=128)


@pytest.fixture(scope="module")
def engine(folder: Path, shape: ModelShape) -> Engine:
    room: dict[str, Any] = {"max_model_len": 128, "max_num_seqs": 32, "kv_cache_memory_mb": 32, "load_format": "auto"}
    slots = SlotAdapters(LORA, shape, slots=1, opponents=TOGETHER)
    engine = Engine(EngineSettings(model_dir=str(folder), adapters=slots, **room))
    engine.set_version(0)
    return engine


@pytest.fixture(scope="module")
def folders(model: Any, shape: ModelShape, folder: Path) -> list[Path]:
    """Folders of adapters whose names end with digests."""
    named = list[Path]()
    for seed in range(OPPONENTS):
        write_peft(new := folder / f"step-{seed}", adapters(model, shape, LORA, seed), LORA, shape, str(folder))
        digest = hashlib.sha256((new / PEFT_WEIGHTS).read_bytes()).hexdigest()[:12]
        named.append(new.rename(folder / f"step-{seed}.{digest}"))
    return named


def ask(folders: list[Path], id: str, player: int, tokens: int = 6) -> Request:
    own: dict[str, Any] = {"adapter": str(folders[player]), "version": 100 + player} if player != POLICY else {}
    return Request(id, CONTEXT, [0, 1], Sampling(tokens), **own)


def check_everybody_plays_by_its_weights_in_any_order(
    engine: Engine, model: Any, shape: ModelShape, folders: list[Path]
) -> None:
    """The policy's slot is zero, so that it is the base."""
    wholes = {seed: merged(model, adapters(model, shape, LORA, seed), LORA) for seed in range(OPPONENTS)}
    wholes[POLICY] = model
    draws = random.Random(0)
    for count in range(12):
        players = draws.sample(range(OPPONENTS), draws.randint(1, TOGETHER)) + [POLICY] * draws.randint(0, 1)
        done = run(engine, *(ask(folders, f"{count} {player}", player) for player in players))
        for player in players:
            for sample in done[f"{count} {player}"]:
                assert max(gap(wholes[player], sample, context=CONTEXT)) < 1e-5, players
                assert sample.versions == [0 if player == POLICY else 100 + player] * len(sample.tokens)


@pytest.mark.parametrize("keep", [False, True])
def check_a_new_version_of_the_policy_leaves_opponents_alone(
    engine: Engine, model: Any, shape: ModelShape, folders: list[Path], keep: bool
) -> None:
    whole = merged(model, adapters(model, shape, LORA, 3), LORA)
    engine.add([ask(folders, f"old {keep}", 3, 9), ask(folders, f"own {keep}", POLICY, 9)])
    done, version = [engine.step() for _ in range(4)], (engine.version or 0) + 1
    engine.suspend()
    engine.set_version(version, keep=keep)
    while engine.busy:
        done.append(engine.step())
    ended = {each.id: each.completions for step in done for each in step}
    for sample in ended[f"old {keep}"]:
        assert max(gap(whole, sample, context=CONTEXT)) < 1e-5
        assert set(sample.versions) == {103}
    assert {version - 1, version} == {v for sample in ended[f"own {keep}"] for v in sample.versions}


def check_a_changed_file_is_refused(engine: Engine, folders: list[Path]) -> None:
    other = folders[0].with_name(f"step-9.{'0' * 12}")
    other.mkdir()
    (other / PEFT_WEIGHTS).write_bytes(b"other")
    for folder, problem in ((other, "expected the SHA-256"), (other / "gone", "expected an adapter in")):
        engine.add([Request(folder.name, CONTEXT, [0], Sampling(2), adapter=str(folder), version=9)])
        (refused,) = engine.step()
        assert problem in refused.refused
