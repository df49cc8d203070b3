"""The rates of scripts/estimate_step.py, each with its source: a row of a report of an H200, or a named figure."""

import re
from dataclasses import dataclass
from pathlib import Path

SECOND, THIRD = (f"2026-11-26-h200-{name}.md" for name in ("second", "third"))


@dataclass(frozen=True, slots=True)
class Fact:
    value: float
    source: str


def row(report: str, part: str, what: str, column: int = 2, unit: float = 1) -> Fact:
    """Read the first number in a column of a report's row."""
    text = (Path(__file__).parents[2] / "docs/benchmarks/gpu" / report).read_text(encoding="utf-8")
    lines = text.split(f"\n## {part}\n")[1].split("\n## ")[0].splitlines()
    cell = next(line for line in lines if line.startswith(f"| {what}")).split("|")[column]
    number = re.search(r"\d+(\.\d+)?(e[+-]?\d+)?", cell)
    assert number is not None, cell
    return Fact(float(number[0]) * unit, f"{report}, {part}: {what}")


SHEET = "NVIDIA's data sheet"
FACTS = {
    "hbm": Fact(3.35e12, f"{SHEET}: H100 SXM, bytes/s"),
    "hbm_h200": Fact(4.8e12, f"{SHEET}: H200, bytes/s"),
    "nvlink": Fact(450e9, f"{SHEET}: H100 SXM, bytes/s each way"),
    "copy": row(THIRD, "machine", "copy on the device", unit=1e12),
    "matmul": row(THIRD, "machine", "matmul 8192^3 torch.bfloat16", unit=1e12),
    "to_host": row(THIRD, "machine", "device to pinned host", unit=1e9),
    "kernels": row(THIRD, "compiled", "rows 8: seconds of all kernels"),  # one microbatch, Qwen3 0.6B
    "launching": row(THIRD, "compiled", "rows 1: the host's share", 3, unit=1 / 8),  # a microbatch of it, by the host
    "small_parameters": row(THIRD, "compiled", "build", 3, unit=1e6),
    "small_head": Fact(151936 * 1024, "Qwen3 0.6B: tied head"),
    "small_layers": Fact(28, "Qwen3 0.6B"),
    "small_width": Fact(1024, "Qwen3 0.6B"),
    "small_places": Fact(8 * 1984, f"{THIRD}, compiled: rows 8"),
    "head": row(SECOND, "speed", "titan_rl forward and backward", unit=1e-3 / 4096),  # a target of Llama 3's
    "plain_head": row(SECOND, "speed", "plain torch", unit=1e-3 / 4096),
    "pack": row(SECOND, "weights", "version 3: pack and hash", 3, unit=1e9),
    "write": row(SECOND, "weights", "write, s", 3, unit=1e9),
    "verify": row(SECOND, "checksums", "hash 1 GiB, device", unit=1e9),
    "of_nvlink": Fact(0.8, "assumed: NCCL's share of the link's rate"),
    "nccl_sms": Fact(16 / 132, "assumed: multiprocessors that a collective takes from the kernels beside it"),
    "gap": Fact(4e-3, "vllm-project/vllm issue 6854: between synchronous decode steps; not measured here"),
    "sampler": Fact(6, "assumed: passes over float32 logits"),
    "wake": Fact(1.0, "assumed: a sleeping engine maps its memory again"),
}


def rate(name: str) -> float:
    return FACTS[name].value


def hbm() -> float:
    """Return the bytes/s of an H100's memory, at the share of its data sheet that an H200 reached."""
    return rate("hbm") * rate("copy") / rate("hbm_h200")


def broadcast(parameters: int) -> float:
    """Return the seconds in which weights of 2 bytes cross a GPU's NVLink."""
    return 2 * parameters / (rate("nvlink") * rate("of_nvlink"))


def sources(names: str) -> str:
    """Return the sources of facts by the beginnings of their names."""
    chosen = [FACTS[key].source for name in names.split() for key in FACTS if key.startswith(name)]
    return "; ".join(dict.fromkeys(chosen))
