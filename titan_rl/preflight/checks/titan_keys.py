"""Checks of the keys that are handed to TorchTitan, which would refuse them only on the ranks."""

from collections.abc import Iterator
from importlib.util import find_spec

from titan_rl.config.sections import Config
from titan_rl.preflight.reward_probe import probe


def check_compiled(config: Config) -> Iterator[str]:
    """Check, for a GPU, that what compile.enable asks for can be compiled."""
    if config.compile.enable is True and config.training.mixed_precision_param == "float32":
        yield (
            'compile.enable: expected false or "auto" with training.mixed_precision_param = "float32", '
            "whose attention cannot be compiled, found true"
        )


def check_titan_keys(config: Config) -> Iterator[str]:
    freq, least = config.profiling.profile_freq, config.profiling.profiler_warmup + config.profiling.profiler_active
    if freq < least:
        active = f"profiler_warmup + profiler_active = {least}"
        yield f"profiling.profile_freq: expected at least {active}, found {freq}"
    for number, target in enumerate(config.override.imports):
        module = target.rpartition(".")[0]
        try:
            found = bool(module) and find_spec(module.partition(".")[0]) is not None
        except (ImportError, ValueError):  # a relative name
            found = False
        if not found:
            yield f'override.imports: expected "module.function" of a module that can be imported, found "{target}"'
        elif target in config.override.imports[:number]:
            yield f'override.imports: expected each override once, found "{target}" twice'
        else:
            yield from probe(target, None, "override.imports")
