"""What bench_exact.py runs in processes of their own: an engine, or a trainer, with exact mode or without.

python scripts/bench/exact_sides.py sampling|training PRESET usual|exact|truncated|recorded

Prints tokens per CPU second and, if kept sets are recorded, their bytes per token. "truncated" samples with top_p,
top_k and min_p; "recorded" also records the kept sets, or trains with sets as large.
"""

import os
import socket
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from titan_rl.config.auto import on_device
from titan_rl.config.sections import Config, DebugSection
from titan_rl.config.toml import find, load
from titan_rl.preflight.setup import write_model_folder
from titan_rl.preflight.shapes import shape_of

PROMPTS, SAMPLES, PROMPT, NEW = 32, 4, 12, 24
TRUNCATION = {"top_p": 0.9, "top_k": 8, "min_p": 0.05}
CONTEXTS = [[3 + (7 * i + j) % 50 for j in range(PROMPT)] for i in range(PROMPTS)]


def sampling(config: Config, folder: Path, mode: str) -> tuple[int, float]:
    """Return the tokens that an engine samples, in one batch with shared prompts, and its CPU seconds."""
    from titan_rl.actors.vllm.engine import Engine, EngineSettings
    from titan_rl.wire.types import Request, Sampling

    write_model_folder(folder / "model", shape_of(config.model))
    engine = Engine(
        EngineSettings(
            model_dir=str(folder / "model"),
            max_model_len=config.training.seq_len,
            dtype=config.generator.dtype,
            kv_cache_memory_mb=64,
            exact=config.debug.exact,
            records_kept=mode == "recorded",
        )
    )
    engine.set_version(0)
    seconds, kept = 0.0, 0
    asked = Sampling(NEW, **(TRUNCATION if mode in ("truncated", "recorded") else {}))
    for turn in ("warm-up", "measured"):
        seeds = list(range(SAMPLES))
        engine.add([Request(f"{turn} {i}", c, seeds, asked) for i, c in enumerate(CONTEXTS)])
        began = time.process_time()
        while engine.busy:
            kept += sum(len(each) for done in engine.step() for c in done.completions for each in c.kept)
        seconds = time.process_time() - began
    if mode == "recorded":
        print("BYTES", kept / (2 * PROMPTS * SAMPLES * NEW), flush=True)
    return PROMPTS * SAMPLES * NEW, seconds


def training(config: Config, folder: Path, mode: str) -> tuple[int, float]:
    """Return the tokens of a step's forward and backward on packed rows that share prompts, and its CPU seconds."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    os.environ.update(RANK="0", LOCAL_RANK="0", WORLD_SIZE="1", MASTER_ADDR="127.0.0.1", MASTER_PORT=port)
    from titan_rl.actors.titan.model import DeviceRows
    from titan_rl.actors.titan.role_model import RoleModel
    from titan_rl.batch.packing import UpTo, pack
    from titan_rl.wire.kept_sets import KeptSets
    from titan_rl.wire.types import Sample

    config = replace(config, job=replace(config.job, dump_folder=str(folder)))
    model = RoleModel(
        "trainer", config, shape_of(config.model), replace(config.parallelism, data_parallel_shard_degree=1)
    )
    samples = [
        Sample([*context, *context[:5] * 5][: PROMPT + NEW], [0] * PROMPT + [1] * NEW, {}, PROMPT)
        for context in CONTEXTS
        for _ in range(SAMPLES)
    ]
    if mode == "recorded":
        samples = [replace(s, kept=KeptSets.of(sets_of(s.tokens))) for s in samples]
    (batch,) = pack(
        samples, shards=1, seq_len=config.training.seq_len, rows_per_microbatch=UpTo(32), pad_id=0, share=True
    )
    seconds = 0.0
    for _ in ("warm-up", "measured"):
        began = time.process_time()
        for rows in batch.microbatches:
            logprob, _ = model.logprobs(DeviceRows.of(rows, model.device), temperature=1.0)
            (-logprob.sum() / batch.tokens).backward()
        seconds = time.process_time() - began
    return batch.tokens, seconds


def sets_of(tokens: Sequence[int] | np.ndarray) -> list[bytes]:
    """Return a set of top_k tokens for each token."""
    sets = (sorted({token, *range(token % 5, token % 5 + TRUNCATION["top_k"] - 1)}) for token in tokens)
    return [np.array(each, np.uint32).tobytes() for each in sets]


def main(side: str, preset: str, mode: str) -> None:
    measure: Callable[[Config, Path, str], tuple[int, float]] = {"sampling": sampling, "training": training}[side]
    config = replace(on_device(load(find(preset)), "cpu"), debug=DebugSection(exact=mode == "exact"))
    with tempfile.TemporaryDirectory() as folder:
        tokens, seconds = measure(config, Path(folder), mode)
    print("FOUND", tokens / seconds, flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
