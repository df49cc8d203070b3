"""Compare every family with transformers and with vLLM, and write the figures and their tables.

  python scripts/conformance.py                                  all cases
  python scripts/conformance.py --case "Mistral, window 16"      one; the others keep their figures
  python scripts/conformance.py --tables                         none: only the tables

vLLM samples with weights of folders that transformers made at random. Then transformers, and the trainer on four
meshes, compute the log-probs of the same tokens. Everything is float32 on a CPU. Figures are in
docs/benchmarks/conformance.json, of which the tables in docs/benchmarks/conformance.md and docs/models.md are made.
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

from bench.family_folders import CASES, SPEC_OF_USER, make_folder, transformers_class
from bench.family_ranks import MESHES, rank_of_mesh
from titan_rl.preflight.checks import config_problems
from titan_rl.preflight.load import load
from titan_rl.wire.gpus import NO_GPUS
from titan_rl.wire.model_shape import shape_of_folder

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs/benchmarks/conformance.md"
FAMILIES_DOCS = ROOT / "docs/models.md"
RESULTS = DOCS.with_suffix(".json")
BEGIN, END = "<!-- conformance: written by scripts/conformance.py -->", "<!-- end of conformance -->"
MOST = 1e-5  # mean difference of log-probs
FEATURES = {  # and their keys
    "adapters": ("--lora.rank", "8"),
    "critics": ("--algorithm.name", "ppo", "--critic.lr", "1e-3"),
    "fp8": ("--generator.quantization", "fp8"),
    "int8": ("--generator.quantization", "int8"),
    "engines on two ranks": ("--generator.tensor_parallel_degree", "2"),
}


def measured(names: list[str], folder: Path) -> dict[str, Any]:
    """Return the figures of each case."""
    from titan_rl.actors.vllm import launch_env, vllm_cpu

    sys.path.append(str(ROOT / "tests"))  # for the functions of model.spec
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, sys.path))
    for name in names:
        make_folder(name, folder / name)
    env = {**os.environ, **launch_env.ENV, **vllm_cpu.ENV, "OMP_NUM_THREADS": "1"}
    env |= {"HF_HUB_OFFLINE": "1", "VLLM_DIST_IDENT": f"conformance_{os.getpid()}"}
    engine = [sys.executable, str(ROOT / "scripts/bench/family_ranks.py"), str(folder)]
    subprocess.run([*engine, *names], env=env, check=True)
    sampled = json.loads((folder / "vllm.json").read_text())
    os.environ["OMP_NUM_THREADS"] = "1"
    shapes = {name: shape_of_folder(str(folder / name), "case", SPEC_OF_USER.get(name, "")) for name in names}
    usual = {name: refusals(folder / name) for name in names}
    meshes = {}
    for mesh, (data, tensor) in MESHES.items():
        degrees = ("data_parallel_shard", data), ("tensor_parallel", tensor)
        flags = [flag for key, degree in degrees for flag in (f"--parallelism.{key}_degree", str(degree))]
        fit = {name: shape for name, shape in shapes.items() if not refusals(folder / name, *flags) - usual[name]}
        spawn(rank_of_mesh, (str(folder), fit, mesh), nprocs=data * tensor)
        meshes[mesh] = json.loads((folder / f"mesh {mesh}.json").read_text())
    figures = {}
    for name, shape in shapes.items():
        sequences = sampled[name]["sequences"]
        of_vllm = [logprobs for _, _, logprobs in sequences]
        of_hf = logprobs_of_transformers(folder / name, sequences)
        on = {mesh: answers[name] for mesh, answers in meshes.items() if name in answers}
        refused = [what for what, flags in FEATURES.items() if refusals(folder / name, *flags) - usual[name]]
        figures[name] = {
            "model_type": CASES[name][0],
            "trainer": getattr(shape, "spec", "") or "our blocks",
            "tokens": sum(map(len, of_vllm)),
            "trainer - transformers": {mesh: gap(each["logprobs"], of_hf) for mesh, each in on.items()},
            "vLLM - transformers": gap(of_vllm, of_hf),
            "trainer - vLLM": {mesh: gap(each["logprobs"], of_vllm) for mesh, each in on.items()},
            "refit": sampled[name]["fingerprint"],
            "export": {mesh: each["export"] for mesh, each in on.items()},
            "refused": refused,
        }
    return figures


def refusals(folder: Path, *flags: str) -> set[str]:
    """Return the problems of a run with a case's folder, which has no tokenizer."""
    given = ["--config", "grpo_llama", "--model.name", "auto", "--model.hf_assets_path", str(folder)]
    run = load([*given, "--model.spec", SPEC_OF_USER.get(folder.name, ""), *flags])
    return {*run.problems, *config_problems(run.config, NO_GPUS)}


def logprobs_of_transformers(folder: Path, sequences: list[Any]) -> list[list[float]]:
    import torch

    model = transformers_class(folder).from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()
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
    return [float(f"{each:.1e}") for each in (sum(pairs) / len(pairs), max(pairs))]


def wrong(figures: dict[str, Any]) -> list[str]:
    """Return what misses its bound."""
    found = []
    for name, each in figures.items():
        gaps = {"vLLM - transformers": each["vLLM - transformers"]}
        for pair in ("trainer - transformers", "trainer - vLLM"):
            gaps |= {f"{pair} on {mesh}": of_mesh for mesh, of_mesh in each[pair].items()}
        found += [f"{name}: {pair} is {mean:.1e}" for pair, (mean, _) in gaps.items() if not mean <= MOST]
        found += [f"{name}: the export of {mesh} is another" for mesh, same in each["export"].items() if not same]
        found += [] if each["refit"] else [f"{name}: vLLM's loader makes other parameters than the weight plan"]
    return found


def table_of_cases(figures: dict[str, Any]) -> str:
    """Return a row for each case: mean differences of log-probs."""
    heads = ["case", "trainer vs transformers", "vLLM vs transformers"]
    heads += [f"trainer vs vLLM, {mesh}" for mesh in MESHES] + ["refit", "export"]
    rows = []
    for name, each in figures.items():
        means = [each["trainer - transformers"]["1"][0], each["vLLM - transformers"][0]]
        gaps = [each["trainer - vLLM"].get(mesh) for mesh in MESHES]
        equal = ["equal" if same else "OTHER" for same in (each["refit"], all(each["export"].values()))]
        rows.append(
            [name, *(f"{mean:.1e}" for mean in means), *(f"{g[0]:.1e}" if g else "refused" for g in gaps), *equal]
        )
    return markdown(heads, rows)


def table_of_families(figures: dict[str, Any]) -> str:
    """Return a row for each family: the meshes of any of its cases, and the largest differences of log-probs."""
    heads = ["family", "`model_type`", "trainer's code", "cases", "meshes", "trainer - transformers"]
    heads += ["vLLM - transformers", "refit, export", "refused"]
    by_type: dict[str, list[tuple[str, Any]]] = {}
    for name, each in figures.items():
        by_type.setdefault(each["model_type"], []).append((name.partition(",")[0], each))
    rows = []
    for model_type, cases in by_type.items():
        every = [each for _, each in cases]
        names = dict.fromkeys(name for name, _ in cases)
        meshes = [mesh for mesh in MESHES if any(mesh in each["export"] for each in every)]
        trainer = max(most for each in every for _, most in each["trainer - transformers"].values())
        engine = max(each["vLLM - transformers"][1] for each in every)
        equal = all(each["refit"] and all(each["export"].values()) for each in every)
        cells = [", ".join(names), f"`{model_type}`", f"`{every[0]['trainer']}`".replace("`our blocks`", "our blocks")]
        cells += [str(len(every)), ", ".join(meshes), f"{trainer:.1e}", f"{engine:.1e}", "equal" if equal else "OTHER"]
        refused = [what for what in FEATURES if all(what in each["refused"] for each in every)]
        rows.append([*cells, ", ".join(refused)])
    return markdown(heads, rows)


def markdown(heads: list[str], rows: list[list[str]]) -> str:
    return "\n".join(f"| {' | '.join(row)} |" for row in [heads, ["---"] * len(heads), *rows])


TABLES = {DOCS: table_of_cases, FAMILIES_DOCS: table_of_families}


def with_table(page: Path, figures: dict[str, Any]) -> str:
    """Return the text of a page with its table of these figures."""
    before, _, rest = page.read_text().partition(BEGIN)
    return f"{before}{BEGIN}\n{TABLES[page](figures)}\n{END}{rest.partition(END)[2]}"


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--case", action="append", choices=list(CASES), help="measure this case only (repeatable)")
    parser.add_argument("--tables", action="store_true", help="measure nothing: write the tables of the kept figures")
    given = parser.parse_args(argv)
    found = {}
    if not given.tables:
        with tempfile.TemporaryDirectory(prefix="conformance-") as folder:
            found = measured(given.case or list(CASES), Path(folder))
    every = json.loads(RESULTS.read_text()) | found
    figures = {name: every[name] for name in CASES if name in every}
    lines = ",\n".join(f"{json.dumps(name)}: {json.dumps(each)}" for name, each in figures.items())
    RESULTS.write_text(f"{{\n{lines}\n}}\n")
    for page in TABLES:
        page.write_text(with_table(page, figures))
    print(table_of_cases(found or figures))
    problems = wrong(found or figures)
    print(*problems, sep="\n")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
