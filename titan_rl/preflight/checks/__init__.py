"""Every check of a run before anything is spawned: keys against each other, against files, and against this machine.

toml.py checks each key by itself. Every problem is one line with the key to change, the expected value and the value
found.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace

from titan_rl.config.auto import device_of, on_device
from titan_rl.config.sections import Config
from titan_rl.preflight.checks import algorithm, folders, hosts, machine, model, rollouts, task
from titan_rl.preflight.load import Invocation, load
from titan_rl.preflight.placement import gpus_of_hosts
from titan_rl.preflight.refusal import refuse, refusing
from titan_rl.preflight.shapes import usable_shape
from titan_rl.wire.gpus import NO_GPUS, Gpus

OF_CONFIG = (
    *(algorithm.check_steps, algorithm.check_titan_keys, algorithm.check_algorithm),
    *(rollouts.check_environment, rollouts.check_evaluation, rollouts.check_sandbox, hosts.check_launch),
)
OF_SHAPE = (model.check_dimensions, model.check_parallelism, algorithm.check_sampling, model.check_roles)


@refusing
def checked_run(
    argv: Sequence[str],
    also: Callable[[Config], Iterable[str]] = lambda _: (),
    only_warns: Callable[[Config, str], bool] = lambda *_: False,
    *,
    submits: bool = False,
) -> Invocation:
    """Return the run that the arguments describe, with warnings. Exit with 2 after printing every problem. `also`
    returns more problems of a config; a problem that `only_warns` is for another machine to find. A dry run that
    `submits` the run leaves what --scale writes."""
    run = load(argv, submits=submits)
    found, gpus = [*run.problems, *problems(run.config, gpus=run.gpus)], run.gpus
    elsewhere = list[str]()  # problems of this machine, where the plan of a dry run may be for another one
    if run.dry_run and gpus.here and run.config.hosts.device != "cpu":
        elsewhere = host_problems(run.config, gpus=gpus)
    warns = [text for text in found if only_warns(run.config, text)]
    found = [*also(run.config), *(text for text in found if text not in warns and text not in elsewhere)]
    if found:
        refuse(run.given_name, found)
    return replace(run, warnings=(*run.warnings, *warnings(run.config, gpus=gpus), *warns, *elsewhere))


def problems(config: Config, *, gpus: Gpus = NO_GPUS) -> list[str]:
    """Return everything that would make the run fail on a host with these GPUs."""
    return list(_problems(on_device(config, device_of(config, gpus.count)), gpus))


def _problems(config: Config, gpus: Gpus) -> Iterator[str]:
    on_gpus = device_of(config, gpus.count) == "cuda"
    gpu_bytes = gpus.nbytes if on_gpus else 0
    shape, unusable = usable_shape(config)
    readable = [
        *unusable,
        *model.check_assets(config, shape),
        *task.check_task(config),
        *task.check_template_keys(config),
    ]
    readable += model.check_lengths(config, shape) if shape else ()
    yield from readable
    if not readable:  # rows and chats are measured with these assets, against these lengths
        unfit = list(task.check_row_lengths(config))
        yield from unfit or task.check_chat(config)
    for check in OF_CONFIG:
        yield from check(config)
    yield from hosts.check_hosts(config, gpus.count if on_gpus else 0)
    yield from list(folders.check_folders(config)) or folders.check_resume(config, shape)
    if shape:
        for check in OF_SHAPE:
            yield from check(config, shape)
        if gpu_bytes:
            yield from machine.check_gpu_memory(config, shape, gpu_bytes, most=gpus_of_hosts(config, gpus.count))
        yield from machine.check_cache_room(config, shape, gpu_bytes)
    yield from host_problems(config, gpus=gpus)


def host_problems(config: Config, *, gpus: Gpus = NO_GPUS) -> list[str]:
    """Return those problems that a host with other GPUs would not have."""
    config = on_device(config, device_of(config, gpus.count))
    return [*machine.check_driver(config, gpus), *machine.check_placement(config, usable_shape(config)[0], gpus.count)]


def warnings(config: Config, *, gpus: Gpus = NO_GPUS) -> list[str]:
    """Return the settings that run, but are probably not intended."""
    config = on_device(config, device := device_of(config, gpus.count))
    found = [*algorithm.algorithm_warnings(config), *hosts.attach_warnings(config), *task.chat_warnings(config)]
    shape = usable_shape(config)[0]
    if shape:
        found += machine.cache_warning(config, shape, gpus.nbytes if device == "cuda" else 0)
    return [*found, *(machine.snapshot_warning(config, shape) if gpus.here else ())]
