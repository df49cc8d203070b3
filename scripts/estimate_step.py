#!/usr/bin/env python3
"""Estimate a step of the Llama 3.1 8B presets on 8 H100, term by term, and how much of it is avoidable.

    .venv/bin/python scripts/estimate_step.py            # the table of docs/benchmarks.md
    .venv/bin/python scripts/estimate_step.py --csv docs/benchmarks/step_8b.csv    # every term, formula and source
    .venv/bin/python scripts/estimate_step.py --answers 128 384 --activation_checkpoint.mode selective

No step was measured. A term is the work of the resolved preset, in FLOP or bytes, over a rate, whose source
scripts/bench/estimate_facts.py names. `avoidable`: seconds that the best known practice, named by the term, does not
pay. An overlap hides the shorter side. Rewards, messages, evaluation and compilation are left out.
"""

import argparse
import csv
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from bench.estimate_terms import Case, Term
from titan_rl.config.toml import find, load
from titan_rl.preflight.memory import GIB, on_gpus
from titan_rl.preflight.shapes import shape_of

LLAMA_8B = {"n_layers": 32, "dim": 4096, "n_heads": 32, "n_kv_heads": 8, "hidden_dim": 14336, "vocab_size": 128256}
ANSWERS = (512, 1024)  # tokens of the shortest and the longest; all lengths between are as frequent
NO_LAG = (("rollout.max_staleness_steps", "0"), ("training.stream_groups", "0"))
CASES = {
    "grpo_llama3_8b": ("grpo_llama3_8b", ()),
    "without lag and streaming": ("grpo_llama3_8b", NO_LAG),
    "the same with rows of 4096": ("grpo_llama3_8b", (*NO_LAG, ("training.seq_len", "4096"))),
    "grpo_llama3_8b_colocated": ("grpo_llama3_8b_colocated", ()),
}


@dataclass(frozen=True, slots=True)
class Step:
    """The terms of both sides. They take turns, or overlap: then the longer one bounds the step."""

    terms: list[Term]
    overlaps: bool
    colocated: bool

    @property
    def sides(self) -> list[float]:
        return [sum(t.seconds for t in self.terms if t.side == side) for side in ("trainer", "generator")]

    @property
    def seconds(self) -> float:
        return max(self.sides) if self.overlaps else sum(self.sides)

    @property
    def least(self) -> float:
        """Return the seconds without the avoidable ones. On separate GPUs both sides then overlap."""
        spared = [sum(t.avoidable for t in self.terms if t.side == side) for side in ("trainer", "generator")]
        sides = [own - less for own, less in zip(self.sides, spared, strict=True)]
        return sum(sides) if self.colocated else max(sides)

    @property
    def avoidable(self) -> float:
        return 1 - self.least / self.seconds


def estimated(
    preset: str, keys: Sequence[tuple[str, str]], prompt: int = 256, answers: Sequence[int] = ANSWERS
) -> Step:
    model = [("model.hf_assets_path", ""), *((f"model.{key}", str(value)) for key, value in LLAMA_8B.items())]
    given = load(find(preset), [*model, *keys])
    shape = shape_of(given.model)
    config = on_gpus(given, shape, int(given.hosts.gpu_memory_gb * GIB))
    samples = config.rollout.groups_per_step * config.rollout.group_size
    lengths = np.linspace(answers[0], answers[1], samples).astype(int)
    case = Case(config, shape, prompt, np.random.default_rng(0).permutation(lengths).tolist())
    trainer, generator = list(case.trainer()), list(case.generator())
    if case.parts > 1:
        seconds = sum(term.seconds for term in trainer) / case.parts / case.depth
        generator.append(Term("generator", "training of the last part", seconds, f"1 of {case.parts} parts"))
    return Step([*trainer, *generator], case.depth > 0, config.placement.kind == "colocated")


def summary(steps: dict[str, Step]) -> Iterator[str]:
    yield "| | trainer, s | engine, s | step, s | avoidable | avoidable terms, s |"
    yield "| --- " * 6 + "|"
    for name, step in steps.items():
        most = sorted(step.terms, key=lambda term: -term.avoidable)
        named = ", ".join(f"{t.name} {t.avoidable:.1f}" for t in most if t.avoidable >= step.seconds / 50)
        seconds = " | ".join(f"{value:.1f}" for value in (*step.sides, step.seconds))
        yield f"| {name} | {seconds} | {step.avoidable:.0%} | {named or 'each below 2%'} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompt", type=int, default=256, help="tokens of a prompt")
    parser.add_argument("--answers", type=int, nargs=2, default=ANSWERS, help="tokens of the shortest and longest")
    parser.add_argument("--csv", type=Path, help="write every term, with formula and sources")
    a, rest = parser.parse_known_args()
    keys = list(zip((key.removeprefix("--") for key in rest[::2]), rest[1::2], strict=True))
    steps = {name: estimated(preset, [*own, *keys], a.prompt, a.answers) for name, (preset, own) in CASES.items()}
    print("\n".join(summary(steps)))
    if a.csv:
        terms = [{"case": name, **asdict(term)} for name, step in steps.items() for term in step.terms]
        with a.csv.open("w", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, list(terms[0]), lineterminator="\n")
            writer.writeheader()
            for row in terms:
                writer.writerow({**row, **{key: f"{row[key]:.3f}" for key in ("seconds", "avoidable")}})


if __name__ == "__main__":
    main()
