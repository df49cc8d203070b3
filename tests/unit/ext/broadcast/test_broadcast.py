"""Weights by broadcast over gloo, from two trainer ranks to the readers of two hosts: the same code as over NCCL."""

import asyncio
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import titan_rl.ext.broadcast.ranks.broadcast as broadcast
from titan_rl.actors import meeting
from titan_rl.actors.sync.landing import Landing
from titan_rl.actors.sync.staging import Staging
from titan_rl.config.sections import WeightSyncSection
from titan_rl.ext.broadcast.rosters import Gathering, Roster, Seat
from titan_rl.ext.remote_weights.ranks import remote_run
from titan_rl.wire.manifest import Manifest
from titan_rl.wire.reports import ReaderCost
from titan_rl.wire.weight_plan import Copy
from titan_rl.wire.weight_source import Source

ROWS, COLS, BLOCK, SLICE = 48, 16, 256, 1000  # blocks of four rows; two slices, the second smaller
HALF = ROWS // 2
RUN = HALF * COLS * 4  # bytes of a run
HOSTS = ("generator0", "generator1")
PAIRS = [(t, r) for t in range(2) for r in range(2)]
SECONDS = 20.0


class Slice:
    """A registered part of a slot, in this process."""

    backend = "tcp"

    def __init__(self, memory: Tensor) -> None:
        self.memory = memory

    def size(self) -> int:
        return len(self.memory)


class Reads:
    """One-sided reads, counted."""

    bytes = 0

    def __init__(self, parts: Any) -> None:
        self.parts = parts

    async def submit(self, timeout: int) -> None:
        for source, target in self.parts:
            target.copy_(source.memory)
            Reads.bytes += len(target)


class Meshes:
    """Two trainer ranks, and on each host two readers, which have half of each rank's rows."""

    def __init__(self, **sync: Any) -> None:
        self.sync = WeightSyncSection(transport="broadcast", **sync)
        self.weights = [{"w": torch.randn(ROWS, COLS)} for _ in range(2)]
        runs = {(t, r): (Copy("w", r * HALF, 0, HALF, COLS, "p", t * HALF, 0),) for t, r in PAIRS}
        self.staging = [
            Staging(
                self.weights[t], {r: runs[t, r] for r in range(2)}, torch.float32, slice_bytes=SLICE, block_bytes=BLOCK
            )
            for t in range(2)
        ]
        offers = [staging.offer(remote=True, how="broadcast") for staging in self.staging]
        sources = [[Source(t, offers[t][r], runs[t, r], "float32", BLOCK) for t in range(2)] for r in range(2)]
        self.live = {(host, r): {"p": torch.zeros(ROWS, COLS)} for host in HOSTS for r in range(2)}
        self.landings = {
            (host, r): Landing(self.live[host, r], sources[r], self.sync, f"{host}[tp={r}]") for host, r in self.live
        }
        self.serial, self.epoch = 0, 1
        self.meets = [offers[t][0].link.meets for t in range(2)]

    def roster(self, *more: str) -> Roster:
        return Roster(self.epoch, dict.fromkeys(PAIRS, (*HOSTS, *more)))

    def publish(self, roster: Roster, send: bool = True) -> list[list[Manifest]]:
        """Return the manifests of each reader."""
        self.serial += 1
        slot = self.serial % 2
        packed = [staging.pack(self.serial, slot, self.serial) for staging in self.staging]
        for t, staging in enumerate(self.staging if send else ()):
            staging.announce(slot, self.serial, roster.of_trainer(t), SECONDS)
        return [[runs[r] for runs in packed] for r in range(2)]

    def pull(self, manifests: list[list[Manifest]], roster: Roster | None) -> list[ReaderCost]:
        async def pulled(host: str, r: int, landing: Landing) -> ReaderCost:
            gathering = roster and roster.of_reader(host, r)
            cost = await landing.fetch_weights(manifests[r], 2 * SECONDS, gathering)
            await landing.write_weights(SECONDS)
            return cost

        async def work() -> list[ReaderCost]:
            return await asyncio.gather(*(pulled(host, r, each) for (host, r), each in self.landings.items()))

        return asyncio.run(work())

    def agree(self) -> bool:
        halves = [torch.cat([w["w"][r * HALF : (r + 1) * HALF] for w in self.weights]) for r in range(2)]
        return all(torch.equal(live["p"], halves[r]) for (_, r), live in self.live.items())


@pytest.fixture(autouse=True)
def one_sided_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("monarch.rdma.RDMABuffer", Slice)
    monkeypatch.setattr(remote_run, "reads", Reads)
    monkeypatch.setattr(Reads, "bytes", 0)


@pytest.mark.parametrize("verify", ["transfer", "live"])
@pytest.mark.parametrize("delta", [False, True])
def test_publications_arrive_bit_for_bit_without_one_sided_reads(verify: str, delta: bool) -> None:
    meshes = Meshes(verify=verify, delta=delta)
    roster = meshes.roster()
    for landing in meshes.landings.values():
        assert landing.connection.transports == ["broadcast (gloo)"] * 2
        assert landing.connection.senders == (0, 1)
    costs = meshes.pull(meshes.publish(roster), roster)
    assert meshes.agree()
    assert {(cost.remote, cost.fell_back) for cost in costs} == {(2 * RUN, "")}
    meshes.weights[1]["w"][0, 0] += 1  # in the first slice of the run from rank 1 to reader 0
    meshes.landings["generator1", 0].forget()  # which then needs every block, but has the bytes on its host
    costs = meshes.pull(meshes.publish(roster), roster)
    assert meshes.agree()
    assert [cost.remote for cost in costs] == ([SLICE, 0, SLICE, 0] if delta else [2 * RUN] * 4)
    assert Reads.bytes == 0


def test_a_slice_that_one_host_lacks_is_sent_to_all(monkeypatch: pytest.MonkeyPatch) -> None:
    meshes = Meshes(delta=True)
    roster = meshes.roster()
    meshes.pull(meshes.publish(roster), roster)
    late = meshes.landings["generator0", 1]
    late.forget()
    for run in late._link._memory.runs:  # type: ignore[union-attr]
        run.keys[:], run.octets[:] = 0, 0
    costs = meshes.pull(meshes.publish(roster), roster)
    assert meshes.agree()
    assert [cost.remote for cost in costs] == [0, 2 * RUN, 0, 2 * RUN]
    assert Reads.bytes == 0


@pytest.mark.parametrize("verify", ["transfer", "live"])
def test_a_bit_that_flips_on_its_way_is_found_and_read_again(verify: str, monkeypatch: pytest.MonkeyPatch) -> None:
    meshes, land, flips = Meshes(verify=verify), broadcast._Group._land, list[Tensor]()

    def flip_once(group: Any, work: Any, part: Tensor, buffer: Tensor, ends: float) -> None:
        land(group, work, part, buffer, ends)
        if not group._root and not flips:
            flips.append(part)
            part[7] ^= 4

    monkeypatch.setattr(broadcast._Group, "_land", flip_once)
    roster = meshes.roster()
    costs = meshes.pull(meshes.publish(roster), roster)
    assert meshes.agree()
    assert len(flips) == 1
    assert Reads.bytes == SLICE + 16, "the slice with the wrong block, and the slots' stamps"
    assert not any(cost.fell_back for cost in costs)


def take_part_and_go(stores: Callable[[int], Any], *gatherings: Gathering) -> list[threading.Thread]:
    """Take part until all have agreed, and then close the connections, as the kernel does for a killed process."""

    def part(gathering: Gathering) -> None:
        broadcasts = broadcast.Broadcasts(stores, None)
        broadcasts.agree(gathering, 1, {seat.peer: [seat.rank > 0] * 2 for seat in gathering.seats}, SECONDS)
        broadcasts.abort()

    threads = [threading.Thread(target=part, args=(gathering,)) for gathering in gatherings]
    for thread in threads:
        thread.start()
    return threads


def test_a_member_that_dies_breaks_its_groups_at_once_and_the_others_read_one_sided(
    capfd: pytest.CaptureFixture[str],
) -> None:
    meshes = Meshes(verify="transfer")
    roster, began = meshes.roster("victim"), time.monotonic()
    victims = (roster.of_reader("victim", r) for r in range(2))
    threads = take_part_and_go(lambda rank: meeting.store_at(meshes.meets[rank], SECONDS), *victims)
    costs = meshes.pull(meshes.publish(roster), roster)
    assert meshes.agree()
    assert time.monotonic() - began < SECONDS / 2
    assert all("broadcast from trainer rank" in cost.fell_back for cost in costs)
    assert Reads.bytes >= 4 * 2 * RUN
    for thread in threads:
        thread.join()
    meshes.epoch, Reads.bytes = 2, 0  # the groups are made anew, without it
    roster = meshes.roster()
    meshes.weights[0]["w"] += 1
    costs = meshes.pull(meshes.publish(roster), roster)
    assert meshes.agree()
    assert not any(cost.fell_back for cost in costs)
    assert Reads.bytes == 0
    assert "publication 1 was not broadcast to all: broadcast from trainer rank" in capfd.readouterr().err


def test_a_trainer_rank_that_dies_amid_a_broadcast_lets_no_reader_wait() -> None:
    """Its memory is still there for one-sided reads. After a real death it is not, and the pull fails."""
    meshes, stores = Meshes(), [meeting.open_store() for _ in range(2)]
    roster, began = meshes.roster(), time.monotonic()
    for landing in meshes.landings.values():
        landing._link._receiver._broadcasts = broadcast.Broadcasts(  # type: ignore[union-attr]
            lambda rank: meeting.store_at(stores[rank][1], SECONDS), None
        )
    threads = [take_part_and_go(lambda _, t=t: stores[t][0], roster.of_trainer(t))[0] for t in range(2)]
    costs = meshes.pull(meshes.publish(roster, send=False), roster)
    assert meshes.agree()
    assert time.monotonic() - began < SECONDS / 2
    assert all(cost.fell_back for cost in costs)
    for thread in threads:
        thread.join()


def test_a_member_that_never_comes_is_named_within_its_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("titan_rl.ext.broadcast.ranks.broadcast.MEET_SECONDS", 1.0)
    meshes = Meshes()
    roster, began = meshes.roster("absent"), time.monotonic()
    costs = meshes.pull(meshes.publish(roster), roster)
    assert meshes.agree()
    assert all(cost.fell_back.endswith("rank 3 did not come in time") for cost in costs)
    meshes.epoch = 2  # the trainer ranks still wait for it, until they have something new to send
    roster, Reads.bytes = meshes.roster(), 0
    meshes.weights[0]["w"] += 1
    costs = meshes.pull(meshes.publish(roster), roster)
    assert meshes.agree()
    assert not any(cost.fell_back for cost in costs)
    assert time.monotonic() - began < SECONDS / 2


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_nccl_takes_the_calls_that_gloo_takes(device: str) -> None:
    """On one GPU a group has one process, so that nothing is received."""
    store, _ = meeting.open_store()
    gpu = torch.device("cuda", 0) if device == "cuda" else None
    broadcasts = broadcast.Broadcasts(lambda _: store, gpu)
    gathering = Gathering(1, (Seat(0, (0, 0), 0, 1),))
    parts = [torch.full((1000 + i,), i, dtype=torch.uint8, pin_memory=gpu is not None) for i in range(5)]
    for serial in (1, 2):
        assert broadcasts.agree(gathering, serial, {0: [True, False, True]}, SECONDS) == {0: [0, 2]}
        broadcasts.move(gathering, {0: parts}, SECONDS)
    broadcasts.abort()
    with pytest.raises(RuntimeError, match="its groups are broken"):
        broadcasts.move(gathering, {0: parts}, SECONDS)


def test_an_older_publication_than_the_one_that_is_sent_is_not_mixed_with_it() -> None:
    meshes = Meshes()
    roster = meshes.roster()
    old = meshes.publish(roster, send=False)
    meshes.publish(roster)
    costs = meshes.pull(old, roster)
    assert meshes.agree(), "one-sided"
    assert all("expected one publication, found 1 and 2" in cost.fell_back for cost in costs)
