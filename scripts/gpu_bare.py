#!/usr/bin/env python3
"""Show titan_rl's CUDA paths on one GPU without vLLM and Monarch, in at most five minutes, and write a report.

    python3 -m pip install --no-index --no-deps --target /tmp/site .whl/*.whl
    PYTHONPATH=$PWD:/tmp/site python3 scripts/gpu_bare.py --out gpu_bare.md
    PYTHONPATH=$PWD:/tmp/site python3 scripts/gpu_bare.py --only head eager     # some parts
    .venv/bin/python scripts/gpu_bare.py --device cpu                            # tries this script: tiny shapes

The machine has torch >= 2.11 with CUDA, triton, numpy and transformers. Carry the wheels of torchtitan 0.3.0,
spmd_types 0.2.3, tyro, typeguard, docstring_parser, tomli, torchdata, xxhash, and, to compare with, liger-kernel 0.8.5
(optional).

    machine        what this card can do: copies, matmuls, pinned transfers
    varlen         FlashAttention over documents that share prompts, against SDPA in float32
    checksums      block hash and packing kernels, on the device and in pinned memory of the host
    head           the log-prob kernel against float64, at odd shapes, kept sets and temperatures
    speed          the same at the presets' shapes, against its own matmuls, plain torch and Liger, and by tile
    float32        a trainer rank's log-probs and gradient norm against transformers
    bfloat16       the same in bfloat16
    eager          a trainer rank's steps at 0.6B, by rows of a microbatch: seconds, MFU, the host's share, memory
    recompute      the same by modes of activation_checkpoint: seconds, memory, pinned memory of "offload"
    compiled       the same with compiled blocks, and how often they were compiled
    deterministic  two runs with debug.deterministic have equal bits
    weights        Staging in one process, Landing in another on the same GPU: pins, pack, write, verify, a flipped sign

With --device cpu, kernels run in Triton's interpreter, and parts that need a GPU are left out.
"""

import argparse
import importlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path

from titan_rl.record.provenance import git_commit, machine
from titan_rl.wire.gpus import PLANNED

ROOT = Path(__file__).resolve().parents[1]
SLOWER = 4  # times the limits, on a CPU
EXPANDABLE: dict[str, str] = dict.fromkeys(
    ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"), "expandable_segments:True"
)
"""What a run's trainers are launched with (train/bring_up.py), under torch's names before and after 2.9."""
Row = list[str]  # what, found, against, verdict


@dataclass(frozen=True, slots=True)
class Process:
    """Modes that run one after the other in one process: starting one takes as long as most modes."""

    module: str  # in scripts/bench/gpu; it has a function for each mode
    modes: Sequence[str]
    seconds: int  # limit; what earlier processes leave of theirs is added
    env: Mapping[str, str] = field(default_factory=dict)


PROCESSES = [
    Process("card", ["machine", "varlen", "checksums"], 34),
    Process("head", ["head", "speed"], 32),
    Process("trainer_numbers", ["float32", "bfloat16"], 36),
    Process("trainer_steps", ["eager", "recompute"], 72, EXPANDABLE),
    Process("trainer_steps", ["compiled"], 70, EXPANDABLE),
    Process("trainer_numbers", ["deterministic"], 22, {"CUBLAS_WORKSPACE_CONFIG": ":4096:8"}),
    Process("weights", ["weights"], 34),
]
MODULES = {mode: process.module for process in PROCESSES for mode in process.modes}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=list(MODULES), metavar="PART", default=list(MODULES))
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--out", type=Path, default=Path("gpu_bare.md"), help="the report")
    parser.add_argument("--here", action="store_true", help=argparse.SUPPRESS)  # run the parts in this process
    a = parser.parse_args()
    if a.here:
        code = run_here(a.only)
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)  # a process group that is not destroyed may keep an interpreter from its end
    a.out.parent.mkdir(parents=True, exist_ok=True)
    began, deadline = time.monotonic(), time.monotonic()
    found = dict[str, list[Row]]()
    for process in PROCESSES:
        deadline += process.seconds * (SLOWER if a.device == "cpu" else 1)
        modes = [mode for mode in process.modes if mode in a.only]
        for mode, row in rows_of(process, modes, a.device, deadline):
            found.setdefault(mode, []).append(row)
            print(f"{mode}: {' | '.join(row)}", flush=True)
        a.out.write_text(report(found, time.monotonic() - began))  # so far: this process may be ended, too
    rows = [row for rows in found.values() for row in rows]
    wrong = sum(row[3] == "WRONG" for row in rows)
    print(f"gpu_bare: {len(rows)} rows, {wrong} WRONG, {time.monotonic() - began:.0f} s; the report is {a.out}")
    return int(bool(wrong))


def run_here(modes: Sequence[str]) -> int:
    """Run modes of one process, up to the first that fails."""
    from bench.gpu import measured, older_torch

    missing = older_torch.adapt()
    for mode in modes:
        measured.begin(mode)
        if missing and mode == modes[0]:
            measured.say("added to this torch", ", ".join(missing), "TorchTitan 0.3.0 wants torch 2.13")
        began = time.monotonic()
        try:
            getattr(importlib.import_module(f"bench.gpu.{MODULES[mode]}"), mode)()
        except Exception as error:  # any error is this mode's result
            traceback.print_exc()
            measured.say(f"{mode} failed", type(error).__name__, str(error).strip().split("\n")[0][:300], False)
            return 1
        measured.say("(seconds of this part)", time.monotonic() - began)
    return 0


def rows_of(process: Process, modes: Sequence[str], device: str, deadline: float) -> Iterator[tuple[str, Row]]:
    """Yield each row of these modes, with its mode. After a mode that fails, the next ones run in a new process."""
    left = list(modes)
    while left:
        mode, failed, ended = left[0], False, execute(process, left, device, deadline)
        for line in ended.output:
            if line.startswith("BEGUN "):
                mode = line.removeprefix("BEGUN ")
            elif line.startswith("ROW "):
                with suppress(ValueError):  # the last line of a process that was killed may be cut
                    row = json.loads(line.removeprefix("ROW "))
                    failed |= row[3] == "WRONG" and row[0] == f"{mode} failed"
                    yield mode, row
        if not ended.how:
            return
        if not failed:
            yield mode, [f"{mode} failed", ended.how, "", "WRONG"]
        left = left[left.index(mode) + 1 :]


@dataclass(frozen=True, slots=True)
class Ended:
    output: Sequence[str]  # lines
    how: str  # empty: well


def execute(process: Process, modes: Sequence[str], device: str, deadline: float) -> Ended:
    """Run modes in a new process group, which ends at the deadline. Its output until then is kept."""
    on_cpu = {"TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""} if device == "cpu" else {}
    seconds = deadline - time.monotonic()
    if seconds < 1:
        return Ended([], "not run: no time was left")
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as err:
        child = subprocess.Popen(
            [sys.executable, __file__, "--here", "--only", *modes],
            env={**os.environ, PLANNED: device, **on_cpu, **process.env},
            stdout=out,
            stderr=err,
            start_new_session=True,
        )
        how = f"stopped after {seconds:.0f} s"
        with suppress(subprocess.TimeoutExpired):
            code = child.wait(seconds)
            how = f"exit code {code}" if code else ""
        with suppress(ProcessLookupError):
            os.killpg(child.pid, signal.SIGKILL)
        child.wait()
        texts = list[str]()
        for file in (out, err):
            file.seek(0)
            texts.append(file.read())
    if how:
        print(f"gpu_bare: {', '.join(modes)}: {how}\n{texts[1][-4000:]}", file=sys.stderr, flush=True)
    return Ended(texts[0].splitlines(), how)


def report(found: Mapping[str, Sequence[Row]], seconds: float) -> str:
    rows = [row for rows in found.values() for row in rows]
    wrong = sum(row[3] == "WRONG" for row in rows)
    card = ", ".join(sorted(set(machine()["gpus"]))) or "a CPU"
    lines = [
        f"# titan_rl on {card}, torch {metadata.version('torch')}, triton {metadata.version('triton')}",
        "",
        f"titan_rl at {git_commit(ROOT)}; {len(rows)} rows, {wrong} WRONG, {seconds:.0f} s",
    ]
    for mode, rows in found.items():
        lines += ["", f"## {mode}", "", "| what | found | against | |", "|---|---|---|---|"]
        lines += ["| " + " | ".join(cell.replace("|", "/") for cell in row) + " |" for row in rows]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    sys.exit(main())
