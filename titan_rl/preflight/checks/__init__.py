"""Every check of a run before anything is spawned: keys against each other, against files, and against this machine.

    load (the command line) -> config_problems, host_problems -> refused, or a run with warnings -> plan.prepare

toml.py checks each key by itself. Every problem is one line with the key to change, the expected value and the value
found.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace

from titan_rl.config.auto import device_of, on_device
from titan_rl.config.sections import Config
from titan_rl.preflight.added_parameters import with_adapter_sync
from titan_rl.preflight.checks import (
    algorithm,
    folders,
    hosts,
    machine,
    model,
    rollouts,
    task,
)
from titan_rl.preflight.checks.parts import MODEL_CHECKS, check_parts, checks_of_parts, without_snapshots
from titan_rl.preflight.checks.unread import unread_keys
from titan_rl.preflight.load import Invocation, load
from titan_rl.preflight.memory import ONE_POLICY, AdapterCounts
from titan_rl.preflight.placement import gpus_of_hosts
from titan_rl.preflight.refusal import refuse, refusing
from titan_rl.preflight.shapes import usable_shape
from titan_rl.preflight.snapshot_sizes import snapshot_sizes
from titan_rl.wire.gpus import NO_GPUS, Gpus
from titan_rl.wire.parts import missing_part, needed_part, part


@refusing
def checked_run(argv: Sequence[str], counts: AdapterCounts | None = None) -> Invocation:
    """Return the run that the arguments describe, with warnings. Exit with 2 after printing every problem. `counts`:
    a server's, instead of the config's."""
    run = without_snapshots(load(argv))
    run = replace(run, adapters=counts or run.adapters)
    refused, warned = judged(run)
    if refused:
        refuse(run.given_name, refused)
    return replace(run, warnings=(*run.warnings, *warned))


def judged(run: Invocation) -> tuple[list[str], list[str]]:
    """Return the problems of a run, and its warnings. A dry run only warns of this machine's problems: its plan may be
    for another one."""
    if run.policies:
        of_policies = part("checks of policies")
        return of_policies(run, judged) if of_policies else ([missing_part("checks of policies", "policies")], [])
    config, gpus = run.config, run.gpus
    refused, here = [*run.problems, *config_problems(config, gpus, run.adapters)], host_problems(config, gpus=gpus)
    if run.dry_run and gpus.here and config.hosts.device != "cpu":
        return refused, [*warnings(config, gpus=gpus, counts=run.adapters, scaled=run.scaled), *here]
    return [*refused, *here], warnings(config, gpus=gpus, counts=run.adapters, scaled=run.scaled)


def problems(config: Config, *, gpus: Gpus = NO_GPUS) -> list[str]:
    """Return everything that would make the run fail on a host with these GPUs."""
    return [*config_problems(config, gpus), *host_problems(config, gpus=gpus)]


def config_problems(config: Config, gpus: Gpus, counts: AdapterCounts = ONE_POLICY) -> Iterator[str]:
    """Yield the problems of keys and files, and of memory on GPUs of this size."""
    if missing := list(check_parts(config)):
        yield from missing
        return
    device = device_of(config, gpus.count)
    config, gpus = on_device(config, device), gpus if device == "cuda" else NO_GPUS
    shape, unusable = usable_shape(config)
    unreadable = [
        *unusable,
        *model.check_assets(config, shape),
        *task.check_task(config),
        *task.check_template_keys(config),
        *(model.check_lengths(config, shape) if shape else ()),
    ]
    yield from unreadable or list(task.check_row_lengths(config)) or task.check_chat(config)  # with readable assets
    yield from algorithm.check_steps(config)
    yield from algorithm.check_titan_keys(config)
    yield from algorithm.check_moments(config)
    yield from algorithm.check_algorithm(config)
    yield from rollouts.check_evaluation(config)
    for each in checks_of_parts(config):
        yield from each.problems(config)
    yield from hosts.check_hosts(config, gpus.count)
    yield from list(folders.check_folders(config)) or folders.check_resume(config, shape)
    if shape is None:
        return
    config = with_adapter_sync(config, shape, device)
    yield from model.check_dimensions(config, shape)
    yield from model.check_parallelism(config, shape)
    yield from model.check_spec(config, shape)
    if config.generator.quantization != "none":
        yield from needed_part("checks of quantization", "generator.quantization")(config, shape, device)
    for each in checks_of_parts(config, MODEL_CHECKS):
        yield from each.problems(config, shape, device)
    yield from algorithm.check_sampling(config, shape)
    yield from algorithm.check_routing_replay(config, shape)
    yield from model.check_roles(config, shape)
    if gpus.nbytes:
        most = gpus_of_hosts(config, gpus.count)
        yield from machine.check_gpu_memory(config, shape, gpus.nbytes, most=most, adapters=counts)
    yield from machine.check_cache_room(config, shape, gpus.nbytes, counts)


def host_problems(config: Config, *, gpus: Gpus = NO_GPUS) -> list[str]:
    """Return the problems that a host with other GPUs would not have."""
    config = on_device(config, device := device_of(config, gpus.count))
    return [
        *machine.check_driver(config, gpus),
        *machine.check_engine(config, device),
        *machine.check_placement(config, usable_shape(config)[0], gpus.count),
    ]


def warnings(
    config: Config, *, gpus: Gpus = NO_GPUS, counts: AdapterCounts = ONE_POLICY, scaled: Sequence[str] = ()
) -> list[str]:
    """Return the settings that run, but are probably not intended. `scaled`: what --scale has changed."""
    found = [*unread_keys(config, scaled)]
    config = on_device(config, device := device_of(config, gpus.count))
    found += [*algorithm.algorithm_warnings(config), *task.chat_warnings(config)]
    found += [
        *task.data_warnings(config),
        *(warning for each in checks_of_parts(config) for warning in each.warnings(config)),
    ]
    if shape := usable_shape(config)[0]:
        config = with_adapter_sync(config, shape, device)
        for each in checks_of_parts(config, MODEL_CHECKS):
            found += each.warnings(config, shape, device)
        found += machine.cache_warning(config, shape, gpus.nbytes if device == "cuda" else 0, counts)
        found += snapshot_sizes(config).warnings(shape) if gpus.here else ()
    return found
