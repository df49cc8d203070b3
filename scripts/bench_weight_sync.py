#!/usr/bin/env python3
"""Measure what a weight sync costs, part by part, and compare it with other ways to move weights. Appends CSV rows.

    .venv/bin/python scripts/bench_weight_sync.py                    # all parts
    .venv/bin/python scripts/bench_weight_sync.py sync --megabytes 50 --layouts 2x2     # about a minute

plan   on paper: seconds to plan a 70B model from 512 trainer ranks to 64 generator ranks, and bytes on the wire
pack   one process: a rank's shards into its readers' runs, compared with a plain copy of equal size
sync   real processes: trainer ranks (FSDP, fp32) to readers (tensor parallelism, bf16), each way in turn
share  remote reads into 1, 2 and 4 replicas of one host: bytes that cross, seconds, and a bare read of equal size
load   the same to a vLLM engine that samples all the time: how long a sync pauses it, how much of the sync is hidden

Parts that run on one thread are in that thread's CPU seconds, so that a busy machine matters little: packing, writing,
and the plain copies just before each, which they are compared with (`ratio` and shares: minimum over minimum). Parts
that wait on other processes are in wall seconds, comparable only within a run. All ways must lead to equal live
parameters. torchstore, another way, is not measured: it is not installed here.
"""

import argparse
import asyncio
from pathlib import Path

from monarch.config import configure

from bench.rows import BENCHMARKS, FIGURES, RAN_ON, report
from bench.sync_load import LARGEST_SERVED, loading
from bench.sync_plan import packing, planning
from bench.sync_shared import sharing
from bench.sync_ways import syncing
from titan_rl.environment import prepare_environment

COLUMNS = ("part", "case", "way", "measure", *FIGURES, "ratio", "note", *RAN_ON)
REPLICAS = (1, 2, 4)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", choices=["plan", "pack", "sync", "share", "load", []], default=[])
    parser.add_argument("--megabytes", type=int, nargs="+", default=[50, 250, 1000, 2000])
    parser.add_argument("--layouts", nargs="+", default=["1x1", "2x2", "4x1", "1x4", "4x4"], help="ranks x readers")
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--csv", type=Path, default=BENCHMARKS / "weight_sync.csv")
    a = parser.parse_args()
    parts = a.parts or ["plan", "pack", "sync", "share", "load"]
    if "plan" in parts:
        report(a.csv, COLUMNS, planning())
    if "pack" in parts:
        report(a.csv, COLUMNS, packing(a.repeats))
    configure(rdma_allow_tcp_fallback=True)
    if "sync" in parts:
        for megabytes in a.megabytes:
            for layout in a.layouts:
                ranks, readers = map(int, layout.split("x"))
                report(a.csv, COLUMNS, asyncio.run(syncing(megabytes, ranks, readers, a.repeats)))
    if "share" in parts:
        for megabytes in a.megabytes:
            for replicas in REPLICAS:
                report(a.csv, COLUMNS, asyncio.run(sharing(megabytes, replicas, a.repeats)))
    if "load" in parts:
        prepare_environment()
        for megabytes in [size for size in a.megabytes if size <= LARGEST_SERVED]:
            report(a.csv, COLUMNS, asyncio.run(loading(megabytes, a.repeats)))


if __name__ == "__main__":
    main()
