"""Checks of what exact mode can keep exact (docs/exactness.md)."""

from collections.abc import Iterator

from titan_rl.config.auto import compiles
from titan_rl.config.sections import Config
from titan_rl.wire.model_shape import ModelShape


def check_exact(config: Config, device: str) -> Iterator[str]:
    """Name every key with which trainer and generator would not compute equal bits. `device` is "cpu" or "cuda"."""
    if not config.debug.exact:
        return
    if config.algorithm.kind != "rl":
        yield f'debug.exact: expected false with algorithm.name = "{config.algorithm.name}", which trains on no samples'
        return
    if device == "cuda":
        found = 'found CUDA: set hosts.device = "cpu"'
        yield f"debug.exact: expected a run on CPU, because TorchTitan's and vLLM's GPU kernels differ, {found}"
    for mesh in (config.parallelism, config.generator):
        key = "parallelism" if mesh is config.parallelism else "generator"
        if (tp := mesh.tensor_parallel_degree) > 1:
            why = "with debug.exact, because trainer and generator add up the ranks' parts in different orders"
            yield f"{key}.tensor_parallel_degree: expected 1 {why}, found {tp}"
    compute, sampled = config.training.mixed_precision_param, config.generator.dtype
    if compute != sampled:
        yield (
            f'generator.dtype: expected training.mixed_precision_param = "{compute}" with debug.exact, '
            f'found "{sampled}"'
        )
    if config.weight_sync.in_flight == "keep":
        yield (
            'weight_sync.in_flight: expected "swap" or "drain" with debug.exact, because "keep" samples new tokens on '
            'keys and values of old weights, found "keep"'
        )
    if config.hosts.threads > 1:
        yield f"hosts.threads: expected 0 or 1 with debug.exact, which computes on one, found {config.hosts.threads}"
    if compiles(config, "cpu"):
        yield "compile.enable: expected false with debug.exact: compiled blocks add up in another order, found true"
    if config.override.imports:
        replaced = ", ".join(config.override.imports)
        yield f"override.imports: expected none with debug.exact, which replaces the same parts, found {replaced}"


def check_exact_model(config: Config, shape: ModelShape) -> Iterator[str]:
    if config.debug.exact and shape.experts:
        why = "with debug.exact, because a product of an expert depends on how many tokens it computes"
        yield f'model.name: expected a dense model {why}, found "{shape.family}"'
