"""Compare the experts that vLLM and the trainer choose for the same tokens, and what the difference does to log-probs.

  python scripts/bench_routes.py FOLDER                       a mixture of experts' Hugging Face folder, in both dtypes
  python scripts/bench_routes.py FOLDER --dtype bfloat16 --prompts 256
  python scripts/bench_routes.py --seed 1 --dtype bfloat16    a random Qwen3-MoE of 4 layers, 16 experts, 2 per token

vLLM samples answers to two-digit sums and records each token's experts. The trainer scores the same tokens twice: with
the experts that its own router chooses, and with vLLM's, as algorithm.routing_replay does it. On a CPU.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).parents[1]
DTYPES = ("float32", "bfloat16")
SAMPLES, NEW, SEQ_LEN = 4, 8, 128


def sampled_routes(folder: str, dtype: Any, prompts: int) -> list[dict[str, Any]]:
    """Return samples of vLLM: tokens, length of the prompt, log-probs, and the experts of each token but the last,
    [n - 1, layers, K]."""
    from titan_rl.actors.vllm.engine import Engine, EngineSettings
    from titan_rl.text.tokenizer import VOCABULARY
    from titan_rl.wire.types import Request, Sampling

    settings = EngineSettings(model_dir=folder, max_model_len=SEQ_LEN, kv_cache_memory_mb=64, load_format="auto")
    settings = replace(settings, dtype=dtype, enable_prefix_caching=False, max_num_seqs=prompts * SAMPLES)
    engine = Engine(replace(settings, records=("routes",)))
    engine.set_version(0)
    random = np.random.default_rng(0)
    contexts = []
    for a, b in random.integers(10, 100, (prompts, 2)).tolist():
        contexts.append([VOCABULARY["<s>"], *(VOCABULARY[c] for c in f"{a}+{b}=")])
    sampling = Sampling(NEW, stop_token_ids=(VOCABULARY["</s>"],))
    engine.add([Request(str(i), c, list(range(SAMPLES)), sampling) for i, c in enumerate(contexts)])
    found = list[dict[str, Any]]()
    while engine.busy:
        for done in engine.step():
            context = contexts[int(done.id)]
            for made in done.completions:
                answer = {"tokens": context + made.tokens, "prompt": len(context), "logprobs": made.logprobs}
                found.append({**answer, "routes": made.extras["routes"].rows().tolist()})
    return found


def compared(folder: str, dtype: Any, samples: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the share of vLLM's experts that the trainer's routers would choose, and the gaps of log-probs without and
    with a replay."""
    from titan_rl.actors.titan.experts import take_routed
    from titan_rl.actors.titan.model import TitanModel
    from titan_rl.actors.titan.reduction import replay_metrics
    from titan_rl.batch.packing import pack, unpack
    from titan_rl.config import sections as c
    from titan_rl.preflight.shapes import shape_of
    from titan_rl.wire.types import Sample

    config = c.Config(
        job=c.JobSection(dump_folder=folder),
        model=c.ModelSection(hf_assets_path=folder),
        training=c.TrainingSection(seq_len=SEQ_LEN, local_batch_size=8, mixed_precision_param=dtype),
    )
    shape = shape_of(config.model)
    model = TitanModel(config, shape, config.parallelism)
    model.read(folder)
    made = [Sample(s["tokens"], [0] * s["prompt"] + [1] * (len(s["tokens"]) - s["prompt"])) for s in samples]
    (batch,) = pack(made, shards=1, seq_len=SEQ_LEN, rows_per_microbatch=8, pad_id=0)
    routes = [np.array(s["routes"], np.int16) for s in samples]
    microbatches = {"own": batch.microbatches, "replayed": [with_routes(rows, routes) for rows in batch.microbatches]}
    answers: dict[str, Any] = {"tokens": sum(len(s["logprobs"]) for s in samples)}
    for name, every in microbatches.items():
        found = unpack([batch], [[model.score(rows) for rows in every]], made)
        pairs = zip(found, samples, strict=True)
        gap = np.abs(np.concatenate([row[s["prompt"] :] - np.array(s["logprobs"]) for row, s in pairs]))
        answers[name] = {"mean": gap.mean(), "p99": np.quantile(gap, 0.99), "max": gap.max()}
    for rows in microbatches["replayed"]:  # routers count if there may be a backward
        model.logprobs(model.placed(rows), temperature=1.0)
    counted = take_routed(model.model, model.dims)
    assert counted is not None
    return answers | replay_metrics(counted.replay_3)


def with_routes(rows: Any, routes: list[np.ndarray]) -> Any:
    """Return packed rows with a column of the samples' routes; -1 at padding."""
    column = np.full((rows.tokens.size, *routes[0].shape[1:]), -1, np.int16)
    for number, sample in enumerate(rows.samples.tolist()):
        column[rows.places[rows.sequences == number]] = routes[sample]
    return replace(rows, extras={"routes": column.reshape(*rows.tokens.shape, *column.shape[1:])})


def random_mixture(folder: Path, seed: int) -> None:
    from titan_rl.config.sections import ModelSection
    from titan_rl.ext.tiny.shrink import write_stand_in
    from titan_rl.preflight.shapes import shape_of

    model = ModelSection(name="qwen3_moe", n_layers=4, experts=16, experts_per_token=2)
    folder.mkdir()
    write_stand_in(folder, shape_of(model), seed)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "folder", nargs="?", help="Hugging Face folder of a mixture of experts; without it, a random one"
    )
    parser.add_argument("--seed", type=int, default=0, help="of the random model")
    parser.add_argument("--dtype", choices=DTYPES, help="of both engines; without it, one after the other")
    parser.add_argument("--prompts", type=int, default=64)
    parser.add_argument("--sample", metavar="FILE", help=argparse.SUPPRESS)  # be the engine's process
    given = parser.parse_args()
    if given.sample:
        answers = sampled_routes(given.folder, given.dtype, given.prompts)
        Path(given.sample).write_text(json.dumps(answers))
        return
    for dtype in [given.dtype] if given.dtype else DTYPES:
        with tempfile.TemporaryDirectory(prefix="routes-") as folder:
            if not given.folder:
                random_mixture(Path(folder, "model"), given.seed)
            model = given.folder or f"{folder}/model"
            print(dtype, json.dumps(measured(model, dtype, given.prompts, Path(folder))), flush=True)


def measured(folder: str, dtype: str, prompts: int, scratch: Path) -> dict[str, Any]:
    from titan_rl.actors.meeting import MEETING
    from titan_rl.actors.vllm import launch_env, vllm_cpu

    out = scratch / "sampled.json"
    env = {**os.environ, **launch_env.ENV, **vllm_cpu.ENV, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    env |= {"HF_HUB_OFFLINE": "1", "VLLM_DIST_IDENT": f"routes_{os.getpid()}"}
    options = [folder, "--dtype", dtype, "--prompts", str(prompts), "--sample", str(out)]
    subprocess.run([sys.executable, __file__, *options], env=env, check=True)
    launched = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1"}
    os.environ.update(launched, **{MEETING: str(scratch / "meeting")})
    return compared(folder, dtype, json.loads(out.read_text()))


if __name__ == "__main__":
    main()
