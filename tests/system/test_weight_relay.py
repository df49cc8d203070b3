"""Hosts pass a version on, in Monarch processes: a relay that dies, stops or forges costs no wrong byte."""

import asyncio
import os
import signal
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
from monarch.actor import this_host
from monarch.config import configure

from support.outputs import same
from support.passing_hosts import TP, Hosts, ReaderRanks, TrainerRank, done
from support.running import Runs
from titan_rl.ext.relay import chains

ROWS, SLICE = 4096, 1 << 19  # 8 MiB of weights, in 8 slices for each reader
VERSION = ROWS * 1024 * 2
READERS = 4
KEYS: dict[str, Any] = {
    "cold_start__steps": 2,
    "training__steps": 3,
    "eval__size": 0,
    "generator__replicas": 3,
    "hosts__kind": "processes",
    "hosts__count": 4,
    "placement__hosts": '{trainer = "0", generator = "1-3"}',
    "algorithm__max_dead_steps": 0,
    "weight_sync__transport": "rdma",
    "lora__rank": 8,
    "lora__sync": "adapter",
}


@pytest.fixture(autouse=True)
def ranks_find_support(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[1]), prepend=os.pathsep)
    monkeypatch.setattr(chains, "STALL_SECONDS", 2.0)
    configure(rdma_allow_tcp_fallback=True)


def among_hosts(work: Callable[[Hosts], Awaitable[None]]) -> None:
    async def run() -> None:
        meshes: list[Any] = [this_host().spawn_procs(per_host={"rank": 1}, name=f"r{i}") for i in range(READERS + 1)]
        trainer = meshes[0].spawn("rank", TrainerRank)
        readers = {f"g{i}": mesh.spawn("rank", ReaderRanks) for i, mesh in enumerate(meshes[1:])}
        hosts = Hosts(trainer, readers, ROWS)
        try:
            await hosts.connect(relay=True, slice_bytes=SLICE)
            stats = await hosts.pull()
            assert (stats.bytes, stats.relayed, stats.fell_back) == (READERS * VERSION, 3 * VERSION, ())
            assert await hosts.equal()
            await work(hosts)
        finally:
            for mesh in meshes:
                try:
                    await done(mesh.stop(), 10)
                except Exception as error:
                    print(error)  # it was killed

    asyncio.run(asyncio.wait_for(run(), 110))


def test_hosts_behind_a_killed_one_read_the_rest_from_the_trainers() -> None:
    async def work(hosts: Hosts) -> None:
        await done(hosts.readers["g1"].harm.call_one("kill", 5))
        stats = await hosts.pull(dies="g1")
        assert set(stats.engines) == {"g0", "g2", "g3"}
        assert set(stats.unreached) == {"g2"}
        assert await hosts.equal()
        for _ in range(2):
            stats = await hosts.pull()
            assert (stats.bytes, stats.relayed, stats.fell_back) == (3 * VERSION, 2 * VERSION, ())
            assert await hosts.equal()

    among_hosts(work)


@pytest.mark.slow
def test_hosts_behind_a_forger_serve_no_byte_of_it() -> None:
    async def work(hosts: Hosts) -> None:
        await done(hosts.readers["g1"].harm.call_one("forge", 0))
        stats = await hosts.pull()
        assert await hosts.equal()
        assert set(stats.unreached) == {"g1", "g2", "g3"}
        assert len(stats.unreached) == 3 * TP
        assert hosts.said.startswith("3 host(s) read from the trainers, as the host before failed; ")
        await done(hosts.readers["g1"].harm.call_one("", 0))
        stats = await hosts.pull()
        assert (stats.bytes, stats.fell_back) == (READERS * VERSION, ())
        assert await hosts.equal()

    among_hosts(work)


@pytest.mark.slow
def test_a_stopped_host_delays_the_ones_behind_it_and_harms_none_when_it_wakes() -> None:
    async def work(hosts: Hosts) -> None:
        pid = await done(hosts.readers["g1"].pid.call_one())
        await done(hosts.readers["g1"].harm.call_one("stop", 5))
        pulling = asyncio.create_task(hosts.pull())
        await asyncio.sleep(8)
        os.kill(pid, signal.SIGCONT)
        stats = await pulling
        assert "g2" in stats.unreached
        assert await hosts.equal()
        await done(hosts.readers["g1"].harm.call_one("", 0))
        for _ in range(2):
            stats = await hosts.pull()
            assert (stats.bytes, stats.fell_back) == (READERS * VERSION, ())
            assert await hosts.equal()

    among_hosts(work)


def test_a_run_whose_hosts_pass_weights_on_has_the_same_losses_and_rollouts(runs: Runs, tmp_path: Path) -> None:
    finished: dict[Any, Any] = {}
    for relay in (True, False):
        run = runs.start(tmp_path / str(relay), **KEYS, weight_sync__relay=relay)
        out = run.finish()
        assert run.code == 0, out
        assert ("passed on from host to host" in " ".join(out.split())) is relay, out
        finished[relay] = run.lines("metrics.jsonl")
        assert same(run, finished.setdefault("run", run))
    into = [line["sync/bytes_into_host"] for line in finished[True]]
    assert into == [line["sync/bytes_into_host"] for line in finished[False]]
    assert [line["sync/bytes_relayed"] for line in finished[True]] == [2 * nbytes for nbytes in into]
    assert not any("sync/fell_back" in line for line in finished[True])
