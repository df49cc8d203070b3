"""A real vLLM that applies an adapter, which syncs write in place, compared with Hugging Face's forward of the merged
weights.

As in test_engine.py, one test runs this file's check_* functions in a separate pytest process.
"""

import asyncio
import os
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, get_args

import pytest

from support.engine_runs import finish, gap, run, run_checks, withdraw_all
from support.lora_weights import adapters, merged, shards
from support.tiny import tiny_llama, tiny_model
from titan_rl.actors.vllm.engine import Engine, EngineSettings
from titan_rl.actors.vllm.vllm_params import verify_complete
from titan_rl.config.sections import LoraSection, WeightSyncSection
from titan_rl.ext.adapters.layers import SLOT_RANKS, adapter_parameters
from titan_rl.ext.adapters.ranks.vllm_adapter import SlotAdapters
from titan_rl.wire.errors import WeightsRefused
from titan_rl.wire.model_shape import ModelShape
from titan_rl.wire.reports import ReaderCost
from titan_rl.wire.types import Request, Sampling
from titan_rl.wire.weight_plan import plan
from titan_rl.wire.weight_source import Source

LORA = LoraSection(rank=8, alpha=12, sync="adapter")
CONTEXT = list(range(40))  # one full block of 32 tokens, and a part of one
GROUP = Request("group", CONTEXT, list(range(8)), Sampling(24))
BLOCK = 1 << 10


@pytest.mark.parametrize("family", ["llama", "qwen2"])
def test_adapters_in_a_process_of_its_own(family: str) -> None:
    run_checks(__file__, FAMILY=family)


@pytest.fixture(scope="module")
def model() -> Any:
    family = os.environ["FAMILY"]
    room = {"max_position_embeddings": 128}
    return tiny_llama(**room) if family == "llama" else tiny_model(family, **room)  # qwen2 has biases


@pytest.fixture(scope="module")
def loaded(folder: Path, shape: ModelShape) -> Engine:
    room: dict[str, Any] = {"max_model_len": 128, "max_num_seqs": 8, "kv_cache_memory_mb": 32}
    return Engine(EngineSettings(model_dir=str(folder), shape=shape, adapters=SlotAdapters(LORA, shape), **room))


class Trainer:
    """A trainer rank that holds the model and its adapters, and a landing that reads from it."""

    def __init__(self, engine: Engine, model: Any, shape: ModelShape, folder: Path) -> None:
        from safetensors.torch import load_file
        from torch import float32

        from titan_rl.actors.sync.landing import Landing
        from titan_rl.actors.sync.staging import Staging
        from titan_rl.ext.adapters.ranks.merged import applied

        self.engine, self.model, self.shape = engine, model, shape
        self.base = load_file(folder / "model.safetensors")
        self.adapters = adapters(model, shape, LORA, 0)
        self.held = self.base | self.adapters
        run = plan([shards(self.held)], [engine.layout.with_adapters(shape, LORA).pieces]).outgoing(0)[0]
        self.staging = Staging(self.held, {0: run}, float32, block_bytes=BLOCK, view=partial(applied, scale=LORA.scale))
        source = Source(0, self.staging.offer(remote=False)[0], run, "float32", BLOCK)
        self.landing = Landing(engine.params(), [source], WeightSyncSection(delta=True))
        self.serial = 0

    def publish(self, seed: int) -> Any:
        """Give the adapters new weights, and pack them. Return the manifest."""
        self.serial += 1
        for name, tensor in adapters(self.model, self.shape, LORA, seed).items():
            self.held[name].copy_(tensor)
        return self.staging.pack(seed, self.serial % 2, self.serial)[0]

    def land(self, manifest: Any) -> ReaderCost:
        self.engine.suspend()

        async def work() -> ReaderCost:
            cost = await self.landing.fetch_weights([manifest], 30)
            await self.landing.write_weights(30)
            return cost

        return asyncio.run(work())

    def serve(self, seed: int, *, keep: bool = False) -> ReaderCost:
        cost = self.land(self.publish(seed))
        self.engine.set_version(seed, keep=keep)
        return cost

    def merged(self, seed: int) -> Any:
        return merged(self.model, adapters(self.model, self.shape, LORA, seed), LORA)


@pytest.fixture
def trainer(loaded: Engine, model: Any, shape: ModelShape, folder: Path) -> Iterator[Trainer]:
    trainer = Trainer(loaded, model, shape, folder)
    yield trainer
    withdraw_all(loaded)


def check_the_engine_has_what_the_plan_fills(loaded: Engine, shape: ModelShape) -> None:
    from vllm.config.lora import MaxLoRARanks

    assert get_args(MaxLoRARanks) == SLOT_RANKS
    verify_complete(loaded.info.shapes, loaded.layout.with_adapters(shape, LORA).shapes)


def check_log_probs_are_those_of_the_merged_model_after_every_update(trainer: Trainer, model: Any) -> None:
    """A sync after the first one moves the adapters' bytes and no others; the prefix cache has nothing of before."""
    whole = trainer.serve(1).bytes
    for seed in (2, 3, 4):
        before = trainer.engine.stats()
        cost = trainer.serve(seed)
        done = run(trainer.engine, GROUP)["group"]
        assert max(max(gap(trainer.merged(seed), c, context=CONTEXT)) for c in done) < 1e-5
        assert min(max(gap(trainer.merged(seed - 1), c, context=CONTEXT)) for c in done) > 1e-2
        assert min(max(gap(model, c, context=CONTEXT)) for c in done) > 1e-2
        assert cost.bytes == 4 * adapter_parameters(LORA, trainer.shape)
        assert whole == cost.bytes + 4 * sum(w.numel() for w in trainer.base.values())
        after = trainer.engine.stats()
        assert after.cached_tokens - before.cached_tokens == 7 * 32


@pytest.mark.parametrize("keep", [False, True])
def check_a_swap_goes_on_with_the_new_adapter(trainer: Trainer, keep: bool) -> None:
    trainer.serve(1)
    trainer.engine.add([GROUP])
    for _ in range(10):
        trainer.engine.step()
    trainer.serve(2, keep=keep)
    for completion in finish(trainer.engine)["group"]:
        assert completion.versions == [1] * 10 + [2] * 14
        assert max(gap(trainer.merged(1), completion, context=CONTEXT)[:10]) < 1e-5
        late = max(gap(trainer.merged(2), completion, context=CONTEXT)[10:])
        assert late > 1e-3 if keep else late < 1e-5
    fresh = run(trainer.engine, replace(GROUP, id="fresh"))["fresh"]
    assert max(max(gap(trainer.merged(2), c, context=CONTEXT)) for c in fresh) < 1e-5


@pytest.mark.parametrize("kind", ["lora_a.2", "lora_b.0", "qkv_proj.weight"])
def check_a_flipped_bit_in_the_engine_is_refused(trainer: Trainer, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """In an adapter that the sync wrote, or in a frozen weight that it did not."""
    import torch

    trainer.serve(1)
    put = trainer.landing._put

    def damaged(*arguments: Any) -> None:
        put(*arguments)
        (tensor, *_) = (t for name, t in trainer.engine.params().items() if name.endswith(kind))
        tensor.view(torch.int32)[1, 2] ^= 1

    with monkeypatch.context() as patched:
        patched.setattr(trainer.landing, "_put", damaged)
        with pytest.raises(WeightsRefused, match=r"version 2: expected checksum .* in the live parameters, found"):
            trainer.land(trainer.publish(2))
    trainer.serve(3)
    assert max(gap(trainer.merged(3), run(trainer.engine, GROUP)["group"][0], context=CONTEXT)) < 1e-5


@pytest.mark.parametrize("part", ["adapter", "frozen"])
def check_a_flipped_bit_in_the_packed_bytes_is_refused(trainer: Trainer, part: str) -> None:
    manifest = trainer.publish(1)
    run = trainer.staging.runs[manifest.slot][0]
    run[-5 if part == "adapter" else 1000] += 1
    with pytest.raises(WeightsRefused, match="expected checksum"):
        trainer.land(manifest)
    trainer.staging.forget_frozen()
    trainer.serve(2)


def check_an_engine_that_slept_gets_all_weights_again(trainer: Trainer, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU, where a level-2 sleep frees the memory of weights and adapters."""
    engine = trainer.engine
    whole = trainer.serve(1).bytes
    monkeypatch.setattr(engine, "offloads", True)
    monkeypatch.setattr(engine, "_buffers", {})
    monkeypatch.setattr(engine._llm.model_executor.driver_worker.worker, "sleep", lambda level: None)
    engine.sleep()
    for parameter in engine.params().values():
        parameter.fill_(float("nan"))
    trainer.landing.forget()
    engine.suspend()
    engine.wake()
    assert trainer.serve(2).bytes == whole
    done = run(engine, GROUP)["group"]
    assert max(max(gap(trainer.merged(2), c, context=CONTEXT)) for c in done) < 1e-5


def check_an_engine_without_its_adapter_serves_nothing(trainer: Trainer) -> None:
    from titan_rl.ext.adapters.ranks import vllm_adapter

    trainer.serve(1)
    trainer.engine._llm.apply_model(lambda model: model.lora_manager.remove_all_adapters())
    with pytest.raises(RuntimeError, match="expected adapters 1 to 1 in vLLM's slots, in order, found"):
        trainer.engine.set_version(2)
    trainer.engine._llm.apply_model(partial(vllm_adapter.put_zeros, slots=1))
