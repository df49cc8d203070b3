"""A version that passes from host to host: one process stands for all of them, with their memories and real links."""

import asyncio
import random
from collections import Counter
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor

from titan_rl.actors.sync.landing import Landing
from titan_rl.actors.sync.staging import Staging
from titan_rl.config.sections import WeightSyncSection
from titan_rl.ext.relay.chains import Followed, chained
from titan_rl.ext.remote_weights.ranks import remote_run
from titan_rl.wire.manifest import Manifest
from titan_rl.wire.reports import ReaderCost
from titan_rl.wire.weight_plan import Copy
from titan_rl.wire.weight_source import Source

ROWS, COLS, FROZEN = 48, 16, 24
SECONDS = 20.0


class Slice:
    """A registered part of a memory; `owner` has it, and the reads of it count."""

    backend = "tcp"
    owner = ""
    sent: ClassVar[Counter[str]] = Counter()
    dead: ClassVar[set[str]] = set()
    dies_after: ClassVar[dict[str, int]] = {}  # bytes

    def __init__(self, memory: Tensor) -> None:
        self.memory, self.owner = memory, Slice.owner

    def size(self) -> int:
        return len(self.memory)

    async def drop(self) -> None:
        self.memory = torch.empty(0)


class Read:
    def __init__(self, parts: Any) -> None:
        self.parts = parts

    async def submit(self, timeout: int) -> None:
        for source, target in self.parts:
            await asyncio.sleep(random.Random(Slice.sent.total()).random() / 2000)
            if source.owner in Slice.dead or Slice.sent[source.owner] >= Slice.dies_after.get(source.owner, 1 << 40):
                raise ConnectionError("the other end is gone")
            target.copy_(source.memory)
            Slice.sent[source.owner] += len(target)


@pytest.fixture(autouse=True)
def links(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("monarch.rdma.RDMABuffer", Slice)
    monkeypatch.setattr(remote_run, "reads", Read)
    for name, value in {"sent": Counter(), "dead": set(), "dies_after": {}, "owner": ""}.items():
        monkeypatch.setattr(Slice, name, value)


class Meshes:
    """Two trainer ranks, and hosts with two readers each, which have half of each rank's rows."""

    def __init__(self, hosts: int, dtype: torch.dtype, **sync: Any) -> None:
        self.sync = WeightSyncSection(transport="rdma", relay=True, **sync)
        self.dtype, name = dtype, str(dtype).removeprefix("torch.")
        self.weights = [{n: torch.randn(ROWS, COLS).to(dtype) for n in ("w", "w.lora_A")} for _ in range(2)]
        half = ROWS // 2
        runs = {
            (t, r): (
                Copy("w", r * half, 0, half, COLS, "p", t * half, 0),
                Copy("w.lora_A", r * half, 0, half, COLS, "a", t * half, 0),
            )
            for t in range(2)
            for r in range(2)
        }
        Slice.owner = "trainers"
        self.staging = [
            Staging(self.weights[t], {r: runs[t, r] for r in range(2)}, dtype, slice_bytes=256, block_bytes=128)
            for t in range(2)
        ]
        offers = [staging.offer(remote=True, how="rdma") for staging in self.staging]
        self.sources = [[Source(t, offers[t][r], runs[t, r], name, 128) for t in range(2)] for r in range(2)]
        self.live = dict[str, list[dict[str, Tensor]]]()
        self.landings = dict[str, list[Landing]]()
        for host in range(hosts):
            self.boot(f"h{host}")
        self.serial = self.epoch = 0

    def boot(self, host: str) -> None:
        Slice.owner = host
        self.live[host] = [{n: torch.zeros(ROWS, COLS, dtype=self.dtype) for n in "pa"} for _ in range(2)]
        readers = zip(self.live[host], self.sources, strict=True)
        self.landings[host] = [Landing(live, sources, self.sync, host) for live, sources in readers]

    def publish(self) -> list[list[Manifest]]:
        self.serial += 1
        packed = [staging.pack(self.serial, self.serial % 2, self.serial) for staging in self.staging]
        return [[runs[r] for runs in packed] for r in range(2)]

    def pull(
        self, before: dict[str, str], *, tell: bool = True, offers: Any = None, patience: float = SECONDS
    ) -> dict[str, list[ReaderCost]]:
        """Publish, and bring it to all hosts. Return their costs."""
        manifests, self.epoch = self.publish(), self.epoch + tell

        def note(host: str, r: int) -> Followed | None:
            if host not in before:
                return None
            first = before[host]
            offer = offers[first][r] if offers else self.landings[first][r].connection.relay
            return Followed(first, self.epoch, offer if tell else None, patience)

        async def fetched(host: str, r: int) -> ReaderCost:
            return await self.landings[host][r].fetch_weights(manifests[r], SECONDS, note(host, r))

        async def work() -> dict[str, list[ReaderCost]]:
            ranks = [(host, r) for host in self.landings if host not in Slice.dead for r in range(2)]
            costs = await asyncio.gather(*(fetched(host, r) for host, r in ranks))
            found: dict[str, list[ReaderCost]] = {}
            for (host, r), cost in zip(ranks, costs, strict=True):
                written = await self.landings[host][r].write_weights(SECONDS)
                found.setdefault(host, []).extend([cost, written])
            return found

        return asyncio.run(work())

    def agree(self) -> bool:
        half = ROWS // 2
        expected = [
            {
                name: torch.cat([w[n][r * half : (r + 1) * half] for w in self.weights])
                for name, n in (("p", "w"), ("a", "w.lora_A"))
            }
            for r in range(2)
        ]
        return all(
            torch.equal(live[r][name], expected[r][name])
            for host, live in self.live.items()
            if host not in Slice.dead
            for r in range(2)
            for name in "pa"
        )

    @property
    def version_bytes(self) -> int:
        return 2 * 2 * ROWS * COLS * self.dtype.itemsize


def reasons(costs: dict[str, list[ReaderCost]]) -> dict[str, str]:
    return {host: why for host, each in costs.items() if (why := next((c.fell_back for c in each if c.fell_back), ""))}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("delta", [False, True])
def test_the_trainers_send_a_version_once_and_each_host_once_more(dtype: torch.dtype, delta: bool) -> None:
    meshes = Meshes(5, dtype, delta=delta)
    before = chained([*meshes.landings], 1)
    small = meshes.version_bytes // 4  # stamps and keys
    costs = meshes.pull(before)
    assert meshes.agree()
    assert not reasons(costs)
    assert meshes.version_bytes <= Slice.sent["trainers"] <= meshes.version_bytes + small
    assert sum(cost.relayed for each in costs.values() for cost in each) == 4 * meshes.version_bytes
    assert Slice.sent["h4"] == 0
    for changes in (1, 0):
        Slice.sent.clear()
        meshes.weights[1]["w.lora_A"][0, 0] += changes
        costs = meshes.pull(before, tell=False)
        assert meshes.agree()
        assert not reasons(costs)
        remote = sum(cost.remote for each in costs.values() for cost in each)
        assert remote == (5 * 256 * changes if delta else 5 * meshes.version_bytes)


def test_a_host_without_the_epochs_offer_reads_from_the_trainers() -> None:
    meshes = Meshes(3, torch.float32)
    before = chained([*meshes.landings], 1)
    meshes.pull(before)
    meshes.boot("h2")
    costs = meshes.pull(before, tell=False)
    assert meshes.agree()
    assert reasons(costs) == {"h2": "h2: h1: expected an offer of epoch 1, found the one of 0"}


@pytest.mark.parametrize("at", [0, 3000])
def test_hosts_behind_one_that_dies_get_the_rest_from_the_trainers(at: int) -> None:
    meshes = Meshes(4, torch.float32)
    before = chained([*meshes.landings], 1)
    meshes.pull(before)
    Slice.dies_after = {"h1": Slice.sent["h1"] + at}
    for weights in meshes.weights:
        weights["w"].neg_()
    costs = meshes.pull(before, tell=False)
    assert meshes.agree()
    assert reasons(costs) == {"h2": "h2: h1: the other end is gone"}
    Slice.dead.add("h1")
    del meshes.landings["h1"]
    costs = meshes.pull(chained(["h0", "h2", "h3"], 1))
    assert meshes.agree()
    assert not reasons(costs)


def test_a_host_that_gets_no_slice_in_time_reads_from_the_trainers() -> None:
    meshes = Meshes(2, torch.float32)
    idle = meshes.landings.pop("h0")
    meshes.live.pop("h0")
    offers = [landing.connection.relay for landing in idle]
    costs = meshes.pull({"h1": "h0"}, offers={"h0": offers}, patience=0.2)
    assert meshes.agree()
    (why,) = reasons(costs).values()
    assert why.startswith("h1: h0: expected ")
    assert why.endswith("more slices, found none for a while")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_forged_bytes_are_caught_by_every_host_behind_and_none_serves_them(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    meshes = Meshes(4, dtype)
    before = chained([*meshes.landings], 1)
    meshes.pull(before)

    async def submit(read: Read, timeout: int) -> None:
        for source, target in read.parts:
            await asyncio.sleep(0)
            target.copy_(source.memory)
            if source.owner == "h1" and len(target) == 256:
                target[7] ^= 1
            Slice.sent[source.owner] += len(target)

    monkeypatch.setattr(Read, "submit", submit)
    for weights in meshes.weights:
        weights["w"].neg_()
    Slice.sent.clear()
    costs = meshes.pull(before, tell=False)
    assert meshes.agree()
    assert set(reasons(costs)) == {"h2", "h3"}
    assert reasons(costs)["h2"].endswith("blocks from h1 differ from their checksums")
    assert Slice.sent["trainers"] > meshes.version_bytes, "the wrong blocks came from there"


def test_a_reader_that_leaves_passes_nothing_on() -> None:
    meshes = Meshes(2, torch.float32)
    before = chained([*meshes.landings], 1)
    meshes.pull(before)
    offers = [landing.connection.relay for landing in meshes.landings["h0"]]

    async def leave() -> None:
        for landing in meshes.landings["h0"]:
            landing.leave()
        await asyncio.sleep(0.05)

    asyncio.run(leave())
    assert not any(len(part.memory) for offer in offers for run in offer.slices for part in run)
