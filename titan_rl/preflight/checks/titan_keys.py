"""Checks of the keys that are handed to TorchTitan, which would refuse them only on the ranks."""

from collections.abc import Iterator
from importlib.util import find_spec

from titan_rl.config.sections import Config


def check_titan_keys(config: Config) -> Iterator[str]:
    freq, least = config.profiling.profile_freq, config.profiling.profiler_warmup + config.profiling.profiler_active
    if freq < least:
        active = f"profiler_warmup + profiler_active = {least}"
        yield f"profiling.profile_freq: expected at least {active}, found {freq}"
    for target in config.override.imports:
        module = target.rpartition(".")[0]
        try:
            found = bool(module) and find_spec(module) is not None
        except (ImportError, ValueError):  # of a parent package
            found = False
        if not found:
            yield f'override.imports: expected "module.function" of a module that can be imported, found "{target}"'
