"""Compiled blocks: few graphs over a whole run's kinds of calls, and steps that compiled are not measured."""

import random
from collections.abc import Iterator

import pytest
import torch
from torchtitan.distributed.activation_checkpoint import ActivationCheckpointing, SelectiveAC

from support.flash_on_cpu import flash_on_cpu
from support.shapes import TINY
from support.whole_model import whole_model
from titan_rl.actors.titan import compiled_blocks
from titan_rl.actors.titan.activation_offload import OffloadAC
from titan_rl.actors.titan.model import DeviceRows
from titan_rl.batch.packing import pack
from titan_rl.config.sections import Config, TrainingSection
from titan_rl.wire.types import Sample

KINDS = ("score", "score shared", "train", "train shared")


@pytest.fixture(autouse=True)
def own_graphs() -> Iterator[None]:
    """Forget graphs and settings before and after a test."""
    before = torch.compiler.config.dynamic_sources, torch._dynamo.config.recompile_limit
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    yield
    torch._dynamo.reset()
    torch.compiler.config.dynamic_sources, torch._dynamo.config.recompile_limit = before


def group(drawn: random.Random) -> list[Sample]:
    """Return answers to one prompt, all of other lengths than the last group's."""
    prompt = [drawn.randrange(3, 50) for _ in range(drawn.randrange(12, 20))]
    answers = [[drawn.randrange(3, 50) for _ in range(drawn.randrange(1, 9))] for _ in range(4)]
    size = len(prompt)
    return [Sample([*prompt, *answer], [0] * size + [1] * len(answer), {}, size) for answer in answers]


def graphs_of(kinds: tuple[str, ...], rows: int, recompute: type[ActivationCheckpointing] | None) -> int:
    """Return how many graphs a model compiled in calls of these kinds, in this order, each with several lengths."""
    drawn = random.Random(f"{kinds} {rows}")
    compiled_blocks.use_few_graphs()
    with flash_on_cpu():
        on = whole_model(TINY, Config(training=TrainingSection(seq_len=96)), "cuda", "bfloat16")
        if recompute:
            recompute.Config().build(dump_folder="").apply(on.model)
        for block in on.model.layers.values():
            block.compile(backend="eager", fullgraph=True)
        for kind in kinds:
            for _ in range(3):
                samples = [sample for _ in range(2) for sample in group(drawn)]
                share = "shared" in kind
                (batch,) = pack(samples, shards=1, seq_len=96, rows_per_microbatch=rows, pad_id=0, share=share)
                assert share == any(each.segments[:, 3].any() for each in batch.microbatches)
                for each in batch.microbatches:
                    if "score" in kind:
                        on.score(each)
                    else:
                        on.logprobs(DeviceRows.of(each, on.device), temperature=1.0)[0].sum().backward()
    return compiled_blocks.graphs_compiled()


@pytest.mark.parametrize(
    ("kinds", "rows", "recompute"), [(KINDS, 1, None), (KINDS[::-1], 2, SelectiveAC), (KINDS[2:], 2, OffloadAC)]
)
def test_a_run_compiles_one_graph_per_kind_of_call(
    kinds: tuple[str, ...], rows: int, recompute: type[ActivationCheckpointing] | None
) -> None:
    assert graphs_of(kinds, rows, recompute) <= len(kinds)
