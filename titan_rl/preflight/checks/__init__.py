"""Checks of keys against each other, before anything is spawned. toml.py checks each key by itself.

Every message names the key to change, what was expected, and what was found.
"""

from titan_rl.config.auto import device_of, on_device
from titan_rl.config.sections import Config
from titan_rl.preflight.checks.algorithm import check_algorithm, clip_warning
from titan_rl.preflight.checks.assets import check_assets, usable_shape
from titan_rl.preflight.checks.cache_room import cache_warning, check_cache_room
from titan_rl.preflight.checks.chat_template import chat_warnings, check_chat, check_template_keys
from titan_rl.preflight.checks.dataset import check_row_lengths, check_task
from titan_rl.preflight.checks.dimensions import check_dimensions, check_lengths, check_parallelism
from titan_rl.preflight.checks.environment import check_environment
from titan_rl.preflight.checks.evaluation import check_evaluation
from titan_rl.preflight.checks.folders import check_folders
from titan_rl.preflight.checks.gpu_memory import check_gpu_memory
from titan_rl.preflight.checks.host import (
    check_driver,
    check_placement,
    gpus_needed,
    gpus_of_hosts,
    snapshot_warning,
)
from titan_rl.preflight.checks.hosts import attach_warnings, check_hosts, missing_addresses
from titan_rl.preflight.checks.launching import check_launch
from titan_rl.preflight.checks.role_folders import check_roles
from titan_rl.preflight.checks.sampling import check_sampling
from titan_rl.preflight.checks.sandbox import check_sandbox
from titan_rl.preflight.checks.titan_keys import check_titan_keys
from titan_rl.preflight.checks.whole_run import check_resume, check_run
from titan_rl.wire.gpus import NO_GPUS, Gpus

__all__ = ["gpus_needed", "host_problems", "missing_addresses", "problems", "warnings"]


def problems(config: Config, *, gpus: Gpus = NO_GPUS) -> list[str]:
    """Return everything that would make the run fail on a host with these GPUs."""
    config = on_device(config, device := device_of(config, gpus.count))
    shape, unusable = usable_shape(config)
    checks = [check_assets(config, shape), check_task(config), check_template_keys(config)]
    checks += [check_lengths(config, shape)] if shape else []
    readable = [*unusable, *(problem for check in checks for problem in check)]
    rows = [] if readable else list(check_row_lengths(config))  # measured with these assets, against these lengths
    rows += [] if readable or rows else check_chat(config)
    own = (check_run, check_titan_keys, check_algorithm, check_environment, check_evaluation, check_sandbox)
    others = [check(config) for check in (*own, check_launch)]
    others.append(check_hosts(config, gpus.count if device == "cuda" else 0))
    folders = list(check_folders(config))
    others += [folders if folders else check_resume(config, shape)]
    if shape:
        checks_of_shape = (check_dimensions, check_parallelism, check_sampling, check_roles)
        others += [check(config, shape) for check in checks_of_shape]
        if gpus.nbytes and device == "cuda":
            most = gpus_of_hosts(config, gpus.count)
            others.append(check_gpu_memory(config, shape, gpus.nbytes, most=most))
        others.append(check_cache_room(config, shape, gpus.nbytes if device == "cuda" else 0))
    found = (problem for check in (rows, *others) for problem in check)
    return [*readable, *found, *host_problems(config, gpus=gpus)]


def host_problems(config: Config, *, gpus: Gpus = NO_GPUS) -> list[str]:
    config = on_device(config, device_of(config, gpus.count))
    return [*check_driver(config, gpus), *check_placement(config, usable_shape(config)[0], gpus.count)]


def warnings(config: Config, *, gpus: Gpus = NO_GPUS) -> list[str]:
    """Return the settings that run, but are probably not intended."""
    config = on_device(config, device := device_of(config, gpus.count))
    found: list[str] = []
    trainer, generator = config.training.mixed_precision_param, config.generator.dtype
    if trainer != generator:
        found.append(
            f"generator.dtype is {generator}, training.mixed_precision_param is {trainer}: expect the log-probs of "
            "trainer and generator to differ by about 4e-3 on average, compared with 3e-7 if both are float32"
        )
    if config.debug.deterministic and config.model.head_dtype == "float32" and generator == "bfloat16":
        found.append(
            'model.head_dtype is "float32" with debug.deterministic: on a GPU vLLM\'s batch-invariant kernels do not '
            'cover a float32 head, so the log-probs of a sample depend on its batch; "model" is covered'
        )
    a = config.algorithm
    if a.kl_coef and a.kl == "k1" and a.kl_in == "loss":
        found.append(
            'algorithm.kl is "k1" in the loss: its gradient is zero on average and does not hold the policy near the '
            'reference; use "k2" or "k3", or algorithm.kl_in = "reward"'
        )
    if a.name == "ipo" and a.label_smoothing:
        found.append(f"algorithm.label_smoothing is {a.label_smoothing:g}: the loss of ipo does not use it")
    found += [*clip_warning(config), *attach_warnings(config), *chat_warnings(config)]
    if shape := usable_shape(config)[0]:
        found += cache_warning(config, shape, gpus.nbytes if device == "cuda" else 0)
    return [*found, *(snapshot_warning(config, shape) if gpus.here else [])]
