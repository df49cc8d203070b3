"""Processes of conformance.py: an engine of vLLM, and trainers on gloo meshes."""

import json
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from bench.family_folders import SPEC_OF_USER
from titan_rl.config import sections as c
from titan_rl.wire.model_shape import ModelShape

SEQ_LEN, NEW = 192, 60
MESHES = {"1": (1, 1), "dp 2": (2, 1), "tp 2": (1, 2), "dp 2 x tp 2": (2, 2)}  # data, tensor parallel


def sample_with_vllm(folder: Path, names: list[str]) -> dict[str, Any]:
    """Return sequences that vLLM sampled from each folder, with its log-probs, and whether the weight plan makes the
    parameters that its loader made. Plans of our blocks must equal the learned ones."""
    import numpy as np
    import torch

    from titan_rl.actors.vllm.engine import Engine, EngineSettings
    from titan_rl.actors.vllm.vllm_params import pieces, verify_complete
    from titan_rl.kernels.pack_weights import pack, window
    from titan_rl.wire.model_shape import SpecShape, shape_of_folder
    from titan_rl.wire.types import Request, Sampling
    from titan_rl.wire.weight_plan import Shard, plan

    answers = {}
    for name in names:
        path = folder / name
        shape = shape_of_folder(str(path), "conformance", SPEC_OF_USER.get(name, ""))
        room: dict[str, Any] = {"max_model_len": SEQ_LEN, "kv_cache_memory_mb": 32, "shape": shape}
        room["enable_prefix_caching"] = not shape.recurrent_heads
        engine = Engine(EngineSettings(model_dir=str(path), load_format="auto", **room))
        (live,) = engine._llm.apply_model(lambda model: dict((*model.named_parameters(), *model.named_buffers())))
        given = isinstance(shape, SpecShape)
        layout = engine._learned(shape, quantized=False) if given else engine.layout
        verify_complete({key: tuple(live[key].shape) for key in (*engine.info.shapes, *layout.shapes)}, layout.shapes)
        planned = layout.pieces if given else pieces(shape, tp=1, rank=0)
        equal = sorted(map(repr, planned)) == sorted(map(repr, layout.pieces))
        tensors = tensors_of(path, shape)
        held = [[Shard(key, 0, len(w), 0, w[0].numel()) for key, w in tensors.items()]]
        copies = plan(held, [layout.pieces]).outgoing(0)[0]
        run = torch.empty(sum(copy.elements for copy in copies))
        pack(tensors, copies, run)
        for copy, part in zip(copies, run.split([copy.elements for copy in copies]), strict=True):
            there = window(live[copy.param], copy, copy.dst_row0, copy.dst_col0)
            equal &= torch.equal(there.flatten(), part)
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
    """Return a folder's tensors, without a vision tower's, by the names of the weight plan."""
    from safetensors.torch import load_file

    stored = load_file(folder / "model.safetensors")
    tensors = {key: stored[key] for key in shape.folder_tensors()}
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


def config_of(folder: Path, name: str, mesh: str) -> c.Config:
    """Return the trainer's config for a case."""
    data, tensor = MESHES[mesh]
    return c.Config(
        job=c.JobSection(dump_folder=str(folder / "runs")),
        model=c.ModelSection(hf_assets_path=str(folder / name), spec=SPEC_OF_USER.get(name, "")),
        training=c.TrainingSection(seq_len=SEQ_LEN, local_batch_size=1),
        parallelism=c.ParallelismSection(data_parallel_shard_degree=data, tensor_parallel_degree=tensor),
    )


def score_on_mesh(folder: Path, shapes: Mapping[str, ModelShape], mesh: str) -> dict[str, Any]:
    """Return each sequence's log-probs by the trainer on a mesh, and whether its export is the folder."""
    import torch
    import torch.distributed as dist
    from safetensors.torch import load_file

    from titan_rl.actors.titan.model import TitanModel
    from titan_rl.batch.packing import pack, unpack
    from titan_rl.wire.types import Sample

    sequences = json.loads((folder / "vllm.json").read_text())
    answers: dict[str, Any] = {}
    for name, shape in shapes.items():
        path, config = folder / name, config_of(folder, name, mesh)
        model = TitanModel(config, shape, config.parallelism)
        model.read(path)
        samples = [
            Sample(context + new, [0] * len(context) + [1] * len(new), {}, len(context))
            for context, new, _ in sequences[name]["sequences"]
        ]
        batches = pack(
            samples, shards=1, seq_len=SEQ_LEN, rows_per_microbatch=1, pad_id=0, share=not shape.recurrent_heads
        )
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


def rank_of_mesh(rank: int, folder: str, shapes: Mapping[str, ModelShape], mesh: str) -> None:
    """Be one rank of a mesh; rank 0 writes the answer."""
    from titan_rl.actors.meeting import MEETING

    size = MESHES[mesh][0] * MESHES[mesh][1]
    launched = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size}
    os.environ.update({key: str(value) for key, value in launched.items()}, **{MEETING: f"{folder}/meeting {mesh}"})
    answer = score_on_mesh(Path(folder), shapes, mesh)
    if rank == 0:
        Path(folder, f"mesh {mesh}.json").write_text(json.dumps(answer))


if __name__ == "__main__":
    given = Path(sys.argv[1])
    (given / "vllm.json").write_text(json.dumps(sample_with_vllm(given, sys.argv[2:])))
