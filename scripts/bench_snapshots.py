#!/usr/bin/env python3
"""Measure the cost and the benefit of snapshots in memory. Appends rows to a CSV.

    .venv/bin/python scripts/bench_snapshots.py             # about five minutes
    .venv/bin/python scripts/bench_snapshots.py copy        # one process only, seconds

copy     one process: a state copied into a part, and a plain copy of equal size just before (`ratio`: over it)
step     real trainer meshes: wall seconds of a step that starts right after a snapshot was begun, as with
         fault.snapshot_interval = 1, and of one without, in turn within one run (`ratio`: over those without); and the
         ranks' CPU seconds, which a busy machine changes less. Here step follows step directly. In a run, sampling
         comes between them, which leaves the copy more time.
restore  the same meshes: resume from a snapshot, and from a checkpoint on disk (`ratio`: over the checkpoint)
peers    a trainer mesh on one of two workers on this machine, with a server each: a step that starts right after a
         snapshot was begun that is copied to the other server, and one without, in turn (`ratio`: over those without).
         Trainers and both servers share this machine's cores here, and the "network" between them is its memory.
"""

import argparse
import asyncio
import os
import statistics
import tempfile
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from monarch.actor import this_host

from bench.rows import BENCHMARKS, FIGURES, RAN_ON, Row, in_turn, report
from titan_rl.batch.packing import pack
from titan_rl.config import sections as c
from titan_rl.environment import prepare_environment
from titan_rl.ext.hosts.worker_processes import worker_processes
from titan_rl.ext.snapshots.peer_snapshots import PeerSnapshots
from titan_rl.ext.snapshots.ranks.state_copy import StateCopy
from titan_rl.ext.snapshots.snapshot_servers import SnapshotServers
from titan_rl.ext.snapshots.snapshot_store import SnapshotStore
from titan_rl.meshes import deaths
from titan_rl.meshes.hosts import Host, RankPlace
from titan_rl.meshes.model_mesh import ModelMesh
from titan_rl.preflight.shapes import shape_of
from titan_rl.wire.snapshot import SnapshotPart
from titan_rl.wire.types import Batch, Sample

COLUMNS = ("part", "case", "measure", *FIGURES, "ratio", *RAN_ON)
TINY = c.ModelSection(dim=64, n_layers=2, n_heads=2, n_kv_heads=2, hidden_dim=128)
LARGE = c.ModelSection(dim=512, n_layers=2, n_heads=8, n_kv_heads=8, hidden_dim=2048)
SAMPLE_LENGTH = 64
WARM_UP = 2  # pairs of steps
PARTS = ["copy", "mesh", "peers"]


def copies(megabytes: int, repeats: int) -> Iterator[Row]:
    """Copy a state of tensors of one megabyte each, about the size of a shard."""
    tensors = [torch.randn(1 << 18) for _ in range(megabytes)]
    plain = [torch.zeros_like(tensor) for tensor in tensors]
    state: Any = SimpleNamespace(state_dict=lambda: {str(i): tensor for i, tensor in enumerate(tensors)})
    copy, fds = StateCopy({"state": state}), [os.memfd_create("titan_rl bench") for _ in range(2)]
    firsts, warm, begun, plainly = [], [], [], []
    for i in range(repeats + 1):
        for fd in fds:
            began = time.perf_counter()
            torch.ops.aten._foreach_copy_(plain, tensors)
            plainly.append(time.perf_counter() - began)
            began = time.perf_counter()
            copy.begin(SnapshotPart(f"/proc/{os.getpid()}/fd/{fd}", i + 1))
            begun.append(time.perf_counter() - began)
            copy.wait()
            (warm if i else firsts).append(time.perf_counter() - began)
    copy.close()
    case, nbytes = f"{megabytes} MB in tensors of 1 MB", megabytes * 2**20
    plain_rates, warm_rates, first_rates = (
        [nbytes / each / 1e9 for each in seconds] for seconds in (plainly[2:], warm, firsts)
    )
    row = partial(Row, "copy", case)
    yield row("plain copy, GB/s", plain_rates)
    yield row("snapshot, GB/s", warm_rates, ratio=ratio(warm_rates, plain_rates))
    yield row("snapshot into new memory, GB/s", first_rates, ratio=ratio(first_rates, plain_rates))
    yield row("until the copy has begun, ms", [each * 1e3 for each in begun[2:]])


async def start_mesh(model: c.ModelSection, ranks: int, folder: str, host: Host | None = None) -> ModelMesh:
    config = c.Config(
        job=c.JobSection(dump_folder=folder),
        model=model,
        parallelism=c.ParallelismSection(data_parallel_shard_degree=ranks),
        training=c.TrainingSection(seq_len=4 * SAMPLE_LENGTH, local_batch_size=4),
        cold_start=c.ColdStartSection(steps=10_000),
    )
    rank_place = RankPlace(host or Host(this_host()), ranks)
    mesh = ModelMesh(lambda: [rank_place], "trainer", config, shape_of(model), {})
    await mesh.start()
    await mesh.begin_phase("cold_start", 0)
    return mesh


async def steps(name: str, model: c.ModelSection, ranks: int, rows: int, pairs: int) -> list[Row]:
    """Train on `rows` of 256 tokens per step over all ranks."""
    seconds, worked = ({True: list[float](), False: list[float]()} for _ in range(2))  # by: with a snapshot
    taking, copying, from_snapshot, from_disk = [], [], [], []
    with tempfile.TemporaryDirectory() as folder:
        mesh = await start_mesh(model, ranks, folder)
        snapshots = SnapshotStore(mesh, None)
        for at, (pair, taken) in enumerate(in_turn((True, False), WARM_UP + pairs)):
            packed, before = [batches(at, rows, mesh)], cpu_seconds()
            begun = await timed(snapshots.take("cold_start", at, "{}")) if taken else 0.0
            whole = begun + await timed(mesh.step(packed))
            if pair >= WARM_UP:
                seconds[taken].append(whole)
                worked[taken].append(cpu_seconds() - before)
                taking += [begun] if taken else []
            if at % 2:  # after both steps of a pair
                for asked in mesh.spans().values():
                    found = [s.nanoseconds * 1e-9 for s in (await asked).spans if s.name == "snapshot"]
                    copying += found if pair >= WARM_UP else []
        newest, last = snapshots.newest(), 2 * (WARM_UP + pairs)
        assert newest is not None
        await mesh.save(last)
        for _ in range(3):
            from_snapshot.append(await timed(mesh.begin_phase("cold_start", newest)))
            from_disk.append(await timed(mesh.begin_phase("cold_start", last)))
        await mesh.close()
        await mesh.stop()
    nbytes = snapshots.nbytes["trainer"]
    snapshots.forget()
    case = f"{name}, {ranks} ranks, {rows * 4 * SAMPLE_LENGTH} tokens a step"
    step, restore = partial(Row, "step", case), partial(Row, "restore", case)
    return [
        step("bytes of one snapshot, MB a rank", [each / 1e6 for each in nbytes]),
        step("step without, s", seconds[False]),
        step("step with, s", seconds[True], ratio=ratio(seconds[True], seconds[False])),
        step("CPU of the ranks without, s", worked[False]),
        step("CPU of the ranks with, s", worked[True], ratio=ratio(worked[True], worked[False])),
        step("until all ranks have begun, s", taking, ratio=ratio(taking, seconds[False])),
        step("from begin to whole, s", copying, ratio=ratio(copying, seconds[False])),
        restore("from a checkpoint, s", from_disk),
        restore("from a snapshot, s", from_snapshot, ratio=ratio(from_snapshot, from_disk)),
    ]


async def peers(name: str, model: c.ModelSection, ranks: int, rows: int, pairs: int) -> list[Row]:
    """Train on `rows` of 256 tokens per step, with a copy of every second step's snapshot on another host."""
    seconds, worked = ({True: list[float](), False: list[float]()} for _ in range(2))  # by: with a snapshot
    taking, copying = list[float](), list[float]()
    with tempfile.TemporaryDirectory() as folder:
        sockets = Path(folder) / "sockets"
        sockets.mkdir()
        async with worker_processes(2, sockets, Path(folder) / "logs", 60.0) as hosts:
            mesh = await start_mesh(model, ranks, folder, hosts[0])
            snapshots = PeerSnapshots(mesh, None, SnapshotServers(hosts, 300.0, 300.0), print)
            await snapshots.start()
            for at, (pair, taken) in enumerate(in_turn((True, False), WARM_UP + pairs)):
                packed, before, began = [batches(at, rows, mesh)], cpu_seconds(), time.perf_counter()
                begun = await timed(snapshots.take("cold_start", at, "{}")) if taken else 0.0
                whole = begun + await timed(mesh.step(packed))
                await snapshots.settle()  # the step without is not to pay for the rest of the copy
                if pair >= WARM_UP:
                    seconds[taken].append(whole)
                    worked[taken].append(cpu_seconds() - before)
                    taking += [begun] if taken else []
                    copying += [time.perf_counter() - began] if taken else []
            newest = snapshots.newest()
            assert newest is not None
            assert newest.step >= 2 * (WARM_UP + pairs) - 2
            nbytes = sum(snapshots.nbytes["trainer"])
            await mesh.close()
            await deaths.kill(deaths.living())
    case = f"{name}, {ranks} ranks, {rows * 4 * SAMPLE_LENGTH} tokens a step"
    row = partial(Row, "peers", case)
    return [
        row("bytes of one snapshot, MB", [nbytes / 1e6]),
        row("step without, s", seconds[False]),
        row("step with, s", seconds[True], ratio=ratio(seconds[True], seconds[False])),
        row("CPU of ranks and servers without, s", worked[False]),
        row("CPU of ranks and servers with, s", worked[True], ratio=ratio(worked[True], worked[False])),
        row("until all ranks have begun, s", taking, ratio=ratio(taking, seconds[False])),
        row("step with, until the copy is whole, s", copying, ratio=ratio(copying, seconds[False])),
    ]


def ratio(values: list[float], base: list[float]) -> float:
    """Return the median ratio, pair by pair if both have the same number of values."""
    if len(values) == len(base):
        return statistics.median(value / other for value, other in zip(values, base, strict=True))
    return statistics.median(values) / statistics.median(base)


def cpu_seconds() -> float:
    """Return CPU seconds of all threads of the ranks, by each process's own CPU clock."""
    return sum(time.clock_gettime((~pid << 3) | 2) for pid in deaths.alive().values())


async def timed(call: Any) -> float:
    began = time.perf_counter()
    await call
    return time.perf_counter() - began


def batches(step: int, rows: int, mesh: ModelMesh) -> list[Batch]:
    tokens = torch.randint(3, 60, (4 * rows, SAMPLE_LENGTH), generator=torch.Generator().manual_seed(step)).tolist()
    samples = [Sample(each, [1] * SAMPLE_LENGTH) for each in tokens]
    return pack(samples, shards=mesh.dp, seq_len=4 * SAMPLE_LENGTH, rows_per_microbatch=4, pad_id=0)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", default=PARTS, metavar=" | ".join(PARTS))
    parser.add_argument("--pairs", type=int, default=20, help="pairs of steps, one with a snapshot and one without")
    parser.add_argument("--csv", type=Path, default=BENCHMARKS / "snapshots.csv")
    a = parser.parse_args()
    if unknown := set(a.parts) - {*PARTS}:
        parser.error(f"expected {', '.join(PARTS)}, found {', '.join(sorted(unknown))}")
    prepare_environment()
    torch.set_num_threads(1)
    if "copy" in a.parts:
        for megabytes in (1, 100):
            report(a.csv, COLUMNS, copies(megabytes, a.pairs))
    if "mesh" in a.parts:
        for name, model, rows in (("tiny", TINY, (16, 16)), ("8M parameters", LARGE, (4, 8))):
            for ranks in (1, 2):
                report(a.csv, COLUMNS, asyncio.run(steps(name, model, ranks, rows[ranks - 1], a.pairs)))
    if "peers" in a.parts:
        for name, model, rows in (("tiny", TINY, 16), ("8M parameters", LARGE, 8)):
            report(a.csv, COLUMNS, asyncio.run(peers(name, model, 2, rows, a.pairs)))


if __name__ == "__main__":
    main()
