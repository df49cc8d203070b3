"""Compare the experts that vLLM and the trainer choose for the same tokens, and what the difference does to log-probs.

  python scripts/bench_routes.py FOLDER                       a mixture of experts' Hugging Face folder, in both dtypes
  python scripts/bench_routes.py FOLDER --dtype bfloat16 --prompts 256

vLLM samples answers to two-digit sums and records each token's experts. The trainer scores the same tokens twice: with
the experts that its own router chooses, and with vLLM's, whose weights stay its own router's. On a CPU.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
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
    engine = Engine(replace(settings, records_routes=True))
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
                assert made.routes is not None
                answer = {"tokens": context + made.tokens, "prompt": len(context), "logprobs": made.logprobs}
                found.append({**answer, "routes": made.routes.rows().tolist()})
    return found


class Routes:
    """The experts that the trainer's routers are to take, and how many they would have chosen otherwise."""

    def __init__(self, model: Any) -> None:
        from titan_rl.actors.titan.experts import Router

        self.routers = [module for module in model.modules() if isinstance(module, Router)]
        self.given: Any = None  # [B, L, layers, K]; -1: not known
        self.taken = False
        self.layers = np.zeros(2)  # known (token, layer) pairs: all, and pairs with other experts
        self.tokens = np.zeros(2)

    @contextmanager
    def followed(self) -> Iterator[None]:
        """Make the routers of the model compare their experts with the given ones, and take those if `taken`."""
        import torch

        from titan_rl.actors.titan import experts

        kind: Any = experts.Router
        own, differ = kind.forward, {}

        def forward(router: Any, x_BLD: Any, expert_bias_E: Any = None) -> Any:
            weights, ids, probs = own(router, x_BLD, expert_bias_E)
            layer = self.routers.index(router)
            given = self.given[:, :, layer].to(ids.device)
            known = (given >= 0).all(-1)
            differ[layer] = known & (ids.sort(-1).values != given.sort(-1).values).any(-1)
            if layer == len(self.routers) - 1:
                every = torch.stack([differ[n] for n in range(len(self.routers))])
                self.layers += [int(known.sum()) * len(self.routers), int(every.sum())]
                self.tokens += [int(known.sum()), int(every.any(0).sum())]
            if self.taken:
                ids = torch.where(known[..., None], given, ids)
                weights = probs.gather(-1, ids)
                weights = weights / weights.sum(-1, keepdim=True) if router.route_norm else weights
            return weights, ids, probs

        kind.forward = forward
        try:
            yield
        finally:
            kind.forward = own


def compared(folder: str, dtype: Any, samples: list[dict[str, Any]]) -> dict[str, Any]:
    """Return how often experts differ, and the gaps of log-probs with the trainer's own experts and with vLLM's."""
    import torch

    from titan_rl.actors.titan.model import TitanModel
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
    routes, places = Routes(model.model), (shape.n_layers, shape.experts_per_token)
    made = []
    for s in samples:
        n, given = len(s["tokens"]), np.array(s["routes"])
        columns = {f"{i}": np.concatenate([[-1], column]) for i, column in enumerate(given.reshape(n - 1, -1).T)}
        made.append(Sample(s["tokens"], [0] * s["prompt"] + [1] * (n - s["prompt"])).with_columns(**columns))
    batches = pack(made, shards=1, seq_len=SEQ_LEN, rows_per_microbatch=8, pad_id=0, share=False)
    answers: dict[str, Any] = {"tokens": sum(len(s["logprobs"]) for s in samples)}
    for name, taken in (("own", False), ("vLLM's", True)):
        routes.taken, routes.layers, routes.tokens = taken, np.zeros(2), np.zeros(2)
        with routes.followed():
            scored = []
            for batch in batches:
                scored.append([])
                for rows in batch.microbatches:
                    columns: Any = rows.columns
                    stacked = np.stack([columns[str(i)] for i in range(places[0] * places[1])], -1)
                    stacked[rows.sequences < 0] = -1  # padding
                    routes.given = torch.from_numpy(stacked).long().reshape(*stacked.shape[:2], *places)
                    scored[-1].append(model.score(rows))
        found = unpack(batches, scored, made)
        pairs = [(row[s["prompt"] :], s["logprobs"]) for row, s in zip(found, samples, strict=True)]
        gap = np.abs(np.concatenate([np.asarray(a) - np.asarray(b) for a, b in pairs]))
        answers[name] = {"mean": gap.mean(), "p99": np.quantile(gap, 0.99), "max": gap.max()}
        if not taken:
            answers["differ"] = {"layers": routes.layers.tolist(), "tokens": routes.tokens.tolist()}
    return answers


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", help="Hugging Face folder of a mixture of experts")
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
            print(dtype, json.dumps(measured(given.folder, dtype, given.prompts, Path(folder))), flush=True)


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
