"""Ranks killed during a weight sync: which one is named, how soon, and which leftovers remain.

The progress of a rank is read from the kernel: a slot's stamp in the trainer's memory shows that it is being packed,
and the bytes that a trainer has sent since (over Monarch's TCP fallback) show how far a reader has come. A rank at the
right point is stopped, checked again, and killed there.
"""

import asyncio
import mmap
import os
import signal
import tempfile
import time
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from monarch.actor import this_host

from support.outputs import shared_memory
from support.running import Run, Runs
from tests.support.signals import stop
from titan_rl.actors.sync.transport import PACKING, SLOTS
from titan_rl.actors.vllm import vllm_cpu
from titan_rl.actors.vllm.engine import EngineSettings
from titan_rl.config import sections as c
from titan_rl.config.auto import on_device
from titan_rl.meshes import deaths
from titan_rl.meshes.generator_mesh import GeneratorMesh
from titan_rl.meshes.model_mesh import ModelMesh
from titan_rl.meshes.replica import GeneratorPolicy
from titan_rl.preflight.plan import write_model_folder
from titan_rl.preflight.shapes import shape_of
from titan_rl.record.incidents import Incidents
from titan_rl.train.weight_sync import WeightSync
from titan_rl.wire.errors import RankDied
from titan_rl.wire.spans import Clock

MODEL = c.ModelSection(
    dim=512, n_layers=4, n_heads=8, n_kv_heads=8, hidden_dim=2048
)  # 34 MB a rank: milliseconds a verb
LARGE = {f"model__{key}": getattr(MODEL, key) for key in ("dim", "n_layers", "n_heads", "n_kv_heads", "hidden_dim")}
ENDS: dict[str, Any] = {"cold_start__steps": 0, "algorithm__max_dead_steps": 0, "fault__max_restarts": 0}
TRAINERS = ("trainer[dp=0 tp=0]", "trainer[dp=1 tp=0]")
READER = "generator0[tp=0]"
SECONDS = 60.0
SOON = 30.0  # milliseconds, and what a loaded machine makes of them; half of the deadline that would end the wait


def stamps(pid: int) -> memoryview:
    """Return a trainer rank's stamps: the publication in each slot."""
    for fd in Path(f"/proc/{pid}/fd").iterdir():
        with suppress(OSError):  # closed meanwhile
            if "titan_rl weights" in os.readlink(fd):
                break
    else:
        raise AssertionError(f"expected weights staged by process {pid}, found none")
    with fd.open("rb") as memory:
        return memoryview(mmap.mmap(memory.fileno(), mmap.PAGESIZE, access=mmap.ACCESS_READ)).cast("q")[:SLOTS]


def sent(pid: int) -> int:
    """Return the bytes that a process has written, including to sockets."""
    counters = dict(line.split(": ") for line in Path(f"/proc/{pid}/io").read_text().splitlines())
    return int(counters["wchar"])


def stop_while_packing(pid: int) -> None:
    """Return with the process stopped while one of its slots is neither the old nor the new publication."""
    slots, deadline = stamps(pid), time.monotonic() + SECONDS
    while time.monotonic() < deadline:
        if PACKING in slots:
            stop(pid)
            if PACKING in slots:
                return
            os.kill(pid, signal.SIGCONT)
    raise AssertionError(f"no packing seen within {SECONDS:g} s")


def stop_while_reading(reader: int, trainers: list[int], whole: int) -> None:
    """Return with the reader stopped after some of a publication's `whole` bytes were sent, and before all were."""
    slots, deadline = [stamps(pid) for pid in trainers], time.monotonic() + SECONDS
    while time.monotonic() < deadline:
        old = max(slots[0])
        while PACKING in [*slots[0], *slots[1]] or not min(map(max, slots)) > old:
            assert time.monotonic() < deadline
        before = sum(map(sent, trainers))  # nothing but this publication is sent before the next step
        while (of_it := sum(map(sent, trainers)) - before) < whole // 8:
            assert time.monotonic() < deadline
        if of_it < whole // 2:
            stop(reader)
            time.sleep(0.1)  # bytes on their way to a stopped process fill the sockets, and no more follow
            if sum(map(sent, trainers)) - before < whole:
                return
            os.kill(reader, signal.SIGCONT)
    raise AssertionError(f"no read seen within {SECONDS:g} s")


def ends_by_name(run: Run, victim: str) -> None:
    os.kill(run.workers()[victim], signal.SIGKILL)
    out = run.finish(timeout=120)  # its first deadline is 600 s away
    assert run.code == 1, out
    assert out.count("died: its process") == 1, out
    assert f"{victim} died: its process" in out, out
    assert "Traceback" not in out
    assert not run.processes()
    assert not list(Path(tempfile.gettempdir()).glob(f"titan_rl-{run.process.pid}-*")), "its sockets"


def test_a_trainer_rank_killed_while_it_packs_ends_the_run_by_name(runs: Runs, tmp_path: Path) -> None:
    shared, victim = shared_memory(), TRAINERS[0]
    run = runs.start(tmp_path / "run", training__steps=1000, **ENDS, **LARGE)
    run.wait_for_step(1)
    stop_while_packing(run.workers()[victim])
    ends_by_name(run, victim)
    assert shared_memory() <= shared


def test_a_generator_rank_killed_while_it_reads_ends_the_run_by_name(runs: Runs, tmp_path: Path) -> None:
    shared = shared_memory()
    run = runs.start(tmp_path / "run", training__steps=1000, weight_sync__transport="rdma", **ENDS, **LARGE)
    run.wait_for_step(1)
    pids = run.workers()
    stop_while_reading(pids[READER], [pids[name] for name in TRAINERS], 4 * shape_of(MODEL).parameters)
    ends_by_name(run, READER)
    assert shared_memory() <= shared


def test_a_trainer_killed_while_a_host_reads_from_it_comes_back_and_the_run_ends_well(
    runs: Runs, tmp_path: Path
) -> None:
    """Every byte comes by remote reads, is checked twice, and reaches the host of the two replicas once."""
    shared, whole = shared_memory(), 4 * shape_of(MODEL).parameters
    keys = {"cold_start__steps": 0, "training__steps": 4, "fault__snapshot_interval": 1, "generator__replicas": 2}
    ways = {"weight_sync__transport": "rdma", "weight_sync__verify": "transfer", "weight_sync__delta": True}
    run = runs.start(tmp_path / "run", **keys, **ways, **LARGE)
    run.wait_for_step(1)
    pids = run.workers()
    stop_while_reading(pids[READER], [pids[name] for name in TRAINERS], whole)
    os.kill(pids[TRAINERS[1]], signal.SIGKILL)
    os.kill(pids[READER], signal.SIGCONT)
    out = run.finish(timeout=240)
    assert run.code == 0, out
    assert "by RDMABuffer (TCP fallback), read once for up to 2 replicas of a host" in out
    assert "trainer[dp=1 tp=0] died" in out
    lines = run.lines("metrics.jsonl")
    assert [line["step"] for line in lines] == [1, 2, 3, 4]
    for line in lines:
        assert 0 < line["sync/bytes_into_host"] <= whole
        assert line["sync/bytes"] <= 2 * line["sync/bytes_into_host"]
    assert shared_memory() <= shared


def test_a_reader_killed_amid_a_read_lets_go_of_its_slot_and_the_trainers_go_on(tmp_path: Path) -> None:
    """Its source is stopped, so that it cannot have read the whole."""

    async def work() -> None:
        config = on_device(
            c.Config(
                job=c.JobSection(dump_folder=str(tmp_path)),
                model=replace(MODEL, dim=256, hidden_dim=512),
                parallelism=c.ParallelismSection(data_parallel_shard_degree=2),
                weight_sync=c.WeightSyncSection(transport="rdma"),
                comm=c.CommSection(train_timeout_seconds=60),
            ),
            "cpu",
        )
        shape = shape_of(config.model)
        write_model_folder(tmp_path / "model", shape)
        folder = str(tmp_path / "model")
        settings = EngineSettings(model_dir=folder, shape=shape, max_model_len=64, kv_cache_memory_mb=16)
        trainers = ModelMesh(this_host(), "trainer", config, shape, {})
        generators = await GeneratorMesh.spawn(this_host(), settings, replicas=1, env=vllm_cpu.ENV)
        (engine, *_), _ = await asyncio.gather(generators.start(), trainers.start())
        await trainers.begin_phase("rl", 0)
        weights = WeightSync(trainers, generators, Clock())
        await weights.connect(config, shape)
        assert weights.transports == "RDMABuffer (TCP fallback)"
        await weights.sync(0)
        publication = await weights.publish(1)
        source = deaths.alive()[TRAINERS[1]]
        stop(source)
        try:
            pulling = asyncio.create_task(weights.pull(publication))
            await asyncio.sleep(1)
            assert not pulling.done()
            os.kill(engine.pid, signal.SIGKILL)
            began = time.monotonic()
            with pytest.raises(RankDied, match=r"^generator0\[tp=0\] died: its process"):
                await pulling
            assert time.monotonic() - began < SOON
        finally:
            os.kill(source, signal.SIGCONT)
        for version in (2, 3):  # one into either slot
            assert (await weights.publish(version)).slot == version % 2
        assert time.monotonic() - began < SOON
        with pytest.raises(RankDied):
            await weights.sync(4)
        stop(source)
        publishing: asyncio.Task[Any] = asyncio.create_task(weights.publish(5))
        await asyncio.sleep(0.2)
        os.kill(source, signal.SIGKILL)
        with pytest.raises(RankDied, match=r"^trainer\[dp=1 tp=0\] died: its process"):
            await asyncio.wait_for(publishing, SOON)
        for mesh in (generators, trainers):
            await mesh.stop()

    shared = shared_memory()
    asyncio.run(asyncio.wait_for(work(), 120))
    assert shared_memory() <= shared


def has_lock(pid: int) -> bool:
    """Return True while a process reads for its host."""
    locks = (line.split() for line in Path("/proc/locks").read_text().splitlines())
    return any(kind == "FLOCK" and int(owner) == pid for _, kind, _, _, owner, *_ in locks)


def test_when_the_replica_that_reads_for_its_host_dies_another_takes_over(tmp_path: Path) -> None:
    """Its source is stopped until then. Neither the replica that takes over nor the one that comes back reads what the
    host has."""

    async def work() -> None:
        config = on_device(
            c.Config(
                job=c.JobSection(dump_folder=str(tmp_path)),
                model=replace(MODEL, dim=256, hidden_dim=512),
                parallelism=c.ParallelismSection(data_parallel_shard_degree=2),
                weight_sync=c.WeightSyncSection(transport="rdma", verify="transfer"),
                comm=c.CommSection(train_timeout_seconds=60),
            ),
            "cpu",
        )
        shape = shape_of(config.model)
        whole = 4 * shape.parameters
        write_model_folder(tmp_path / "model", shape)
        folder = str(tmp_path / "model")
        settings = EngineSettings(model_dir=folder, shape=shape, max_model_len=64, kv_cache_memory_mb=16)
        trainers = ModelMesh(this_host(), "trainer", config, shape, {})
        incidents = Incidents(tmp_path, c.FaultSection(), lambda _: None)
        policy = GeneratorPolicy(incidents=incidents)
        generators = await GeneratorMesh.spawn(this_host(), settings, replicas=2, env=vllm_cpu.ENV, policy=policy)
        (engine, *_), _ = await asyncio.gather(generators.start(), trainers.start())
        await trainers.begin_phase("rl", 0)
        weights = WeightSync(trainers, generators, Clock())
        await weights.connect(config, shape)
        assert weights.transports == "RDMABuffer (TCP fallback), read once for up to 2 replicas of a host"
        first = await weights.sync(0)
        assert (first.into_host, first.bytes) == (whole, 2 * whole)

        publication = await weights.publish(1)
        sources = [deaths.alive()[name] for name in TRAINERS]
        stop(sources[1])
        try:
            pulling = asyncio.create_task(weights.pull(publication))
            async with asyncio.timeout(SECONDS):
                while not has_lock(engine.pid):
                    await asyncio.sleep(0.01)
            os.kill(engine.pid, signal.SIGKILL)
        finally:
            os.kill(sources[1], signal.SIGCONT)
        pulled = await pulling
        assert whole // 3 < pulled.into_host <= whole, "bytes from the other source are not read again"
        assert pulled.bytes == whole, "by the replica that is left"
        before = sum(map(sent, sources))
        async with asyncio.timeout(SECONDS):
            while not all(incident.outcome for incident in incidents.all):
                await asyncio.sleep(0.05)
        assert [incident.outcome for incident in incidents.all] == ["back"]
        assert sum(map(sent, sources)) - before < whole // 4
        one, other = await generators.fingerprint()
        assert one == other
        last = await weights.sync(2)
        assert (last.into_host, last.bytes) == (whole, 2 * whole)
        for mesh in (generators, trainers):
            await mesh.stop()

    shared = shared_memory()
    asyncio.run(asyncio.wait_for(work(), 180))
    assert shared_memory() <= shared
