"""Checks of [lora]."""

from collections.abc import Iterator
from functools import partial
from itertools import permutations

from titan_rl.config.sections import Config
from titan_rl.ext.adapters.adapter_sync import check_adapter_sync, merge_warning
from titan_rl.ext.adapters.layers import LAYERS, WHOLE_MODEL_FACTOR, adaptable, builders, targets, uncut
from titan_rl.preflight.refusal import problem
from titan_rl.wire.model_shape import ModelShape

WHOLE_MODEL_RATE = 3e-5  # rates for whole models of real sizes are below it


def problems(config: Config, shape: ModelShape, device: str) -> Iterator[str]:
    yield from check_lora(config, shape)
    yield from check_adapter_sync(config, shape, device)


def warnings(config: Config, shape: ModelShape, device: str) -> Iterator[str]:
    if config.lora.on and config.optimizer.lr < WHOLE_MODEL_RATE and config.training.steps:
        yield (
            f"optimizer.lr is {config.optimizer.lr:g}, which looks like a whole model's rate: adapters learn best "
            f"at about {WHOLE_MODEL_FACTOR} times that rate"
        )
    yield from merge_warning(config, shape, device)


def check_lora(config: Config, shape: ModelShape) -> Iterator[str]:
    wrong, lora = partial(problem, config), config.lora
    if not lora.on:
        if lora.targets or lora.sync not in ("auto", "merge"):
            key = "targets" if lora.targets else "sync"
            yield wrong("lora.rank", f"at least 1, because lora.{key} is set")
        return
    if config.algorithm.kind == "reward":
        yield wrong("lora.rank", "0, because a reward model trains its head, which has no adapter")
    if shape.parts.fused:
        why = f"because a folder of {shape.family} has projections as one tensor, beside which no adapter of one fits"
        yield wrong("lora.rank", f"0, {why}")
    known, there = adaptable(shape), list(lora.targets)
    if not known:
        yield wrong("lora.rank", f"0, because TorchTitan can give the layers of {shape.family} no adapters")
        return
    if lora.rank > shape.dim:
        yield wrong("lora.rank", f"at most the model's dim = {shape.dim}")
    if unknown := [name for name in dict.fromkeys(there) if name not in {*LAYERS, *known}]:
        yield f"lora.targets: expected names of {', '.join(known)}, found {', '.join(unknown)}"
    if absent := [name for name in dict.fromkeys(there) if name in LAYERS and name not in known]:
        why = f"because {shape.family} has no others that TorchTitan can give adapters"
        if shape.experts:
            why = "because TorchTitan stacks the matrices of experts, which have no adapters"
        yield f"lora.targets: expected names of {', '.join(known)}, {why}, found {', '.join(absent)}"
    if config.parallelism.tensor_parallel_degree > 1:
        found = targets(lora, shape)
        if whole := [name for name in found if name in uncut(shape)]:
            them = "it" if len(whole) == 1 else "them"
            why = f"because TorchTitan gives {them} no adapter under tensor parallelism in {shape.family}"
            yield f"lora.targets: expected names without {', '.join(whole)}, {why}, found {', '.join(found)}"
    built = builders(shape)
    for name, other in permutations(known, 2):
        if built[name] == built[other] and name in there and other not in there:
            yield f"lora.targets: expected {other} besides {name}: TorchTitan gives both an adapter or none"
    if len(set(there)) < len(there):
        yield f"lora.targets: expected each layer once, found {', '.join(there)}"
