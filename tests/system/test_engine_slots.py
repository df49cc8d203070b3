"""A real vLLM with the adapters of two policies in two slots: each request computes with its own policy's.

As in test_engine.py, one test runs this file's check_* functions in a separate pytest process.
"""

import asyncio
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from support.engine_runs import (
    SCHEDULING,
    SCHEDULINGS,
    asynchronous,
    finish,
    gap,
    run,
    run_checks,
    withdraw_all,
)
from support.lora_weights import adapters, merged, shards
from support.tiny import tiny_llama
from titan_rl.actors.vllm.engine import Engine, EngineSettings
from titan_rl.actors.vllm.vllm_params import adapters_in, in_slot
from titan_rl.config.sections import LoraSection, WeightSyncSection
from titan_rl.ext.adapters.layers import adapter_parameters
from titan_rl.ext.adapters.ranks.vllm_adapter import SlotAdapters
from titan_rl.wire.errors import WeightsRefused
from titan_rl.wire.model_shape import ModelShape
from titan_rl.wire.types import Completion, Request, Sampling
from titan_rl.wire.weight_plan import plan
from titan_rl.wire.weight_source import Source

LORA = LoraSection(rank=8, alpha=12, sync="adapter")
SLOTS = 2
CONTEXT = list(range(40))  # one full block of 32 tokens, and a part of one
BLOCK = 1 << 10


@pytest.mark.parametrize("scheduling", SCHEDULINGS)
def test_two_slots_in_a_process_of_its_own(scheduling: str) -> None:
    run_checks(__file__, **{SCHEDULING: scheduling})


@pytest.fixture(scope="module")
def model() -> Any:
    return tiny_llama(max_position_embeddings=128)


@pytest.fixture(scope="module")
def engine(folder: Path, shape: ModelShape) -> Engine:
    room: dict[str, Any] = {"max_model_len": 128, "max_num_seqs": 16, "kv_cache_memory_mb": 32}
    room["async_scheduling"] = asynchronous()
    settings = EngineSettings(
        model_dir=str(folder), shape=shape, adapters=SlotAdapters(LORA, shape, slots=SLOTS), **room
    )
    return Engine(settings)


class Policies:
    """A trainer rank with the adapters of each policy, and a landing in each slot. Slot 0's syncs move the base."""

    def __init__(self, engine: Engine, model: Any, shape: ModelShape, folder: Path) -> None:
        from safetensors.torch import load_file
        from torch import float32

        from titan_rl.actors.sync.landing import Landing
        from titan_rl.actors.sync.staging import Staging
        from titan_rl.ext.adapters.ranks.merged import applied

        self.engine, self.model, self.shape = engine, model, shape
        base = load_file(folder / "model.safetensors")
        wanted = engine.layout.with_adapters(shape, LORA).pieces
        self.held, self.stagings, self.landings, self.sources, self.serial = [], [], [], [], 0
        for slot in range(SLOTS):
            held = adapters(model, shape, LORA, slot) | ({} if slot else base)
            own = adapters_in(slot, wanted) if slot else wanted
            copies = plan([shards(held)], [own]).outgoing(0)[0]
            staging = Staging(held, {0: copies}, float32, block_bytes=BLOCK, view=partial(applied, scale=LORA.scale))
            source = Source(0, staging.offer(remote=False)[0], copies, "float32", BLOCK)
            self.held.append(held)
            self.stagings.append(staging)
            self.sources.append(source)
            self.landings.append(Landing(engine.params(slot), [source], WeightSyncSection(delta=True)))

    def publish(self, slot: int, seed: int) -> Any:
        """Give a policy's adapters new weights, and pack them. Return the manifest."""
        self.serial += 1
        for name, tensor in adapters(self.model, self.shape, LORA, seed).items():
            self.held[slot][name].copy_(tensor)
        return self.stagings[slot].pack(seed, self.serial % 2, self.serial)[0]

    def land(self, slot: int, seed: int, of: int | None = None) -> int:
        """Write a policy's new adapters into its slot. Return the bytes that moved. `of`: publish another's instead."""
        manifest = self.publish(slot if of is None else of, seed)
        self.engine.suspend(slot)

        async def work() -> int:
            cost = await self.landings[slot].fetch_weights([manifest], 30)
            await self.landings[slot].write_weights(30)
            return cost.bytes

        return asyncio.run(work())

    def serve(self, slot: int, seed: int, *, keep: bool = False) -> int:
        moved = self.land(slot, seed)
        self.engine.set_version(seed, keep=keep, slot=slot)
        return moved

    def widest(self, seed: int, done: list[Completion], since: int = 0) -> float:
        """Return the largest gap to the log-probs of the model that has this seed's adapters merged."""
        whole = merged(self.model, adapters(self.model, self.shape, LORA, seed), LORA)
        return max(max(gap(whole, completion, context=CONTEXT)[since:]) for completion in done)


@pytest.fixture
def policies(engine: Engine, model: Any, shape: ModelShape, folder: Path) -> Iterator[Policies]:
    policies = Policies(engine, model, shape, folder)
    yield policies
    withdraw_all(engine)


def group(slot: int, samples: int = 8, length: int = 24) -> Request:
    return Request(f"slot{slot}", CONTEXT, list(range(samples)), Sampling(length), slot=slot)


def check_requests_of_two_policies_share_a_step(policies: Policies, shape: ModelShape) -> None:
    """They have equal contexts: neither the tokens' adapter nor the prefix cache is the other policy's."""
    policies.serve(0, 1)
    for seeds in ((1, 2), (3, 2), (3, 4)):
        if seeds != (1, 2):
            slot = 0 if seeds[0] == 3 and seeds[1] == 2 else 1
            assert policies.serve(slot, seeds[slot]) == 4 * adapter_parameters(LORA, shape)
        else:
            assert policies.serve(1, 2) == 4 * adapter_parameters(LORA, shape)
        done = run(policies.engine, group(0), group(1))
        for slot, other in ((0, 1), (1, 0)):
            completions = done[f"slot{slot}"]
            assert policies.widest(seeds[slot], completions) < 1e-5
            assert policies.widest(seeds[other], completions) > 1e-2
            assert {version for c in completions for version in c.versions} == {seeds[slot]}
    assert policies.engine.stats().max_batch == 16


def check_samples_are_those_of_a_policy_alone(policies: Policies) -> None:
    """Tokens are equal; log-probs to their last bits, because a larger batch may be multiplied in other blocks."""
    policies.serve(0, 1)
    policies.serve(1, 2)
    for samples in (1, 3, 8):
        alone = {slot: run(policies.engine, group(slot, samples))[f"slot{slot}"] for slot in range(SLOTS)}
        mixed = run(policies.engine, group(0, samples), group(1, samples))
        for slot in range(SLOTS):
            again = mixed[f"slot{slot}"]
            assert [c.tokens for c in again] == [c.tokens for c in alone[slot]]
            for ours, theirs in zip(again, alone[slot], strict=True):
                assert ours.logprobs == pytest.approx(theirs.logprobs, abs=2e-6)


@pytest.mark.parametrize("keep", [False, True])
def check_a_sync_of_one_policy_leaves_the_other_alone(policies: Policies, keep: bool) -> None:
    policies.serve(0, 1)
    policies.serve(1, 2)
    policies.engine.add([group(0), group(1)])
    for _ in range(10):
        policies.engine.step()
    policies.serve(0, 3, keep=keep)
    done = finish(policies.engine)
    assert all(completion.versions == [1] * 10 + [3] * 14 for completion in done["slot0"])
    late = policies.widest(3, done["slot0"], since=10)
    assert late > 1e-3 if keep else late < 1e-5
    assert policies.widest(2, done["slot1"]) < 1e-5
    assert {version for c in done["slot1"] for version in c.versions} == {2}


def check_the_adapters_of_another_policy_are_refused(policies: Policies, monkeypatch: pytest.MonkeyPatch) -> None:
    """A planted bug: slot 1's bytes are written into slot 0, too. The next sync of slot 0 compares all of its
    blocks, written or not."""
    policies.serve(0, 1)
    policies.serve(1, 2)
    slots = [policies.engine.params(slot) for slot in range(SLOTS)]
    landing = policies.landings[1]
    put = landing._put

    def misplaced(*arguments: Any) -> None:
        put(*arguments)
        for name, tensor in slots[0].items():
            if ".lora_" in name:
                tensor.copy_(slots[1][in_slot(1, name)])

    with monkeypatch.context() as patched:
        patched.setattr(landing, "_put", misplaced)
        policies.serve(1, 4)
        patched.setattr(policies.landings[0], "_put", lambda *_: None)
        with pytest.raises(WeightsRefused, match=r"expected checksum .*lora_.* in the live parameters"):
            policies.land(0, 1)
    policies.serve(0, 5)
    assert policies.widest(5, run(policies.engine, group(0))["slot0"]) < 1e-5


def check_what_another_policys_trainers_packed_is_refused(policies: Policies) -> None:
    """Planted bugs: a manifest of the other policy, or its packed bytes."""
    from titan_rl.actors.sync.landing import Landing

    policies.serve(0, 1)
    policies.serve(1, 2)
    with pytest.raises(WeightsRefused, match="expected layout"):
        policies.land(1, 4, of=0)
    with pytest.raises(ValueError, match=r"lora_a\.0@1: expected in the live model, which has no such parameter"):
        Landing(policies.engine.params(0), [policies.sources[1]], WeightSyncSection(delta=True))
    policies.serve(1, 5)
    assert policies.widest(5, run(policies.engine, group(1))["slot1"]) < 1e-5


def check_a_policy_without_weights_waits_alone(policies: Policies) -> None:
    policies.serve(0, 1)
    policies.serve(1, 2)
    policies.engine.suspend(1)
    assert policies.widest(1, run(policies.engine, group(0))["slot0"]) < 1e-5
    with pytest.raises(RuntimeError, match="sync weights before sampling"):
        policies.engine.add([group(1)])
    with pytest.raises(ValueError, match="expected a slot below 2, found 2"):
        policies.engine.add([replace(group(0), slot=2)])
    policies.serve(1, 2)
    policies.engine.add([group(1)])
    policies.engine.suspend(1)
    assert not policies.engine.serves
    policies.serve(1, 2)
    policies.engine.suspend(0)  # the frozen weights may be damaged
    assert not policies.engine.serves
