"""Memory in which the readers of a host keep what one of them has read from other hosts."""

import asyncio
import os
import signal
import subprocess
import sys
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from support.cudart import as_on_a_gpu
from titan_rl.ext.remote_weights.ranks import remote_run
from titan_rl.ext.remote_weights.ranks.host_memory import EMPTY, HostMemory
from titan_rl.ext.remote_weights.ranks.remote_run import RemoteRun
from titan_rl.ext.remote_weights.registered import Registered
from titan_rl.wire.manifest import Manifest
from titan_rl.wire.weight_source import HostCopy

RUNS = [(5000, 3), (64, 1)]  # bytes and slices

SIBLING = """
import asyncio, sys
from titan_rl.ext.remote_weights.ranks.host_memory import HostMemory
from titan_rl.wire.weight_source import HostCopy

async def hold():
    memory = HostMemory([(5000, 3), (64, 1)], 7, [eval(sys.argv[1])] if sys.argv[1] else [])
    async with memory.writing("sibling", 30):
        memory.runs[0].keys[1] = 9
        memory.runs[0].octets[0] = 3
        print(repr(memory.copy), flush=True)
        await asyncio.sleep(3600)

asyncio.run(hold())
"""


def held_by_sibling(copy: HostCopy | None = None) -> "subprocess.Popen[str]":
    command = [sys.executable, "-c", SIBLING, repr(copy) if copy else ""]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)


def test_readers_of_a_host_map_one_memory_and_a_dead_one_is_passed_over() -> None:
    made = HostMemory(RUNS, 7)
    gone = replace(made.copy, fd=9999)
    reused = replace(made.copy, inode=made.copy.inode + 1)
    elsewhere = replace(made.copy, place="another host")
    mapped = HostMemory(RUNS, 7, [elsewhere, gone, reused, made.copy])
    assert mapped.copy.memory == made.copy.memory
    assert mapped.copy.fd != made.copy.fd
    made.runs[1].octets[:] = 5
    made.runs[0].keys[2] = 2**64 - 1
    copy = mapped.copy
    del made
    assert mapped.runs[1].octets.tolist() == [5] * 64
    assert mapped.runs[0].keys.tolist() == [EMPTY, EMPTY, 2**64 - 1]
    assert HostMemory(RUNS, 7, [copy]).runs[1].octets[9] == 5, "it outlives the reader that made it"
    assert HostMemory(RUNS, 7, [gone, elsewhere]).runs[1].octets[9] == 0
    with pytest.raises(RuntimeError, match="expected runs 0000000000000008 in the memory of this host's readers"):
        HostMemory(RUNS, 8, [copy])
    with pytest.raises(RuntimeError, match=r"expected 8192 bytes of weights .*, found 16384"):
        HostMemory(RUNS[1:], 7, [copy])


def test_the_lock_of_a_killed_reader_goes_to_the_next_one() -> None:
    async def takes_over(memory: HostMemory) -> int:
        async with memory.writing("generator1[tp=0]", 30):
            return int(memory.runs[0].octets[0])

    memory = HostMemory(RUNS, 7)
    with held_by_sibling(memory.copy) as sibling:
        assert sibling.stdout
        assert f"inode={memory.copy.inode}" in sibling.stdout.readline()
        late = rf"generator1\[tp=0\]: expected its turn to read within 0\.05 s, found process {sibling.pid} still"
        with pytest.raises(TimeoutError, match=late):
            asyncio.run(memory.writing("generator1[tp=0]", 0.05).__aenter__())
        os.kill(sibling.pid, signal.SIGKILL)
    assert asyncio.run(takes_over(memory)) == 3
    assert memory.runs[0].keys[1] == 9


async def test_a_reader_keeps_the_lock_after_a_failed_read_until_it_lets_go_of_the_memory() -> None:
    first = HostMemory(RUNS, 7)
    second = HostMemory(RUNS, 7, [first.copy])
    with pytest.raises(ConnectionError):
        async with first.writing("first", 30):
            raise ConnectionError
    with pytest.raises(TimeoutError):
        await second.writing("second", 0.02).__aenter__()
    async with first.writing("first", 30):
        pass
    with pytest.raises(ConnectionError):
        async with first.writing("first", 30):
            raise ConnectionError
    waiting: Any = asyncio.create_task(second.writing("second", 30).__aenter__())
    await asyncio.sleep(0)
    del first
    assert 0 < await waiting <= 30


async def test_a_reader_that_is_connected_anew_does_not_wait_on() -> None:
    first = HostMemory(RUNS, 7)
    second = HostMemory(RUNS, 7, [first.copy])
    async with first.writing("first", 30):
        waiting: Any = asyncio.create_task(second.writing("second", 3600).__aenter__())
        await asyncio.sleep(0)
        second.leave()
        with pytest.raises(RuntimeError, match="second has been connected to other trainers"):
            await asyncio.wait_for(waiting, 30)


async def test_two_reads_of_one_process_take_turns() -> None:
    memory = HostMemory(RUNS, 7)
    async with memory.writing("first", 30):
        with pytest.raises(TimeoutError):
            await memory.writing("first", 0.02).__aenter__()


def test_every_reader_on_a_gpu_pins_the_memory_and_lets_go_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    cudart = as_on_a_gpu(monkeypatch)
    made = HostMemory(RUNS, 7, pinned=True)
    mapped = HostMemory(RUNS, 7, [made.copy], pinned=True)
    assert len(cudart.held) == 2
    run = mapped.runs[0]
    del made, mapped
    assert len(cudart.held) == 1
    del run
    assert not cudart.held
    cudart.check()
    assert not cudart.wrong


class Slice:
    """A registered part of a trainer's slot; `reads` counts."""

    backend = "tcp"

    def __init__(self, memory: torch.Tensor) -> None:
        self.memory, self.reads = memory, 0

    def size(self) -> int:
        return len(self.memory)


class Read:
    def __init__(self, parts: list[tuple[Slice, torch.Tensor]]) -> None:
        self.parts = parts

    async def submit(self, timeout: int) -> None:
        for source, target in self.parts:
            source.reads += 1
            target.copy_(source.memory)


BLOCKS = [(0, 30), (30, 60), (60, 64), (64, 100), (100, 160)]
CUTS = [40, 40, 40, 40]  # slices: some blocks are in two


class FakeTrainer:
    """Two slots of 160 bytes."""

    def __init__(self) -> None:
        self.weights = torch.zeros(160, dtype=torch.uint8)
        self.slots = [torch.zeros(160, dtype=torch.uint8) for _ in range(2)]
        self.stamps = torch.zeros(2, dtype=torch.int64)
        self.slices = [[Slice(part) for part in slot.split(CUTS)] for slot in self.slots]
        stamps: Any = Slice(self.stamps.view(torch.uint8))
        self.registered = Registered(stamps, tuple(self.slices))  # type: ignore[arg-type]
        self.serial = 0

    def publish(self) -> Manifest:
        self.serial += 1
        slot = self.serial % 2
        self.slots[slot].copy_(self.weights)
        self.stamps[slot] = self.serial
        sums = tuple(hash(tuple(self.weights[a:b].tolist())) % 2**64 for a, b in BLOCKS)
        for part in self.slices[slot]:
            part.reads = 0
        return Manifest.of(self.serial, self.serial, slot, 1, sums)


def fetch(remote: RemoteRun, manifest: Manifest, blocks: list[int], **again: bool) -> None:
    asyncio.run(remote.fetch_blocks(manifest, blocks, 1, **again))


@given(
    delta=st.booleans(),
    wants=st.lists(
        st.tuples(
            st.lists(st.integers(0, 159), max_size=3),  # bytes that change before it is published
            st.lists(st.tuples(st.integers(0, 2), st.sets(st.integers(0, 4))), max_size=5),  # readers, blocks
        ),
        min_size=1,
        max_size=4,
    ),
)
def test_a_slice_is_read_once_for_all_readers(
    delta: bool, wants: list[tuple[list[int], list[tuple[int, set[int]]]]]
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(remote_run, "reads", Read)
        trainer, made = FakeTrainer(), HostMemory([(160, 4)], 7)
        memories = [made, *(HostMemory([(160, 4)], 7, [made.copy]) for _ in range(2))]
        readers = [RemoteRun(trainer.registered, memory.runs[0], BLOCKS, delta=delta) for memory in memories]
        for changed, asked in wants:
            for i in changed:
                trainer.weights[i] += 1
            manifest = trainer.publish()
            for reader, blocks in asked:
                fetch(readers[reader], manifest, sorted(blocks))
                for block in blocks:
                    start, end = BLOCKS[block]
                    assert torch.equal(readers[reader].run(manifest.slot)[start:end], trainer.weights[start:end])
                if blocks:
                    assert readers[reader].stamp(manifest.slot) == manifest.serial
            assert max(part.reads for part in trainer.slices[manifest.slot]) <= 1
        assert sum(r.received for r in readers) <= 160 * len(wants)


def test_what_another_publication_brought_is_not_fetched_again_under_delta(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote_run, "reads", Read)
    for delta in (True, False):
        trainer, made = FakeTrainer(), HostMemory([(160, 4)], 7)
        mapped = HostMemory([(160, 4)], 7, [made.copy])
        old, new = (RemoteRun(trainer.registered, memory.runs[0], BLOCKS, delta=delta) for memory in (made, mapped))
        fetch(old, trainer.publish(), [0, 1, 2, 3, 4])
        trainer.weights[70] += 1  # block 3, in slices 1 and 2
        manifest = trainer.publish()
        fetch(old, manifest, [3])
        fetch(new, manifest, [3, 4] if delta else [3])
        assert [old.received, new.received] == [160 + 80, 0]
        assert old.stamp(0) == new.stamp(0) == manifest.serial


def test_a_slot_with_another_publication_is_told_and_leaves_nothing_to_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote_run, "reads", Read)
    trainer, made = FakeTrainer(), HostMemory([(160, 4)], 7)
    first, second = (
        RemoteRun(trainer.registered, memory.runs[0], BLOCKS, delta=False)
        for memory in (made, HostMemory([(160, 4)], 7, [made.copy]))
    )
    manifest = trainer.publish()
    fetch(first, manifest, [0])
    trainer.stamps[manifest.slot] = 3
    fetch(first, manifest, [0, 4])
    assert first.stamp(manifest.slot) == 3
    assert second.stamp(manifest.slot) == manifest.serial, "the stamp matches the bytes"
    fetch(second, manifest, [4])
    assert second.stamp(manifest.slot) == 3
    trainer.stamps[manifest.slot] = manifest.serial
    fetch(second, manifest, [0, 4])
    assert second.stamp(manifest.slot) == manifest.serial
    made.runs[0].octets[5] += 1
    fetch(second, manifest, [0])
    assert made.runs[0].octets[5] == 1
    fetch(second, manifest, [0], again=True)
    assert np.array_equal(made.runs[0].octets, trainer.weights)
