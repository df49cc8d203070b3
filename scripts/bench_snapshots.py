#!/usr/bin/env python3
"""What snapshots in memory cost, and what they save. Appends rows to a CSV.

    .venv/bin/python scripts/bench_snapshots.py             # about five minutes
    .venv/bin/python scripts/bench_snapshots.py copy        # one process only, seconds

copy     one process: a state copied into a part, beside a plain copy of as many bytes just before (`ratio`: over it)
step     real trainer meshes: wall seconds of a step right behind which a snapshot was begun, as with
         fault.snapshot_interval = 1, and of one without, in turn within one run (`ratio`: over those without); and the
         ranks' CPU seconds, which a busy machine changes less. Nothing lies between two steps here; in a run sampling
         does, which leaves the copy still more time.
restore  the same meshes: to begin again from a snapshot, and from a checkpoint on disk (`ratio`: over the checkpoint)
"""

import argparse
import asyncio
import csv
import os
import statistics
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from monarch.actor import this_host

from titan_rl.actors.titan.state_copy import StateCopy
from titan_rl.batch.packing import pack
from titan_rl.config.sections import (
    ColdStartSection,
    Config,
    JobSection,
    ModelSection,
    ParallelismSection,
    TrainingSection,
)
from titan_rl.environment import prepare_environment
from titan_rl.meshes import deaths
from titan_rl.meshes.model_mesh import ModelMesh
from titan_rl.meshes.snapshot_store import Snapshots
from titan_rl.preflight.shapes import shape_of
from titan_rl.record.provenance import git_commit, machine, versions
from titan_rl.wire.snapshot import SnapshotPart
from titan_rl.wire.spans import span
from titan_rl.wire.types import Batch, Sample

HERE = Path(__file__).resolve().parents[1]
SHARDED = ParallelismSection(data_parallel_shard_degree=2)
TINY = ModelSection(dim=64, n_layers=2, n_heads=2, n_kv_heads=2, hidden_dim=128)
LARGE = ModelSection(dim=512, n_layers=2, n_heads=8, n_kv_heads=8, hidden_dim=2048)
LENGTH = 64  # of a sample
WARM_UP = 2  # pairs of steps


@dataclass(frozen=True)
class Measure:
    part: str
    case: str
    measure: str
    values: list[float]
    ratio: float | None = None


def copies(megabytes: int, repeats: int) -> Iterator[Measure]:
    """A few tensors of a megabyte, as a shard is."""

    class Tensors:
        def state_dict(self) -> dict[str, Any]:
            return {str(i): tensor for i, tensor in enumerate(tensors)}

        def load_state_dict(self, state_dict: dict[str, Any]) -> None:
            """Copied in place."""

    tensors = [torch.randn(1 << 18) for _ in range(megabytes)]
    plain = [torch.zeros_like(tensor) for tensor in tensors]
    copy, fds = StateCopy({"state": Tensors()}), [os.memfd_create("titan_rl bench") for _ in range(2)]
    firsts, warm, begun, beside = [], [], [], []
    for i in range(repeats + 1):
        for fd in fds:
            began = time.perf_counter()
            torch.ops.aten._foreach_copy_(plain, tensors)
            beside.append(time.perf_counter() - began)
            began = time.perf_counter()
            copy.begin(SnapshotPart(f"/proc/{os.getpid()}/fd/{fd}", i + 1))
            begun.append(time.perf_counter() - began)
            copy.wait()
            (warm if i else firsts).append(time.perf_counter() - began)
    span.take()
    copy.close()
    case, nbytes = f"{megabytes} MB in tensors of 1 MB", megabytes * 2**20

    def rates(seconds: list[float]) -> list[float]:
        return [nbytes / each / 1e9 for each in seconds]

    plain_rates, warm_rates = rates(beside[2:]), rates(warm)
    yield Measure("copy", case, "plain copy, GB/s", plain_rates)
    yield Measure("copy", case, "snapshot, GB/s", warm_rates, ratio(warm_rates, plain_rates))
    yield Measure("copy", case, "snapshot into new memory, GB/s", rates(firsts), ratio(rates(firsts), plain_rates))
    yield Measure("copy", case, "until the copy has begun, ms", [each * 1e3 for each in begun[2:]])


async def meshes(case: str, model: ModelSection, layout: ParallelismSection, rows: int, pairs: int) -> list[Measure]:
    """`rows` of 256 tokens a step over all ranks."""
    with tempfile.TemporaryDirectory() as folder:
        config = Config(
            job=JobSection(dump_folder=folder),
            model=model,
            parallelism=layout,
            training=TrainingSection(seq_len=4 * LENGTH, local_batch_size=4),
            cold_start=ColdStartSection(steps=10_000),
        )
        mesh = ModelMesh(this_host(), "trainer", config, shape_of(model), {})
        await mesh.start()
        await mesh.begin_phase("cold_start", 0)
        snapshots, at = Snapshots(mesh, None), 0
        seconds: dict[bool, list[float]] = {True: [], False: []}
        worked: dict[bool, list[float]] = {True: [], False: []}
        taking, copying = [], []
        for pair in range(WARM_UP + pairs):
            for taken in (True, False) if pair % 2 else (False, True):
                packed, before = [batches(at, rows, mesh)], cpu_seconds()
                begun = await timed(snapshots.take("cold_start", at, "{}")) if taken else 0.0
                whole = begun + await timed(mesh.step(packed))
                at += 1
                if pair >= WARM_UP:
                    seconds[taken].append(whole)
                    worked[taken].append(cpu_seconds() - before)
                    taking += [begun] if taken else []
            for asked in mesh.spans().values():
                found = [s.nanoseconds * 1e-9 for s in (await asked).spans if s.name == "snapshot"]
                copying += found if pair >= WARM_UP else []
        newest = snapshots.newest()
        assert newest is not None
        from_snapshot, from_disk = [], []
        await mesh.save(at, "{}")
        for _ in range(3):
            from_snapshot.append(await timed(mesh.begin_phase("cold_start", newest)))
            from_disk.append(await timed(mesh.begin_phase("cold_start", at)))
        await mesh.close()
        await mesh.stop()
    nbytes = snapshots.nbytes["trainer"]
    snapshots.close()
    case = f"{case}, {len(nbytes)} ranks, {rows * 4 * LENGTH} tokens a step"
    return [
        Measure("step", case, "bytes of one snapshot, MB a rank", [each / 1e6 for each in nbytes]),
        Measure("step", case, "step without, s", seconds[False]),
        Measure("step", case, "step with, s", seconds[True], ratio(seconds[True], seconds[False])),
        Measure("step", case, "CPU of the ranks without, s", worked[False]),
        Measure("step", case, "CPU of the ranks with, s", worked[True], ratio(worked[True], worked[False])),
        Measure("step", case, "until all ranks have begun, s", taking, ratio(taking, seconds[False])),
        Measure("step", case, "from begin to whole, s", copying, ratio(copying, seconds[False])),
        Measure("restore", case, "from a checkpoint, s", from_disk),
        Measure("restore", case, "from a snapshot, s", from_snapshot, ratio(from_snapshot, from_disk)),
    ]


def ratio(values: list[float], base: list[float]) -> float:
    """Pair by pair where they were taken in turn."""
    if len(values) == len(base):
        return statistics.median(value / other for value, other in zip(values, base, strict=True))
    return statistics.median(values) / statistics.median(base)


def cpu_seconds() -> float:
    """Of the ranks, all their threads, by each process's own CPU clock."""
    return sum(time.clock_gettime((~pid << 3) | 2) for pid in deaths.alive().values())


async def timed(call: Any) -> float:
    began = time.perf_counter()
    await call
    return time.perf_counter() - began


def batches(step: int, rows: int, mesh: ModelMesh) -> list[Batch]:
    tokens = torch.randint(3, 60, (4 * rows, LENGTH), generator=torch.Generator().manual_seed(step)).tolist()
    samples = [Sample(each, [1] * LENGTH) for each in tokens]
    return pack(samples, shards=mesh.dp, seq_len=4 * LENGTH, rows_per_microbatch=4, pad_id=0)


def append(path: Path, measures: list[Measure]) -> None:
    host, engines = machine(), versions()
    common = {
        "date": time.strftime("%Y-%m-%d"),
        "commit": git_commit()[:12],
        "machine": f"{host['cores']} x {host['cpu']}",
        "engines": ", ".join(f"{name} {engines[name]}" for name in ("torch", "torchtitan", "torchmonarch")),
        "load": f"{os.getloadavg()[0]:.1f}",
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    new = not path.exists()
    with path.open("a", newline="") as file:
        writer = csv.DictWriter(file, ["part", "case", "measure", "median", "min", "max", "runs", "ratio", *common])
        if new:
            writer.writeheader()
        for m in measures:
            figures = {"median": statistics.median(m.values), "min": min(m.values), "max": max(m.values)}
            row = {name: f"{value:.4g}" for name, value in figures.items()}
            ratio = "" if m.ratio is None else f"{m.ratio:.3f}"
            named = {"part": m.part, "case": m.case, "measure": m.measure, "runs": len(m.values), "ratio": ratio}
            writer.writerow(named | row | common)
            print(f"{m.case:52s} {m.measure:34s} {row['median']:>9s}  [{row['min']} .. {row['max']}]  {ratio}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", default=["copy", "mesh"], metavar="copy | mesh")
    parser.add_argument("--pairs", type=int, default=20, help="steps with a snapshot, and as many without")
    parser.add_argument("--csv", type=Path, default=HERE / "docs" / "benchmarks" / "snapshots.csv")
    arguments = parser.parse_args()
    prepare_environment()
    torch.set_num_threads(1)
    measures: list[Measure] = []
    if "copy" in arguments.parts:
        for megabytes in (1, 100):
            measures += copies(megabytes, arguments.pairs)
    if "mesh" in arguments.parts:
        for case, model, layout, rows in (
            ("tiny", TINY, ParallelismSection(), 16),
            ("tiny", TINY, SHARDED, 16),
            ("8M parameters", LARGE, ParallelismSection(), 4),
            ("8M parameters", LARGE, SHARDED, 8),
        ):
            measures += asyncio.run(meshes(case, model, layout, rows, arguments.pairs))
    append(arguments.csv, measures)


if __name__ == "__main__":
    main()
