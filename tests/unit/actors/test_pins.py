"""Memory that CUDA has page-locked: exactly the memory of living connections is registered, and it is mapped."""

import asyncio
import inspect
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from support.cudart import NOT_SUPPORTED, REGISTERED, Cudart, as_on_a_gpu
from support.fake_engines import SETTINGS
from titan_rl.actors.sync import transport
from titan_rl.actors.sync.landing import Landing
from titan_rl.actors.sync.staging import Staging
from titan_rl.actors.sync.transport import Memory, Shared
from titan_rl.actors.vllm.generator import Generator
from titan_rl.config.sections import WeightSyncSection
from titan_rl.wire.weight_plan import Copy
from titan_rl.wire.weight_source import Source

COPIES = (Copy("w", 0, 0, 40, 16, "p", 2, 0),)
RECONNECTS = 5


@pytest.fixture
def cudart(monkeypatch: pytest.MonkeyPatch) -> Cudart:
    return as_on_a_gpu(monkeypatch)


def trainer(value: float) -> Staging:
    weights = {"w": torch.full((40, 16), value)}
    return Staging(weights, {0: COPIES}, torch.float32, slice_bytes=1024, block_bytes=256)


def test_respawned_trainers_leave_the_pins_of_the_living_connections(cudart: Cudart) -> None:
    """The generator's own endpoint connects, again and again, to trainers that are gone by then."""
    live = {"p": torch.zeros(44, 16)}
    generator: Any = SimpleNamespace(
        _engine=SimpleNamespace(params=lambda slot: live), _settings=SETTINGS, _rank=0, _landings={}
    )
    connect: Any = inspect.unwrap(cast(Any, Generator.connect)._method)
    staging = trainer(-1)
    for value in range(RECONNECTS):
        del staging
        staging = trainer(value)
        source = Source(0, staging.offer(remote=False)[0], COPIES, "float32", 256)
        asyncio.run(connect(generator, [source], WeightSyncSection()))
        asyncio.run(generator._landings[0].fetch_weights([staging.pack(value, 0, 1)[0]], 30))
        asyncio.run(generator._landings[0].write_weights(30))
        assert live["p"][2:42].unique().tolist() == [value]
        assert len(cudart.held) == 2, "the trainer's memory, and the reader's map of it"
    assert cudart.most == 2, "the reader lets go of the old trainer's memory before it pins the new one's"
    asyncio.run(staging.drop())
    assert len(cudart.held) == 1, "what the trainer drops is not pinned any longer, though the reader still maps it"
    generator._landings.clear()
    assert not cudart.held
    cudart.check()
    assert not cudart.wrong


def test_memory_is_unregistered_before_its_last_view_unmaps_it(cudart: Cudart) -> None:
    memory = Memory([64], pinned=True)
    reader = Shared(memory.offer(0, 64, 0, None), pinned=True)
    view = reader.run(1)
    del reader
    assert len(cudart.held) == 2
    view[0] = 3
    del view
    assert len(cudart.held) == 1
    memory.close()
    memory.close()
    assert not cudart.held
    assert memory.bytes[0] == 0, "still mapped here"
    cudart.check()
    assert not cudart.wrong


def test_a_pin_that_cuda_refuses_is_reported(cudart: Cudart, monkeypatch: pytest.MonkeyPatch) -> None:
    memory = Memory([64], pinned=True)
    (address,) = cudart.held
    cudart.held.clear()
    with pytest.raises(RuntimeError, match=f"expected to unpin the memory at {address:#x}.* error 713"):
        memory.close()
    monkeypatch.setattr(cudart, "cudaHostRegister", lambda *registered: REGISTERED)
    with pytest.raises(RuntimeError, match="expected to pin 12288 bytes for CUDA, found cudaHostRegister error 712"):
        Memory([64], pinned=True)


def test_memory_that_the_driver_does_not_pin_is_used_with_one_warning(
    cudart: Cudart, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cudart, "cudaHostRegister", lambda *registered: NOT_SUPPORTED)
    taken: list[None] = []
    monkeypatch.setattr(transport, "_take_last_error", lambda: taken.append(None))
    live = {"p": torch.zeros(44, 16)}
    with pytest.warns(UserWarning, match="cudaHostRegister error 801 .*ulimit -l.* pageable memory"):
        staging = trainer(3)
    landing = Landing(live, [Source(0, staging.offer(remote=False)[0], COPIES, "float32", 256)])  # warns no more
    assert len(taken) == 2
    asyncio.run(landing.fetch_weights([staging.pack(1, 0, 1)[0]], 30))
    asyncio.run(landing.write_weights(30))
    assert live["p"][2:42].unique().tolist() == [3]
    assert not cudart.held
    asyncio.run(staging.drop())


def test_a_reader_of_the_other_kind_of_device_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    on_cpu = trainer(1)
    with monkeypatch.context() as context:
        as_on_a_gpu(context)
        live, on_gpu = {"p": torch.zeros(44, 16)}, trainer(1)
        source = Source(3, on_cpu.offer(remote=False)[0], COPIES, "float32", 256)
        with pytest.raises(ValueError, match=r"trainer rank 3: expected splitmix checksums.* found xxh3; .*\[hosts\]"):
            Landing(live, [source])
        source = Source(3, on_gpu.offer(remote=False)[0], COPIES, "float32", 256)
        asyncio.run(on_gpu.drop())
    with pytest.raises(ValueError, match=r"trainer rank 3: expected xxh3 checksums, .* found splitmix"):
        Landing(live, [source])
    layouts = {staging.pack(1, 0, 1)[0].layout for staging in (on_cpu,)} | {source.offer.layout}
    assert len(layouts) == 2
