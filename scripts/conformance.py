"""Compare every family with transformers and with vLLM, and write the table of docs/models.md.

  python scripts/conformance.py                                  all cases
  python scripts/conformance.py --case "Mistral, window 16"      one, without writing the table

vLLM samples from folders that transformers made, with random weights. Then transformers, and the trainer on four
meshes, compute the log-probs of the same tokens. Everything is float32 on a CPU. "exact mode" is the number of equal
log-probs of an engine and a trainer in that mode.
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
DOCS = ROOT / "docs" / "models.md"
BEGIN, END = "<!-- conformance: written by scripts/conformance.py -->", "<!-- end of conformance -->"
MOST = 1e-5  # mean difference of log-probs


def measured(names: list[str], folder: Path) -> dict[str, Any]:
    """Return the figures of each case."""
    from titan_rl.actors.vllm import launch_env, vllm_cpu
    from titan_rl.wire.model_shape import shape_of_folder

    for name in names:
        make_folder(name, folder / name)
    env = {**os.environ, **launch_env.ENV, **vllm_cpu.ENV, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    env |= {"HF_HUB_OFFLINE": "1", "VLLM_DIST_IDENT": f"conformance_{os.getpid()}"}
    engine = [sys.executable, str(ROOT / "scripts/bench/family_ranks.py"), str(folder)]
    dense = [name for name in names if not shape_of_folder(str(folder / name), "conformance").experts]
    for mode, cases in {"usual": names, "exact": dense}.items():
        subprocess.run([*engine, mode, *cases], env=env, check=True)
    sampled = json.loads((folder / "vllm.json").read_text())
    os.environ["OMP_NUM_THREADS"] = "1"
    meshes = {}
    for mesh, (data, tensor) in MESHES.items():
        spawn(rank_of_mesh, (str(folder), names, mesh, False), nprocs=data * tensor)
        meshes[mesh] = json.loads((folder / f"mesh {mesh}.json").read_text())
    spawn(rank_of_mesh, (str(folder), dense, "1", True))
    exact = {kind: json.loads((folder / f"{kind} exact.json").read_text()) for kind in ("vllm", "mesh 1")}
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
            "exact": equal_bits(exact["vllm"][name]["sequences"], exact["mesh 1"][name]["logprobs"])
            if name in dense
            else "refused",
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


def equal_bits(sequences: list[Any], scored: list[list[float]]) -> str:
    """Return how many of the tokens have one log-prob in vLLM and in the trainer, both in exact mode."""
    pairs = [
        pair for (_, _, ours), theirs in zip(sequences, scored, strict=True) for pair in zip(ours, theirs, strict=True)
    ]
    return f"{sum(a == b for a, b in pairs)} of {len(pairs)}"


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
        equal, _, tokens = each["exact"].partition(" of ")
        found += [] if equal in (tokens, "refused") else [f"{name}: in exact mode, {each['exact']} log-probs are equal"]
        found += [] if each["fingerprint"] else [f"{name}: vLLM's loader makes other parameters than the weight plan"]
    return found


def table(figures: dict[str, Any]) -> str:
    """Return the figures as Markdown: mean differences of log-probs."""
    heads = ["case", "loads", "trainer vs transformers", "vLLM vs transformers"]
    heads += [f"trainer vs vLLM, {mesh}" for mesh in MESHES] + ["refit fingerprint", "export", "exact mode"]
    rows = [heads, ["---"] * len(heads)]
    for name, each in figures.items():
        cells = [name, "yes" if each["load"] else "no"]
        cells += [f"{each[key][0]:.1e}" for key in ("trainer - transformers", "vLLM - transformers")]
        cells += [f"{each['meshes'][mesh][0]:.1e}" if mesh in each["meshes"] else "refused" for mesh in MESHES]
        cells += ["equal" if each["fingerprint"] else "OTHER"]
        cells += ["equal" if all(each["export"].values()) else "OTHER", each["exact"]]
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
