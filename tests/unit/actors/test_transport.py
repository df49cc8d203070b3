"""Weights over shared memory: refusals, repairs, delta transfers, and an end that leaves nothing behind."""

import asyncio
import mmap
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from support.cudart import as_on_a_gpu
from titan_rl.actors.sync.landing import Landing
from titan_rl.actors.sync.staging import Staging
from titan_rl.config.sections import WeightSyncSection
from titan_rl.wire import failpoints
from titan_rl.wire.errors import WeightsRefused
from titan_rl.wire.manifest import Manifest, blocks, layout
from titan_rl.wire.weight_plan import Copy
from titan_rl.wire.weight_source import Source

DEVICE = {"of": "cpu"}
ROWS, COLS, BLOCK = 40, 16, 256  # blocks of four rows
COPIES = (Copy("w", 0, 0, ROWS, COLS, "p", 2, 0), Copy("norm", 0, 0, COLS, 1, "norm", 0, 0))


class Pair:
    """One trainer rank and one reader, in this process."""

    def __init__(self, **sync: Any) -> None:
        with torch.device(DEVICE["of"]):
            self.weights = {"w": torch.randn(ROWS, COLS), "norm": torch.randn(COLS)}
            self.live = {"p": torch.zeros(ROWS + 4, COLS), "norm": torch.zeros(COLS)}
        self.staging = Staging(self.weights, {0: COPIES}, torch.float32, slice_bytes=1024, block_bytes=BLOCK)
        self.landing = Landing(self.live, [self.source], WeightSyncSection(**sync), "generator0[tp=0]")
        self.serial = 0

    @property
    def source(self) -> Source:
        return Source(3, self.staging.offer(remote=False)[0], COPIES, "float32", BLOCK)

    def publish(self, version: int, slot: int) -> Manifest:
        self.serial += 1
        return self.staging.pack(version, slot, self.serial)[0]

    def pull(self, manifest: Manifest) -> int:
        """Return the bytes that were fetched."""

        async def work() -> int:
            read = await self.landing.fetch_weights([manifest], timeout=30)
            await self.landing.write_weights(timeout=30)
            return read.bytes

        return asyncio.run(work())

    def holds(self, weights: dict[str, Tensor]) -> bool:
        pads = self.live["p"][:2].abs().sum() + self.live["p"][ROWS + 2 :].abs().sum()
        same = torch.equal(self.live["p"][2 : ROWS + 2], weights["w"]) and torch.equal(
            self.live["norm"], weights["norm"]
        )
        return same and not bool(pads)


@pytest.fixture(params=["xxh3", "splitmix", pytest.param("cuda", marks=pytest.mark.gpu)])
def kind(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Which checksums: a host's, a GPU's computed on the host, or a GPU's."""
    if request.param == "splitmix":
        as_on_a_gpu(monkeypatch)
    monkeypatch.setitem(DEVICE, "of", "cuda" if request.param == "cuda" else "cpu")


@contextmanager
def bytes_of(source: Source, slot: int) -> Iterator[memoryview]:
    """Open a run in the trainer's memory for writing, as any process of the user may."""
    offer = source.offer
    fd = os.open(f"/proc/{offer.pid}/fd/{offer.fd}", os.O_RDWR)
    with mmap.mmap(fd, offer.size) as memory, memoryview(memory) as whole:
        os.close(fd)
        with whole[offer.starts[slot] : offer.starts[slot] + offer.nbytes] as run:
            yield run


@pytest.mark.usefixtures("kind")
@pytest.mark.parametrize("verify", ["transfer", "live"])
def test_a_corrupted_byte_in_a_slot_is_refused_by_name(verify: str) -> None:
    pair = Pair(verify=verify)
    pair.pull(pair.publish(6, slot=0))
    before = {name: w.clone() for name, w in pair.weights.items()}
    pair.weights["w"] += 1
    manifest = pair.publish(7, slot=1)
    with bytes_of(pair.source, slot=1) as run:
        run[2 * BLOCK + 5] ^= 1
    with pytest.raises(WeightsRefused) as refused:
        pair.pull(manifest)
    where = {"transfer": "as transferred", "live": "in the live parameters"}[verify]
    for part in ("trainer rank 3 -> generator0[tp=0], version 7", "block 2 (bytes 512 to 767 of its run: p)", where):
        assert part in str(refused.value)
    assert pair.holds(before) == (verify == "transfer"), "nothing is written of what did not arrive whole"
    pair.pull(pair.publish(8, slot=0))
    assert pair.holds(pair.weights)


@pytest.mark.usefixtures("kind")
def test_without_verification_a_corrupted_byte_goes_unnoticed() -> None:
    pair = Pair(verify="off")
    manifest = pair.publish(1, slot=0)
    with bytes_of(pair.source, slot=0) as run:
        run[5] ^= 1
    pair.pull(manifest)
    assert not pair.holds(pair.weights)


@pytest.mark.usefixtures("kind")
@pytest.mark.parametrize("verify", ["transfer", "live"])
def test_a_passing_corruption_is_healed_by_the_second_attempt(verify: str, monkeypatch: pytest.MonkeyPatch) -> None:
    pair = Pair(verify=verify)
    manifest = pair.publish(1, slot=0)
    looked: list[int] = []
    verb = {"transfer": "_damaged", "live": "_strange"}[verify]
    look = getattr(pair.landing, verb)

    def late(*arguments: Any) -> Any:
        """Repair the byte between the first check and the second."""
        found = look(*arguments)
        with bytes_of(pair.source, slot=0) as run:
            run[5] ^= not looked
        looked.append(sum(map(len, found)))
        return found

    monkeypatch.setattr(pair.landing, verb, late)
    with bytes_of(pair.source, slot=0) as run:
        run[5] ^= 1
    pair.pull(manifest)
    assert looked == [1, 0]
    assert pair.holds(pair.weights)


@pytest.mark.usefixtures("kind")
def test_what_the_live_parameters_hold_is_compared_and_not_what_was_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    pair = Pair(verify="live")
    put = pair.landing._put

    def badly(*arguments: Any) -> None:
        put(*arguments)
        pair.live["p"][10, 3] += 1

    monkeypatch.setattr(pair.landing, "_put", badly)
    with pytest.raises(WeightsRefused, match=r"block 2 .* in the live parameters"):
        pair.pull(pair.publish(1, slot=0))


@pytest.mark.usefixtures("kind")
def test_a_write_that_goes_wrong_once_is_healed_and_one_that_always_does_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pair, hits = Pair(verify="live"), iter([True])
    monkeypatch.setattr(failpoints, "hit", lambda point: next(hits, False))
    pair.pull(pair.publish(1, slot=0))
    assert pair.holds(pair.weights)
    monkeypatch.setattr(failpoints, "hit", lambda point: True)
    with pytest.raises(WeightsRefused, match=r"in the live parameters, .*; 11 blocks are wrong"):
        pair.pull(pair.publish(2, slot=1))


@pytest.mark.usefixtures("kind")
def test_a_slot_that_holds_another_version_by_now_is_refused_by_name() -> None:
    pair = Pair(verify="off")
    first = pair.publish(4, slot=0)
    pair.publish(5, slot=1)
    pair.publish(6, slot=0)
    with pytest.raises(WeightsRefused, match="version 4: expected publication 1 in slot 0, found 3"):
        pair.pull(first)


@pytest.mark.usefixtures("kind")
def test_a_slot_that_is_packed_between_read_and_write_is_refused() -> None:
    pair = Pair(verify="off")
    manifest = pair.publish(4, slot=0)

    async def work() -> None:
        await pair.landing.fetch_weights([manifest], timeout=30)
        pair.publish(6, slot=0)
        await pair.landing.write_weights(timeout=30)

    with pytest.raises(WeightsRefused, match="expected publication 1 in slot 0, found 2"):
        asyncio.run(work())


@pytest.mark.usefixtures("kind")
def test_a_manifest_of_another_layout_or_with_damage_is_refused() -> None:
    pair = Pair()
    good = pair.publish(1, slot=0)
    other = Manifest.of(1, 1, 0, layout(COPIES, "bfloat16", BLOCK), good.checksums)
    with pytest.raises(WeightsRefused, match="trainer rank 3, version 1: expected layout"):
        pair.pull(other)
    with pytest.raises(WeightsRefused, match="expected a manifest with digest"):
        pair.pull(replace(good, version=2))
    with pytest.raises(WeightsRefused, match="expected checksums of 11 blocks, found 0"):
        pair.pull(Manifest.of(1, 1, 0, good.layout, ()))
    with pytest.raises(WeightsRefused, match="expected manifests of 1 runs, found 0"):
        asyncio.run(pair.landing.fetch_weights([], timeout=30))


@pytest.mark.usefixtures("kind")
@pytest.mark.parametrize("verify", ["off", "transfer", "live"])
def test_only_changed_blocks_are_transferred_even_after_missed_versions(verify: str) -> None:
    pair = Pair(verify=verify, delta=True)
    everything = 4 * (ROWS * COLS + COLS)
    assert pair.pull(pair.publish(0, slot=0)) == everything
    assert pair.pull(pair.publish(1, slot=1)) == 0
    pair.weights["w"][5, 2] += 1
    assert pair.pull(pair.publish(2, slot=0)) == BLOCK
    pair.weights["w"][30, 2] += 1
    pair.publish(3, slot=1)  # missed
    pair.weights["norm"] += 1
    assert pair.pull(pair.publish(4, slot=0)) == BLOCK + 4 * COLS
    assert pair.holds(pair.weights)
    pair.weights["w"] += 1
    assert pair.pull(pair.publish(5, slot=1)) == everything
    assert pair.holds(pair.weights)


@pytest.mark.usefixtures("kind")
def test_after_refused_weights_everything_is_transferred_again() -> None:
    pair = Pair(delta=True)
    pair.pull(pair.publish(0, slot=0))
    pair.weights["w"][5, 2] += 1
    manifest = pair.publish(1, slot=1)
    with bytes_of(pair.source, slot=1) as run:
        run[BLOCK + 5] ^= 1
    with pytest.raises(WeightsRefused):
        pair.pull(manifest)
    assert pair.pull(pair.publish(2, slot=0)) == 4 * (ROWS * COLS + COLS)
    assert pair.holds(pair.weights)


@pytest.mark.parametrize("verify", ["off", "transfer", "live"])
def test_after_a_sleep_that_empties_the_parameters_everything_is_transferred_again(verify: str) -> None:
    pair = Pair(verify=verify, delta=True)
    everything = pair.pull(pair.publish(0, slot=0))
    asyncio.run(pair.landing.fetch_weights([pair.publish(1, slot=1)], timeout=30))  # nothing, as nothing changed
    for parameter in pair.live.values():
        parameter.zero_()
    pair.landing.forget()
    with pytest.raises(RuntimeError, match="expected a completed fetch_weights"):
        asyncio.run(pair.landing.write_weights(timeout=30))
    assert pair.pull(pair.publish(2, slot=0)) == everything
    assert pair.holds(pair.weights)


@pytest.mark.usefixtures("kind")
def test_live_parameters_that_somebody_else_changed_are_put_right_under_delta() -> None:
    pair = Pair(delta=True)
    pair.pull(pair.publish(0, slot=0))
    pair.live["p"][20] = 0
    pair.pull(pair.publish(1, slot=1))
    assert pair.holds(pair.weights)


def test_a_layout_on_the_host_has_the_digest_that_it_always_had() -> None:
    copies = (Copy("w", 0, 0, 40, 16, "p", 2, 0),)
    assert layout(copies, "float32", 256) == layout(copies, "float32", 256, "xxh3") == 0xD5A8491F27E2ED45
    assert layout(copies, "float32", 256, "splitmix") != layout(copies, "float32", 256)


@given(
    st.lists(st.tuples(st.integers(1, 40), st.integers(1, 7)), max_size=5),
    st.integers(1, 60),
)
def test_blocks_are_whole_rows_in_the_order_of_the_run(sizes: list[tuple[int, int]], most: int) -> None:
    copies = [Copy(f"w{i}", 3, 0, rows, cols, "p", 7, 0) for i, (rows, cols) in enumerate(sizes)]

    def elements(copy: Copy) -> list[tuple[str, int, int, int]]:
        return [
            (
                copy.name,
                copy.src_row0 + r,
                copy.dst_row0 + r,
                c,
            )
            for r in range(copy.rows)
            for c in range(copy.cols)
        ]

    cut = blocks(copies, most)
    assert [e for block in cut for copy in block.copies for e in elements(copy)] == [
        e for c in copies for e in elements(c)
    ]
    start = 0
    for block in cut:
        assert (block.start, block.elements) == (start, sum(copy.elements for copy in block.copies))
        assert block.elements <= most or [copy.rows for copy in block.copies] == [1]
        start += block.elements


OWNER = """
import sys, time, torch
from titan_rl.actors.sync.transport import Memory
memory = Memory([8], pinned=False)
memory.bytes[memory.starts[0][1]:][:8].copy_(torch.arange(8, dtype=torch.uint8))
memory.stamps[1] = 4
print(repr(memory.offer(0, 8, 0, None)), flush=True)
time.sleep(60)
"""


def test_nothing_has_a_name_and_a_reader_outlives_a_killed_owner() -> None:
    from titan_rl.actors.sync.transport import Shared
    from titan_rl.wire.weight_source import Offer

    with subprocess.Popen([sys.executable, "-c", OWNER], stdout=subprocess.PIPE, text=True) as owner:
        assert owner.stdout
        offer = eval(owner.stdout.readline(), {"Offer": Offer})
        mapped = Shared(offer, pinned=False)
        with open(f"/proc/{owner.pid}/maps") as maps:
            found = maps.read()
        assert "/memfd:titan_rl weights (deleted)" in found
        assert "/dev/shm" not in found
        owner.send_signal(signal.SIGKILL)
    assert mapped.stamp(1) == 4
    assert mapped.run(1).tolist() == list(range(8))
    with pytest.raises(RuntimeError, match=f"expected a trainer rank's weights at /proc/{offer.pid}/fd"):
        Shared(offer, pinned=False)
