"""Compare every family with transformers and with vLLM, and write the table of docs/benchmarks/conformance.md.

  python scripts/conformance.py                                  all cases
  python scripts/conformance.py --case "Mistral, window 16"      one, without writing the table

vLLM samples from folders that transformers made, with random weights. Then transformers, and the trainer on four
meshes, compute the log-probs of the same tokens. Everything is float32 on a CPU.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from torch.multiprocessing.spawn import spawn

from bench.family_folders import CASES, make_folder
from bench.family_ranks import MESHES, rank_of_mesh

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs/benchmarks/conformance.md"
BEGIN, END = "<!-- conformance: written by scripts/conformance.py -->", "<!-- end of conformance -->"
MOST = 1e-5  # mean difference of log-probs


def measured(names: list[str], folder: Path) -> dict[str, Any]:
    """Return the figures of each case."""
    from titan_rl.actors.vllm import launch_env, vllm_cpu

    for name in names:
        make_folder(name, folder / name)
    env = {**os.environ, **launch_env.ENV, **vllm_cpu.ENV, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    env |= {"HF_HUB_OFFLINE": "1", "VLLM_DIST_IDENT": f"conformance_{os.getpid()}"}
    engine = [sys.executable, str(ROOT / "scripts/bench/family_ranks.py"), str(folder)]
    subprocess.run([*engine, *names], env=env, check=True)
    sampled = json.loads((folder / "vllm.json").read_text())
    os.environ["OMP_NUM_THREADS"] = "1"
    meshes = {}
    for mesh, (data, tensor) in MESHES.items():
        spawn(rank_of_mesh, (str(folder), names, mesh), nprocs=data * tensor)
        meshes[mesh] = json.loads((folder / f"mesh {mesh}.json").read_text())
    figures = {}
    for name in names:
        sequences = sampled[name]["sequences"]
        of_vllm = [logprobs for _, _, logprobs in sequences]
        of_hf = logprobs_of_transformers(folder / name, sequences)
        on = {mesh: answers[name] for mesh, answers in meshes.items()}
        gaps = {m: gap(each["logprobs"], of_vllm) for m, each in on.items() if "logprobs" in each}
        figures[name] = {
            "tokens": sum(map(len, of_vllm)),
            "load": "logprobs" in on["1"],
            "trainer - transformers": gap(on["1"]["logprobs"], of_hf),
            "vLLM - transformers": gap(of_vllm, of_hf),
            "trainer - vLLM": gaps["1"],
            "fingerprint": sampled[name]["fingerprint"],
            "export": {mesh: each["export"] for mesh, each in on.items() if "export" in each},
            "meshes": gaps,
            "refused": {mesh: each["refused"] for mesh, each in on.items() if "refused" in each},
        }
    return figures


def logprobs_of_transformers(folder: Path, sequences: list[Any]) -> list[list[float]]:
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()
    found = []
    for context, new, _ in sequences:
        ids = torch.tensor([context + new])
        with torch.no_grad():
            logprobs = model(ids).logits[0, len(context) - 1 : -1].log_softmax(-1)
        found.append(logprobs.gather(-1, ids[0, len(context) :, None])[:, 0].tolist())
    return found


def gap(ours: list[list[float]], theirs: list[list[float]]) -> list[float]:
    """Return the mean and the largest difference."""
    pairs = [abs(x - y) for a, b in zip(ours, theirs, strict=True) for x, y in zip(a, b, strict=True)]
    return [sum(pairs) / len(pairs), max(pairs)]


def wrong(figures: dict[str, Any]) -> list[str]:
    """Return what misses its bound."""
    found = []
    for name, each in figures.items():
        gaps = {key: each[key] for key in ("trainer - transformers", "vLLM - transformers")} | each["meshes"]
        found += [f"{name}: {key} is {mean:.1e}" for key, (mean, _) in gaps.items() if not mean <= MOST]
        found += [f"{name}: the export of {mesh} is another" for mesh, same in each["export"].items() if not same]
        found += [] if each["fingerprint"] else [f"{name}: vLLM's loader makes other parameters than the weight plan"]
    return found


def table(figures: dict[str, Any]) -> str:
    """Return the figures as Markdown: mean differences of log-probs."""
    heads = ["case", "loads", "trainer vs transformers", "vLLM vs transformers"]
    heads += [f"trainer vs vLLM, {mesh}" for mesh in MESHES] + ["refit fingerprint", "export"]
    rows = [heads, ["---"] * len(heads)]
    for name, each in figures.items():
        cells = [name, "yes" if each["load"] else "no"]
        cells += [f"{each[key][0]:.1e}" for key in ("trainer - transformers", "vLLM - transformers")]
        cells += [f"{each['meshes'][mesh][0]:.1e}" if mesh in each["meshes"] else "refused" for mesh in MESHES]
        cells += ["equal" if each["fingerprint"] else "OTHER"]
        cells += ["equal" if all(each["export"].values()) else "OTHER"]
        rows.append(cells)
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--case", action="append", choices=list(CASES), help="measure this case only (repeatable)")
    parser.add_argument("--json", type=Path, help="also write the figures to this file")
    given = parser.parse_args(argv)
    with tempfile.TemporaryDirectory(prefix="conformance-") as folder:
        figures = measured(given.case or list(CASES), Path(folder))
    print(table(figures))
    if given.json:
        given.json.write_text(json.dumps(figures, indent=1))
    if not given.case:
        before, _, rest = DOCS.read_text().partition(BEGIN)
        DOCS.write_text(f"{before}{BEGIN}\n{table(figures)}\n{END}{rest.partition(END)[2]}")
    problems = wrong(figures)
    print(*problems, sep="\n")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
