"""Checks of [lora]."""

from collections.abc import Iterator
from functools import partial

from titan_rl.config.sections import Config
from titan_rl.ext.adapters.adapter_sync import check_adapter_sync, merge_warning
from titan_rl.ext.adapters.layers import LAYERS, WHOLE_MODEL_FACTOR, adaptable, targets
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
    if not adaptable(shape):
        yield wrong("lora.rank", f"0, because the layers of {shape.family} have no adapters here")
        return
    if lora.rank > shape.dim:
        yield wrong("lora.rank", f"at most the model's dim = {shape.dim}")
    known, there = adaptable(shape), list(lora.targets)
    if unknown := [name for name in dict.fromkeys(there) if name not in LAYERS]:
        yield f"lora.targets: expected names of {', '.join(known)}, found {', '.join(unknown)}"
    if routed := [name for name in dict.fromkeys(there) if name in LAYERS and name not in known]:
        why = "because TorchTitan stacks the matrices of experts, which have no adapters"
        yield f"lora.targets: expected names of {', '.join(known)}, {why}, found {', '.join(routed)}"
    if shape.parts.sinks and config.parallelism.tensor_parallel_degree > 1 and "o" in targets(lora, shape):
        why = f"because TorchTitan's output projection of {shape.family} has no adapter under tensor parallelism"
        yield f"lora.targets: expected names without o, {why}, found {', '.join(targets(lora, shape))}"
    if ("k" in there) != ("v" in there):
        here, other = ("k", "v") if "k" in there else ("v", "k")
        yield f"lora.targets: expected {other} besides {here}: TorchTitan gives both an adapter or none"
    if len(set(there)) < len(there):
        yield f"lora.targets: expected each layer once, found {', '.join(there)}"
