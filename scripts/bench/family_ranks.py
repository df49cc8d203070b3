"""Processes of conformance.py: an engine of vLLM, and trainers on gloo meshes."""

import json
import os
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

SEQ_LEN, NEW = 192, 60
MESHES = {"1": (1, 1), "dp 2": (2, 1), "tp 2": (1, 2), "dp 2 x tp 2": (2, 2)}  # data, tensor parallel


def sample_with_vllm(folder: Path, names: list[str]) -> dict[str, Any]:
    """Return sequences that vLLM sampled from each folder, with its log-probs, and whether the weight plan makes the
    parameters that its loader made."""
    import numpy as np

    from titan_rl.actors.vllm.engine import Engine, EngineSettings
    from titan_rl.actors.vllm.vllm_params import pieces, verify_complete
    from titan_rl.kernels.pack_weights import pack, window
    from titan_rl.wire.model_shape import shape_of_folder
    from titan_rl.wire.types import Request, Sampling
    from titan_rl.wire.weight_plan import Shard, plan

    answers = {}
    for name in names:
        path = folder / name
        shape = shape_of_folder(str(path), "conformance")
        room: dict[str, Any] = {"max_model_len": SEQ_LEN, "kv_cache_memory_mb": 32}
        engine = Engine(EngineSettings(model_dir=str(path), load_format="auto", shape=shape, **room))
        live = engine.params()
        layout, planned = engine.layout, pieces(shape, tp=1, rank=0)
        verify_complete({key: tuple(p.shape) for key, p in live.items()}, layout.shapes)
        tensors = tensors_of(path, shape)
        held = [[Shard(key, 0, len(w), 0, w[0].numel()) for key, w in tensors.items()]]
        copies = plan(held, [layout.pieces]).outgoing(0)[0]
        run = live["model.norm.weight"].new_empty(sum(copy.elements for copy in copies))
        pack(tensors, copies, run)
        start, equal = 0, sorted(map(repr, planned)) == sorted(map(repr, layout.pieces))
        for copy in copies:
            there = window(live[copy.param], copy, copy.dst_row0, copy.dst_col0)
            equal &= bool((there.flatten() == run[start : start + copy.elements]).all())
            start += copy.elements
        engine.set_version(0)
        random = np.random.default_rng(0)
        contexts = [random.integers(3, shape.vocab_size, n).tolist() for n in (3, 40, 100)]
        engine.add([Request(str(i), tokens, [1, 2], Sampling(NEW)) for i, tokens in enumerate(contexts)])
        sequences = []
        while engine.busy:
            for done in engine.step():
                context = contexts[int(done.id)]
                sequences += [[context, c.tokens, c.logprobs] for c in done.completions]
        answers[name] = {"fingerprint": equal, "sequences": sorted(sequences)}
        del engine, live
        shut_down()
    return answers


def tensors_of(folder: Path, shape: Any) -> dict[str, Any]:
    """Return a folder's tensors by the names of the weight plan."""
    from safetensors.torch import load_file

    tensors = load_file(folder / "model.safetensors")
    for one, parts in shape.fused().items():
        sizes = [shape.hf_tensors()[part][0] for part in parts]
        tensors |= zip(parts, tensors.pop(one).split(sizes), strict=True)
    for one, experts in shape.stacked().items():
        tensors |= zip(experts, tensors.pop(one).transpose(1, 2).contiguous(), strict=True)
    return tensors


def shut_down() -> None:
    """End vLLM's groups, so that this process can build another engine."""
    import gc

    from vllm.distributed import cleanup_dist_env_and_memory

    gc.collect()
    cleanup_dist_env_and_memory()


def score_on_mesh(folder: Path, names: list[str], mesh: str) -> dict[str, Any]:
    """Return each sequence's log-probs by the trainer on a mesh, and whether its export is the folder; or why the mesh
    is refused."""
    import torch
    import torch.distributed as dist
    from safetensors.torch import load_file

    from titan_rl.actors.titan.model import TitanModel
    from titan_rl.batch.packing import pack, unpack
    from titan_rl.config import sections as c
    from titan_rl.preflight.checks.model import check_parallelism
    from titan_rl.preflight.shapes import shape_of
    from titan_rl.wire.types import Sample

    sequences = json.loads((folder / "vllm.json").read_text())
    data, tensor = MESHES[mesh]
    answers: dict[str, Any] = {}
    for name in names:
        path = folder / name
        config = c.Config(
            job=c.JobSection(dump_folder=str(folder / "runs")),
            model=c.ModelSection(hf_assets_path=str(path)),
            training=c.TrainingSection(seq_len=SEQ_LEN, local_batch_size=1),
            parallelism=c.ParallelismSection(data_parallel_shard_degree=data, tensor_parallel_degree=tensor),
        )
        shape = shape_of(config.model)
        if refusals := list(check_parallelism(replace(config, generator=c.GeneratorSection()), shape)):
            answers[name] = {"refused": refusals[0]}
            continue
        model = TitanModel(config, shape, config.parallelism)
        model.read(path)
        samples = [
            Sample(context + new, [0] * len(context) + [1] * len(new), {}, len(context))
            for context, new, _ in sequences[name]["sequences"]
        ]
        batches = pack(samples, shards=1, seq_len=SEQ_LEN, rows_per_microbatch=1, pad_id=0, share=True)
        scored = unpack(batches, [[model.score(rows) for rows in batch.microbatches] for batch in batches], samples)
        out = folder / f"{name}, {mesh}"
        model.write(out)
        dist.barrier()
        written = {key: w for file in out.glob("*.safetensors") for key, w in load_file(file).items()}
        given = load_file(path / "model.safetensors")
        answers[name] = {
            "export": written.keys() == given.keys() and all(torch.equal(written[key], given[key]) for key in given),
            "logprobs": [
                [float(x) for x in row[len(context) :]]
                for row, (context, _, _) in zip(scored, sequences[name]["sequences"], strict=True)
            ],
        }
    return answers


def rank_of_mesh(rank: int, folder: str, names: list[str], mesh: str) -> None:
    """Be one rank of a mesh; rank 0 writes the answer."""
    from titan_rl.actors.meeting import MEETING

    size = MESHES[mesh][0] * MESHES[mesh][1]
    launched = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size}
    os.environ.update({key: str(value) for key, value in launched.items()}, **{MEETING: f"{folder}/meeting {mesh}"})
    answer = score_on_mesh(Path(folder), names, mesh)
    if rank == 0:
        Path(folder, f"mesh {mesh}.json").write_text(json.dumps(answer))


if __name__ == "__main__":
    given = Path(sys.argv[1])
    (given / "vllm.json").write_text(json.dumps(sample_with_vllm(given, sys.argv[2:])))
