#!/usr/bin/env python3
"""Measure how far the log-probs of sampling and training are apart, by dtype, by weight_sync.in_flight, and by
generator.quantization.

    .venv/bin/python scripts/bench_parity.py                     # about 5 minutes
    .venv/bin/python scripts/bench_parity.py --dtypes bfloat16
    .venv/bin/python scripts/bench_parity.py --quantizations     # SmolLM2 in 8 bits; about 10 minutes

Every case is a whole run with lag 1 and real updates: one trainer process, one engine, rollouts of long-tailed lengths,
so that each weight sync meets many unfinished samples. "lag 0" is the same run without a lag: its gap is between the
two engines alone, while the others also measure the age of the tokens. The figures are over the steps of one run.
Quantizations are compared without a lag, on the SmolLM2 that `grpo_smollm2` trains, all with the same correction.
Appends to docs/benchmarks/parity.csv.
"""

import argparse
import tempfile
from collections.abc import Iterator
from pathlib import Path

from bench.async_overlap import LONG_TAILED, WORKLOAD
from bench.rows import BENCHMARKS, FIGURES, RAN_ON, Row, metric_lines, report, run_to_end

COLUMNS = ("part", "case", "way", "measure", *FIGURES, "note", *RAN_ON)
DTYPES = {  # (trainer's compute, generator); the trainer's weights are float32
    "float32": ("float32", "float32"),
    "bfloat16": ("bfloat16", "bfloat16"),
    "mixed": ("float32", "bfloat16"),
}
WAYS = {
    "lag 0": {"rollout.max_staleness_steps": 0},
    **{how: {"rollout.max_staleness_steps": 1, "weight_sync.in_flight": how} for how in ("swap", "keep", "drain")},
}
MEASURES = {
    "log-prob gap, mean": "logprob_gap/mean",
    "log-prob gap, max": "logprob_gap/max",
    "exp |gap|, mean": "logprob_gap/mult",
    "correction, least weight": "off_policy/weight_min",
    "correction, effective samples": "off_policy/ess",
    "policy age, mean": "policy_age/mean",
    "tokens recomputed per sync": "engine/recomputed_tokens",
    "sampling, s": "engine/sampling_seconds",
    "step, s": "time/step",
}
SMALLER = {
    "rollout.groups_per_step": 8,
    "rollout.max_new_tokens": 96,
    "training.seq_len": 128,
    "generator.max_num_seqs": 16,  # the engine never waits, so that every sync meets unfinished samples
    "optimizer.lr": 1e-4,  # at grpo_llama's own rate a token's age hides everything else
}
QUANTIZATIONS = {"none": {}, "none, bfloat16": {"generator.dtype": "bfloat16"}, "int8": {}, "fp8": {}}
QUANTIZED_STEPS = 3
CORRECTED = {"algorithm.proximal": "trainer", "algorithm.correction": "token_tis"}  # the default of int8 and fp8
FIRST, LAST = 3, 2  # steps before the backlog is even, and while nothing is left to sample


def parity(dtype: str, way: str, steps: int) -> Iterator[Row]:
    trainer, generator = DTYPES[dtype]
    with tempfile.TemporaryDirectory() as folder:
        run_to_end(
            {
                **WORKLOAD,
                **SMALLER,
                **WAYS[way],
                "training.mixed_precision_param": trainer,
                "generator.dtype": generator,
                "training.steps": FIRST + steps + LAST,
                "job.dump_folder": folder,
            },
            program=[str(LONG_TAILED)],
        )
        lines = metric_lines(Path(folder), "rl")[FIRST : FIRST + steps]
    note = f"{trainer} trainer, {generator} generator, {steps} steps"
    for measure, key in MEASURES.items():
        yield Row("parity", dtype, measure, [line[key] for line in lines], way=way, note=note)


def quantized(name: str) -> Iterator[Row]:
    with tempfile.TemporaryDirectory() as folder:
        own = {"eval.size": 0, "checkpoint.enable": "false", "metrics.trackers": "[]", "job.dump_folder": folder}
        own |= {"training.steps": QUANTIZED_STEPS, "generator.quantization": name.partition(",")[0]}
        run_to_end({**own, **CORRECTED, **QUANTIZATIONS[name]}, config="grpo_smollm2")
        lines = metric_lines(Path(folder), "rl")
    note = f"SmolLM2-135M, float32 trainer, lag 0, {QUANTIZED_STEPS} steps"
    for measure, key in MEASURES.items():
        if key.startswith(("logprob_gap/", "off_policy/")):
            yield Row("parity", "quantization", measure, [line[key] for line in lines], way=name, note=note)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--csv", type=Path, default=BENCHMARKS / "parity.csv")
    parser.add_argument("--dtypes", nargs="+", choices=DTYPES, default=[*DTYPES])
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=[*WAYS])
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--quantizations", nargs="*", choices=QUANTIZATIONS, help="these instead; alone: all")
    a = parser.parse_args()
    if a.quantizations is not None:
        for name in a.quantizations or QUANTIZATIONS:
            report(a.csv, COLUMNS, quantized(name))
        return
    for dtype in a.dtypes:
        for way in a.ways:
            report(a.csv, COLUMNS, parity(dtype, way, a.steps))


if __name__ == "__main__":
    main()
