"""A real vLLM in bfloat16 follows one small update of the adapters that it applies.

As in test_engine.py, one test runs this file's check_* functions in a separate pytest process.
"""

import asyncio
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from support.engine_runs import run, run_checks
from support.lora_weights import adapters, merged, shards
from support.tiny import tiny_llama
from titan_rl.actors.vllm.engine import Engine, EngineSettings
from titan_rl.config.sections import LoraSection, WeightSyncSection
from titan_rl.ext.adapters.ranks.vllm_adapter import SlotAdapters
from titan_rl.wire.model_shape import ModelShape
from titan_rl.wire.types import Request, Sampling
from titan_rl.wire.weight_plan import LORA_B, plan
from titan_rl.wire.weight_source import Source

LORA = LoraSection(rank=8, alpha=16, sync="adapter")
RATE = 1e-3
CONTEXTS = [[(7 * i + j * j) % 60 + 3 for j in range(100)] for i in range(8)]


def test_an_update_in_16_bits_in_a_process_of_its_own() -> None:
    run_checks(__file__)


@pytest.fixture(scope="module")
def model() -> Any:
    """Its weights are numbers of bfloat16, in float32."""
    import torch

    model = tiny_llama(max_position_embeddings=128)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(parameter.bfloat16())
    return model


def scores(engine: Engine, name: str) -> Any:
    """Return the engine's log-probs of the contexts' tokens."""
    import torch

    requests = [
        Request(f"{name} {i}", context, [0], Sampling(1, scores_context=True)) for i, context in enumerate(CONTEXTS)
    ]
    done = run(engine, *requests)
    return torch.tensor([[score.logprob for score in done[request.id][0].context] for request in requests])


def expected(model: Any) -> Any:
    import torch

    ids = torch.tensor(CONTEXTS)
    with torch.no_grad():
        logprobs = model(ids).logits.log_softmax(-1)
    return logprobs[:, :-1].gather(2, ids[:, 1:, None])[..., 0]


def share(found: Any, wanted: Any) -> float:
    """Return how much of a change another one follows: its projection."""
    return float((found * wanted).sum() / (wanted * wanted).sum())


def check_the_change_of_one_step_arrives(folder: Path, model: Any, shape: ModelShape) -> None:
    import torch
    from safetensors.torch import load_file

    from titan_rl.actors.sync.landing import Landing
    from titan_rl.actors.sync.staging import Staging
    from titan_rl.ext.adapters.ranks.merged import applied

    room: dict[str, Any] = {"max_model_len": 128, "max_num_seqs": 8, "kv_cache_memory_mb": 32, "dtype": "bfloat16"}
    engine = Engine(EngineSettings(model_dir=str(folder), shape=shape, adapters=SlotAdapters(LORA, shape), **room))
    own = adapters(model, shape, LORA, 1)
    for name, tensor in own.items():
        if name.endswith(LORA_B):
            tensor.zero_()
    held = load_file(folder / "model.safetensors") | own
    copies = plan([shards(held)], [engine.layout.with_adapters(shape, LORA).pieces]).outgoing(0)[0]
    staging = Staging(held, {0: copies}, torch.bfloat16, block_bytes=1 << 10, view=partial(applied, scale=LORA.scale))
    source = Source(0, staging.offer(remote=False)[0], copies, "bfloat16", 1 << 10)
    landing = Landing(engine.params(), [source], WeightSyncSection())

    def serve(version: int) -> Any:
        manifest = staging.pack(version, version % 2, version)[0]

        async def work() -> None:
            await landing.fetch_weights([manifest], 30)
            await landing.write_weights(30)

        engine.suspend()
        asyncio.run(work())
        engine.set_version(version)
        return scores(engine, f"version {version}")

    before = serve(1)
    generator = torch.Generator().manual_seed(0)
    for name, tensor in own.items():
        if name.endswith(LORA_B):  # Adam's first step
            tensor.copy_(RATE * torch.randn(tensor.shape, generator=generator).sign())
    wanted = expected(merged(model, own, LORA)) - expected(model)
    arrived = share(serve(2) - before, wanted)
    assert 0.95 < arrived < 1.05, arrived
