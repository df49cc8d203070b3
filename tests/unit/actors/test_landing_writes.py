"""How a fetched publication is written: in few copies, which a GPU has made before the slot may be packed again."""

import asyncio
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from support.cudart import Cudart, as_on_a_gpu
from support.shapes import LLAMA_8B
from support.weight_layouts import layout as layout_of
from titan_rl.actors.sync.landing import WRITE_BYTES, Landing
from titan_rl.actors.sync.staging import Staging
from titan_rl.actors.sync.transport import Memory
from titan_rl.actors.vllm.vllm_params import param_shapes, pieces
from titan_rl.config.sections import WeightSyncSection
from titan_rl.wire.errors import WeightsRefused
from titan_rl.wire.manifest import Manifest, blocks, layout
from titan_rl.wire.weight_plan import Copy, plan
from titan_rl.wire.weight_source import Source

COPIES = (
    Copy("w", 0, 0, 12, 8, "p", 12, 0),
    Copy("w", 12, 0, 12, 8, "p", 0, 0),
    Copy("v", 0, 0, 24, 5, "p", 24, 2),
)
BLOCK = 128


class Writes(TorchFunctionMode):
    """Records each copy_, with the value of `seen` at that time."""

    def __init__(self, fails_at: int = -1) -> None:
        super().__init__()
        self.notes: list[str] = []
        self.sizes: list[int] = []
        self.fails_at = fails_at

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is Tensor.copy_:
            self.notes.append("copy without waiting" if (kwargs or {}).get("non_blocking") else "copy")
            self.sizes.append(args[0].nbytes)
            if len(self.sizes) == self.fails_at:
                raise RuntimeError("out of memory")
        return func(*args, **(kwargs or {}))


def pair(**sync: Any) -> tuple[dict[str, Tensor], dict[str, Tensor], Staging, Landing]:
    weights = {"w": torch.randn(24, 8), "v": torch.randn(24, 5)}
    live = {"p": torch.zeros(48, 8)}
    staging = Staging(weights, {0: COPIES}, torch.float32, slice_bytes=1024, block_bytes=BLOCK)
    source = Source(0, staging.offer(remote=False)[0], COPIES, "float32", BLOCK)
    return weights, live, staging, Landing(live, [source], WeightSyncSection(**sync))


def written(landing: Landing, manifest: Manifest, notes: Writes) -> list[str]:
    """Return what writing a publication did, in order."""
    stamp: Callable[[int], int] = landing._runs[0].transport.stamp

    def noted(slot: int) -> int:
        notes.notes.append("stamp")
        return stamp(slot)

    async def work() -> None:
        await landing.fetch_weights([manifest], 30)
        landing._runs[0].transport.stamp = noted
        with notes:
            await landing.write_weights(30)

    try:
        asyncio.run(work())
    finally:
        landing._runs[0].transport.stamp = stamp
    return notes.notes


@pytest.fixture
def cudart(monkeypatch: pytest.MonkeyPatch) -> Cudart:
    return as_on_a_gpu(monkeypatch)


def synchronizing(notes: Writes, monkeypatch: pytest.MonkeyPatch) -> Writes:
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: notes.notes.append("synchronize"))
    return notes


def test_whole_copies_are_written_and_waited_for_before_the_stamps_are_read(
    cudart: Cudart, monkeypatch: pytest.MonkeyPatch
) -> None:
    weights, live, staging, landing = pair(verify="off", delta=True)
    first = written(landing, staging.pack(1, 0, 1)[0], synchronizing(Writes(), monkeypatch))
    assert first == ["copy without waiting"] * len(COPIES) + ["synchronize", "stamp"]
    assert torch.equal(live["p"][24:, 2:7], weights["v"])
    weights["v"][5, 0] += 1
    second = written(landing, staging.pack(2, 1, 2)[0], synchronizing(Writes(), monkeypatch))
    assert second == ["copy without waiting", "synchronize", "stamp"], "one block's"
    assert torch.equal(live["p"][24:, 2:7], weights["v"])
    assert torch.equal(live["p"][:24], weights["w"].roll(12, 0))


def test_a_write_that_fails_leaves_no_copy_that_still_reads_the_slot(
    cudart: Cudart, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, _, staging, landing = pair()
    manifest = staging.pack(1, 0, 1)[0]
    notes = synchronizing(Writes(fails_at=2), monkeypatch)
    with pytest.raises(RuntimeError, match="out of memory"):
        written(landing, manifest, notes)
    assert notes.notes == ["copy without waiting"] * 2 + ["synchronize"]


def test_on_a_cpu_a_write_has_ended_when_it_returns() -> None:
    weights, live, staging, landing = pair(verify="off")
    assert written(landing, staging.pack(1, 0, 1)[0], Writes()) == ["copy"] * len(COPIES) + ["stamp"]
    assert torch.equal(live["p"][24:, 2:7], weights["v"])


def test_a_wrong_block_alone_is_written_again(monkeypatch: pytest.MonkeyPatch) -> None:
    _, live, staging, landing = pair(verify="live")
    notes, manifest = Writes(), staging.pack(1, 0, 1)[0]
    wrong, put = iter([True]), landing._put

    def badly(*arguments: Any) -> None:
        put(*arguments)
        if next(wrong, False):
            live["p"][30, 3] += 1

    monkeypatch.setattr(landing, "_put", badly)
    assert written(landing, manifest, notes) == ["copy"] * len(COPIES) + ["stamp", "stamp", "copy", "stamp"]
    assert notes.sizes[-1] <= BLOCK
    monkeypatch.setattr(landing, "_put", lambda *arguments: (put(*arguments), live["p"][30, 3].add_(1)))
    with pytest.raises(WeightsRefused, match=r"block .* in the live parameters"):
        written(landing, staging.pack(2, 1, 2)[0], Writes())


def test_an_8b_model_is_written_in_a_tenth_of_its_blocks(cudart: Cudart) -> None:
    """The parameters are on the meta device, and of the trainer's memory no page is touched."""
    copies = plan(layout_of(LLAMA_8B, fsdp=4), [pieces(LLAMA_8B, tp=1, rank=0)]).incoming(0)[0]
    nbytes = 2 * sum(copy.elements for copy in copies)
    memory, digest = Memory([nbytes], pinned=False), layout(copies, "bfloat16", 1 << 20, "splitmix")
    live = {
        name: torch.empty(size, dtype=torch.bfloat16, device="meta") for name, size in param_shapes(LLAMA_8B, 1).items()
    }
    source = Source(0, memory.offer(0, nbytes, digest, None, "splitmix"), copies, "bfloat16", 1 << 20)
    landing, count = Landing(live, [source], WeightSyncSection(verify="off")), len(blocks(copies, 1 << 19))
    memory.stamps[0] = 1
    notes = Writes()
    written(landing, Manifest.of(1, 1, 0, digest, ()), notes)
    assert sum(notes.sizes) == nbytes
    assert max(notes.sizes) <= WRITE_BYTES
    assert len(notes.sizes) < count / 10
