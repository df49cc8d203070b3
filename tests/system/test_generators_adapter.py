"""Real generator meshes whose vLLM applies adapters: tensor parallelism, replicas, a replica that starts late."""

import asyncio
import os
import signal
from collections.abc import Iterator
from typing import Any

import pytest

from support.engine_runs import gap
from support.generator_meshes import Running, begun, connected, requests, started, versions
from support.lora_weights import adapters, merged
from support.tiny import tiny_llama
from titan_rl.actors.vllm.vllm_params import pieces
from titan_rl.config.sections import FaultSection, LoraSection
from titan_rl.ext.adapters.layers import adapter_parameters
from titan_rl.meshes import deaths
from titan_rl.meshes.replica import GeneratorPolicy
from titan_rl.record.incidents import Incidents
from titan_rl.wire.types import Completion, Sampling

LAYOUTS = {"replicas2": (2, 1), "tp2": (1, 2)}
LORA = LoraSection(rank=8, alpha=12, sync="adapter", targets=["q", "o", "gate", "up", "down"])


@pytest.fixture(scope="module")
def model() -> Any:
    return tiny_llama(max_position_embeddings=256)


@pytest.fixture
def incidents(tmp_path: Any) -> Incidents:
    return Incidents(tmp_path, FaultSection(hang_seconds=8.0), print)


@pytest.fixture(params=LAYOUTS)
def running(request: pytest.FixtureRequest, model: Any, incidents: Incidents, tmp_path: Any) -> Iterator[Running]:
    replicas, tp = LAYOUTS[request.param]
    policy = GeneratorPolicy(hang_seconds=8.0, incidents=incidents)
    folder = tmp_path / "model"
    with started(model, folder, replicas=replicas, tp=tp, longest=256, policy=policy, lora=LORA) as running:
        yield running


def widest(model: Any, asked: Any, done: list[list[Completion]], since: int = 0) -> float:
    pairs = [(r.tokens, completion) for r, found in zip(asked, done, strict=True) for completion in found]
    return max(max(gap(model, completion, context=list(tokens))[since:]) for tokens, completion in pairs)


def test_a_mesh_serves_the_merged_model_for_the_bytes_of_the_adapters(
    running: Running, model: Any, incidents: Incidents
) -> None:
    replicas, tp = len(running.mesh.replicas), len(running.pids) // len(running.mesh.replicas)
    wanted = [pieces(running.shape, tp=tp, rank=rank, lora=LORA) for rank in range(tp)]
    expected = 4 * replicas * sum(p.rows * p.cols for pieces in wanted for p in pieces if "lora_" in p.param)
    if tp == 1:
        assert expected == 4 * replicas * adapter_parameters(LORA, running.shape)

    async def work() -> None:
        trainer, weights = await connected(running, model)
        models = {}

        async def sync(version: int) -> int:
            trainer.adapters = adapters(model, running.shape, LORA, version)
            models[version] = merged(model, trainer.adapters, LORA)
            return (await weights.sync(version)).bytes

        async def sample(length: int = 24) -> tuple[Any, list[list[Completion]]]:
            asked = requests(4, Sampling(length))
            return asked, await asyncio.gather(*map(running.mesh.generate, asked))

        whole = await sync(1)
        assert whole > 2 * expected
        assert widest(models[1], *(await sample())) < 1e-5
        for version in (2, 3):
            assert await sync(version) == expected
            assert widest(models[version], *(await sample())) < 1e-5
            assert widest(models[version - 1], *(await sample())) > 1e-2
        sampling = asyncio.create_task(sample(150))
        await begun(running.mesh)
        await sync(4)
        asked, done = await sampling
        assert versions(done) == [{3, 4}] * len(versions(done))
        last = max(c.versions.count(3) for found in done for c in found)
        assert widest(models[4], asked, done, since=last) < 1e-5

        lost = running.mesh.replicas[0].ranks[-1]
        os.kill(deaths.alive()[lost], signal.SIGKILL)
        while not incidents.all or any(not incident.outcome for incident in incidents.all):
            await asyncio.sleep(0.05)
        assert [incident.outcome for incident in incidents.all] == ["back"]
        assert widest(models[4], *(await sample())) < 1e-5, "the new replica has frozen weights and adapters"
        sums = await running.mesh.fingerprint()
        assert tp > 1 or sums[0] == sums[1]
        assert await sync(5) == expected
        assert widest(models[5], *(await sample())) < 1e-5

    running(work())
