"""Cuts models over ranks that do not exist, for a dry run: no weight is allocated and no message is sent.

    python -m titan_rl.ext.run_plan.ranks.meta_model ANSWER < QUESTIONS

QUESTIONS is a pickled dict of MeshQuestion. ANSWER becomes a pickled dict: a ShardedModel, or why there is none. Each
model is built on the meta device and parallelized by TorchTitan, as in a trainer, under a fake process group of the
mesh's size.
"""

import os
import pickle
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch
import torch.distributed as dist
from torchtitan.distributed import ParallelDims
from torchtitan.distributed import utils as dist_utils

from titan_rl.actors.sync.held_shards import coordinates_of, shards_of
from titan_rl.actors.titan import private, titan_cpu
from titan_rl.actors.titan.adaptation import adaptation_of
from titan_rl.actors.titan.experts import route_biases
from titan_rl.actors.titan.model import overridden_spec, sharded_model, titan_config
from titan_rl.actors.titan.spec import hf_names
from titan_rl.wire.model_shape import MeshQuestion, ShardedModel, planned
from titan_rl.wire.weight_plan import Shard, plan


@contextmanager
def fake_ranks(count: int) -> Iterator[None]:
    """Make this process rank 0 of `count`."""
    dist_utils.init_fake_mode(count)
    try:
        yield
    finally:
        dist.destroy_process_group()
        private.forget_shardings()  # they name the meshes of the group


def cut(question: MeshQuestion) -> ShardedModel:
    config, p = question.config, question.parallelism
    titan = titan_config(config, p)
    with fake_ranks(p.world_size):
        dims = ParallelDims.from_config(titan.parallelism, p.world_size)
        dist_utils.set_spmd_backend(titan.parallelism.spmd_backend)
        spec = overridden_spec(question.shape, config, titan, "cpu")
        model = sharded_model(spec, config, titan, dims)
        if question.shape.tied:  # tensor parallelism makes two of the one weight; TorchTitan's init_weights undoes it
            model.tok_embeddings.weight = model.lm_head.weight
        parameters = [*model.named_parameters(), *route_biases(model)]
        adaptation = adaptation_of(config)
        names = hf_names(spec, [name for name, _ in parameters], adaptation)
        adapters = [(name, p) for name, p in parameters if adaptation.adds(name)]
        frozen = [(name, p) for name, p in parameters if not adaptation.adds(name)]  # all are trained without adapters
        layouts, changed = (
            [shards_of(some, names, coordinates_of(rank)) for rank in range(p.world_size)]
            for some in (frozen, adapters)
        )
        groups, trained = private.group_sizes(model), private.group_sizes(model, trained=True)
    held = [elements(a) + elements(b) for a, b in zip(layouts, changed, strict=True)]
    synced = layouts if config.lora.in_vllm is None else [a + b for a, b in zip(layouts, changed, strict=True)]
    return ShardedModel(
        held=max(held),
        whole=sum(groups.values()),
        block=max(size for name, size in groups.items() if "layers." in name),
        last=max(size for name, size in groups.items() if "lm_head" in name),
        sent=sent(synced, question),
        adapters=max(map(elements, changed)),
        adapters_whole=sum(trained.values()) if adapters else 0,
    )


def elements(shards: Sequence[Shard]) -> int:
    return sum(shard.rows * shard.cols for shard in shards)


def sent(layouts: Sequence[Sequence[Shard]], question: MeshQuestion) -> list[list[int]]:
    if not question.readers:
        return []
    halved = [planned(shards, question.shape, question.config.generator.dtype) for shards in layouts]
    made = plan(halved, question.readers)
    return [
        [sum(copy.elements for copy in made.copies[rank, reader]) for reader in range(made.readers)]
        for rank in range(made.ranks)
    ]


def answers(questions: Mapping[str, MeshQuestion]) -> dict[str, ShardedModel | str]:
    models: dict[str, ShardedModel | str] = {}
    for name, question in questions.items():
        try:
            models[name] = cut(question)
        except Exception as error:  # TorchTitan or torch refuses this mesh
            models[name] = f"{type(error).__name__}: {error}"
    return models


if __name__ == "__main__":
    titan_cpu.use_cpu()
    torch.set_num_threads(1)
    Path(sys.argv[1]).write_bytes(pickle.dumps(answers(pickle.load(sys.stdin.buffer))))
    os._exit(0)  # torch takes a second to take itself down
