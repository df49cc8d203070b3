#!/usr/bin/env python3
"""Print where the seconds of a trainer rank's update are: by span, by kernel, and by the host's functions.

    python scripts/gpu_visit/profile_update.py smollm2 qwen3-0.6b --out FOLDER     # with scripts/ on PYTHONPATH

Prints a JSON line for each shape and each training.parameter_gather. On a GPU, FOLDER gets traces of one step, for
ui.perfetto.dev. Spans are the host's: a GPU may still run their kernels.
"""

import argparse
import cProfile
import json
import os
import pstats
import sys
import time
from collections import defaultdict
from pathlib import Path
from typing import Any, Literal

import torch

from bench.gpu.measured import GIB, ON_CPU, device_events, synchronize
from bench.gpu.trainer_rank import QWEN3_0_6B, model_of, resolved, samples
from titan_rl.actors.imports import without_gc
from titan_rl.actors.titan.compiled_blocks import graphs_compiled
from titan_rl.batch.packing import UpTo, pack
from titan_rl.config import sections as c
from titan_rl.wire.spans import span

KEYS = ("dim", "n_layers", "n_heads", "n_kv_heads", "hidden_dim", "vocab_size")
SMOLLM2: dict[str, Any] = {"name": "llama3", **dict(zip(KEYS, (576, 30, 9, 3, 1536, 49152), strict=True))}
QWEN3: dict[str, Any] = {"name": "qwen3", "n_layers": 28, **QWEN3_0_6B}
TINY: dict[str, Any] = {"name": "llama3", **dict(zip(KEYS, (18, 4, 9, 3, 48, 512), strict=True))}
# Keys of the model; groups, their size, tokens of a prompt, of an answer; training.seq_len.
SHAPES = {
    "smollm2": (SMOLLM2, (8, 8, 40, (10, 17)), 128),
    "qwen3-0.6b": (QWEN3, (16, 16, 150, (100, 513)), 1024),
    "tiny": (TINY, (4, 4, 40, (10, 17)), 128),
}
STEPS, WARM = 6, 3
LONGEST = 16  # rows of each table


def profile(name: str, gather: Literal["microbatch", "update"], out: Path) -> dict[str, Any]:
    keys, sizes, seq_len = SHAPES[name]
    training = c.TrainingSection(steps=50, seq_len=seq_len, parameter_gather=gather)
    config = resolved(c.ModelSection(enable_weight_tying=True, **keys), training)
    began = time.perf_counter()
    model, shape = model_of(config)
    line: dict[str, Any] = {"shape": name, "parameter_gather": gather, "build_s": time.perf_counter() - began}
    rows = UpTo(config.training.local_batch_size)
    updates = [
        pack(
            samples(seed, *sizes, shape.vocab_size),
            shards=1,
            seq_len=seq_len,
            rows_per_microbatch=rows,
            pad_id=0,
            share=True,
        )
        for seed in range(WARM)
    ]
    seconds, spans = list[float](), defaultdict[str, list[float]](list)
    with without_gc():
        for step in range(STEPS):
            synchronize()
            span.take()
            began = time.perf_counter()
            model.step(updates[step % WARM])
            synchronize()
            seconds.append(time.perf_counter() - began)
            for each in span.take().spans if step >= WARM else ():
                spans[each.name].append(each.nanoseconds / 1e6)
    batch = updates[STEPS % WARM]
    line |= {
        "microbatches": len(batch[0].microbatches),
        "rows_places": list(batch[0].microbatches[0].tokens.shape),
        "step_s": sorted(seconds[WARM:])[(STEPS - WARM) // 2],
        "first_steps_s": seconds[:WARM],
        "span_ms": {each: sum(found) / (STEPS - WARM) for each, found in spans.items()},
        "graphs": graphs_compiled(),
    }
    line |= host(model, batch) if ON_CPU else device(model, batch, out / f"update-{name}-{gather}.json.gz")
    model.close()
    return line


def host(model: Any, batch: Any) -> dict[str, Any]:
    """Return the functions of one step that take the most time themselves, ms."""
    found = cProfile.Profile()
    found.runcall(model.step, batch)
    stats: Any = pstats.Stats(found)
    longest = sorted(((own, key) for key, (_, _, own, _, _) in stats.stats.items()), reverse=True)[:LONGEST]
    return {"host_ms": {f"{Path(file).name}:{line}:{name}": 1e3 * own for own, (file, line, name) in longest}}


def device(model: Any, batch: Any, trace: Path) -> dict[str, Any]:
    """Return the kernels of one step and the operations that take the host's time, and write the trace."""
    from torch.profiler import ProfilerActivity
    from torch.profiler import profile as traced

    with traced(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as found:
        model.step(batch)
        synchronize()
    found.export_chrome_trace(str(trace))
    events = found.key_averages()
    kernels = device_events(events)
    host = sorted(events, key=lambda event: -event.self_cpu_time_total)[:LONGEST]
    return {
        "kernels_ms": sum(event.self_device_time_total for event in kernels) / 1e3,
        "launches": sum(event.count for event in kernels),
        "kernel_ms": {event.key[:60]: event.self_device_time_total / 1e3 for event in kernels[:LONGEST]},
        "host_ms": {event.key[:60]: event.self_cpu_time_total / 1e3 for event in host},
        "peak_gib": torch.cuda.max_memory_allocated() / GIB,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("shapes", nargs="+", choices=SHAPES)
    parser.add_argument("--out", type=Path, default=Path("."), help="folder of the traces")
    a = parser.parse_args()
    for name in a.shapes:
        for gather in ("update", "microbatch"):
            print(json.dumps(profile(name, gather, a.out)), flush=True)
    sys.stdout.flush()
    os._exit(0)  # a process group that is not destroyed may keep an interpreter from its end


if __name__ == "__main__":
    main()
