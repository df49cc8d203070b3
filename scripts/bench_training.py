#!/usr/bin/env python3
"""Measure a training step against bare torch on the same samples, weights and cores. Appends rows to a CSV.

    .venv/bin/python scripts/bench_training.py                                # both shapes, 10 rounds
    .venv/bin/python scripts/bench_training.py --shape small --rows 8 32 512 --csv /tmp/training.csv

Ways: transformers' LlamaForCausalLM on one padded batch (log-probs of the targets, GRPO's loss, fused AdamW, all
cores), our trainer on one rank with all cores, and on two FSDP2 ranks that share them, also without sharing prompts.
They step in turn, in separate processes, without Monarch. The first losses and gradient norms must agree.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from bench.rows import BENCHMARKS, FIGURES, RAN_ON, Row, in_turn, report
from bench.training_ranks import Settings
from titan_rl.actors.meeting import MEETING
from titan_rl.meshes.starter import WORKER_ENV

COLUMNS = ("case", "variant", "measure", *FIGURES, "ratio", "note", *RAN_ON)
BARE = "bare torch"
WARM_UP = 2
SCRIPTS = str(Path(__file__).resolve().parent)


@dataclass(frozen=True, slots=True)
class Shape:
    case: str
    model: dict[str, Any]
    samples: dict[str, Any]


SHAPES = {
    "small": Shape(
        "grpo_llama: 0.8M, 16 x 16 samples of 11 tokens",
        {
            "hidden_size": 128,
            "num_hidden_layers": 4,
            "num_attention_heads": 4,
            "intermediate_size": 384,
            "vocab_size": 64,
        },
        {"groups": 16, "samples": 16, "prompt": 7, "shortest": 4, "longest": 4, "seq_len": 128},
    ),
    "20m": Shape(
        "20M, 4 x 8 samples of 16 + 20..256 tokens",
        {
            "hidden_size": 384,
            "num_hidden_layers": 8,
            "num_attention_heads": 6,
            "intermediate_size": 1024,
            "vocab_size": 4096,
        },
        {"groups": 4, "samples": 8, "prompt": 16, "shortest": 20, "longest": 256, "seq_len": 512},
    ),
}


class Ranks:
    """The processes of one way."""

    def __init__(self, kind: str, settings: Settings, count: int, threads: int) -> None:
        own = {"OMP_NUM_THREADS": str(threads), MEETING: f"{settings.dump_folder}/meeting", "WORLD_SIZE": str(count)}
        env = {**os.environ, **WORKER_ENV, **own, "LOCAL_WORLD_SIZE": str(count)}
        if kind == "bare":
            del env["OMP_WAIT_POLICY"]  # which our ranks need, and which slows torch down alone on its cores
        env["PYTHONPATH"] = os.pathsep.join([SCRIPTS, str(Path(SCRIPTS).parent)])
        command = [sys.executable, "-m", "bench.training_ranks", kind, json.dumps(asdict(settings))]
        self._ranks = [
            subprocess.Popen(
                command, env={**env, "RANK": str(i), "LOCAL_RANK": str(i)}, stdin=-1, stdout=-1, stderr=None, text=True
            )
            for i in range(count)
        ]
        self.answers()

    def step(self) -> dict[str, Any]:
        """Return the ranks' loss and norm, the slowest one's seconds and the sum of their CPU seconds."""
        for rank in self._ranks:
            assert rank.stdin is not None
            rank.stdin.write("step\n")
            rank.stdin.flush()
        found = self.answers()
        return {**found[0], "wall": max(f["wall"] for f in found), "cpu": sum(f["cpu"] for f in found)}

    def answers(self) -> list[dict[str, Any]]:
        return [next(self._lines(rank)) for rank in self._ranks]

    def _lines(self, rank: "subprocess.Popen[str]") -> Iterator[dict[str, Any]]:
        for line in rank.stdout or ():
            if line.startswith("FOUND "):
                yield json.loads(line.removeprefix("FOUND "))
        raise RuntimeError(f"a rank ended with {rank.wait()}")

    def end(self) -> None:
        for rank in self._ranks:
            rank.kill()
            rank.wait()


def write_model(shape: Shape, folder: Path) -> None:
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    heads = shape.model["num_attention_heads"]
    config = LlamaConfig(
        **{**shape.model, "num_key_value_heads": heads // 2, "head_dim": shape.model["hidden_size"] // heads},
        max_position_embeddings=2048,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
        rms_norm_eps=1e-6,
        tie_word_embeddings=False,
    )
    LlamaForCausalLM(config).save_pretrained(folder)


def measured(shape: Shape, rows: Sequence[int], rounds: int, variant: str, cores: int) -> Iterator[Row]:
    with tempfile.TemporaryDirectory() as temporary, ExitStack() as stack:
        folder = Path(temporary)
        write_model(shape, folder / "model")
        every = Settings(folder=str(folder / "model"), dump_folder="", rows=0, **shape.samples)
        ways: dict[str, Ranks] = {}

        def start(way: str, kind: str, rows: int, count: int, threads: int, *, share: bool = True) -> None:
            own = folder / str(len(ways))
            own.mkdir()
            ways[way] = Ranks(kind, replace(every, dump_folder=str(own), rows=rows, share=share), count, threads)
            stack.callback(ways[way].end)

        start(BARE, "bare", 0, 1, cores)
        for number in rows:
            named = f"{number} rows" if number else "rows by tokens"
            start(f"{variant}: 1 rank, {cores} threads, {named}", "titan", number, 1, cores)
            start(f"{variant}: 2 FSDP2 ranks, 1 thread, {named}", "titan", number, 2, 1)
            start(f"{variant}: 2 FSDP2 ranks, 1 thread, {named}, own prompts", "titan", number, 2, 1, share=False)
        first = {way: ranks.step() for way, ranks in ways.items()}
        for way, found in first.items():
            for name in ("loss", "norm"):
                if abs(found[name] - first[BARE][name]) > 1e-4 * max(1, abs(first[BARE][name])):
                    raise RuntimeError(f"{way}: expected the {name} {first[BARE][name]}, found {found[name]}")
        for ranks in ways.values():
            for _ in range(WARM_UP):
                ranks.step()
        taken: dict[str, list[dict[str, Any]]] = {way: [] for way in ways}
        for _, way in in_turn(list(ways), rounds):
            taken[way].append(ways[way].step())
    for measure in ("wall", "cpu"):
        base = min(step[measure] for step in taken[BARE])
        for way, steps in taken.items():
            values = [step[measure] for step in steps]
            yield Row("training", shape.case, f"{measure} s", values, way, min(values) / base)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=(*SHAPES, "all"), default="all")
    parser.add_argument("--rows", type=int, nargs="+", default=[0], help="training.local_batch_size; 0: by tokens")
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--variant", default="ours")
    parser.add_argument("--cores", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--csv", type=Path, default=BENCHMARKS / "training.csv")
    a = parser.parse_args()
    for name in SHAPES if a.shape == "all" else (a.shape,):
        report(a.csv, COLUMNS, measured(SHAPES[name], a.rows, a.rounds, a.variant, a.cores))


if __name__ == "__main__":
    main()
