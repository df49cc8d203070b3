"""Reads the command line and the TOML file into a Config: --config, --dry-run, --scale, --help, and --section.key."""

import atexit
import difflib
import shutil
import tempfile
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal

from rich.console import Console

from titan_rl.config import toml as config_file
from titan_rl.config.auto import device_of
from titan_rl.config.foreign_names import foreign_hint
from titan_rl.config.sections import Config
from titan_rl.config.toml import ConfigError, as_toml, schema
from titan_rl.preflight.help import print_help, print_usage
from titan_rl.preflight.memory import ONE_POLICY, AdapterCounts
from titan_rl.preflight.placement import gpus_needed
from titan_rl.preflight.pretrained import FetchFailed, with_models
from titan_rl.preflight.refusal import refuse
from titan_rl.wire.gpus import NO_GPUS, Gpus, found_gpus
from titan_rl.wire.parts import has_part, missing_part, needed_part

TINY = "tiny"


@dataclass(frozen=True, slots=True, kw_only=True)
class Invocation:
    """A command line: a config, and the GPUs that it runs on or plans for."""

    config_name: str
    config: Config
    dry_run: bool
    policies: Mapping[str, Config] = field(default_factory=dict)  # [policies]; then `config` is the shared part
    adapters: AdapterCounts = ONE_POLICY
    gpus: Gpus = NO_GPUS
    problems: tuple[str, ...] = ()  # found in the command line
    warnings: tuple[str, ...] = ()
    scaled: tuple[str, ...] = ()  # keys that --scale changed, and how
    given_name: str = field(default="", compare=False)  # the config, as it was typed

    @property
    def device(self) -> Literal["cpu", "cuda"]:
        return device_of(self.config, self.gpus.count)


@dataclass(slots=True)
class Arguments:
    """A command line as read, before the config file is."""

    config: str = ""
    scale: str = ""
    dry_run: bool = False
    overrides: list[tuple[str, str]] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)


def load(argv: Sequence[str], *, submits: bool = False) -> Invocation:
    """Return the run that the arguments describe, not checked yet. Exit with 2 after printing every problem of a file
    that cannot be read, or how to use this if there are no arguments; with 0 after --help. A dry run that `submits` the
    run leaves what --scale writes."""
    if not argv:
        print_usage(Console(stderr=True, highlight=False, markup=False))
        raise SystemExit(2)
    if "--help" in argv or "-h" in argv:
        print_help(argv)
        raise SystemExit(0)
    arguments, gpus, scaled, notes = read(argv), found_gpus(), list[str](), list[str]()
    configs = dict[str, Config]()  # by policy; "": what all share
    try:
        path = config_file.find(arguments.config)
    except ConfigError as error:
        refuse(arguments.config, [*arguments.problems, *error.problems])
    names = config_file.policies_of(path)
    problems = [*arguments.problems, *config_file.problems_of_names(names, arguments.overrides)]
    for name in ("", *names):
        try:
            configs[name] = config_file.load(
                path, arguments.overrides, gpus=gpus.count > 0, notes=None if name else notes, policy=name
            )
        except ConfigError as error:
            problems += [problem for problem in error.problems if problem not in problems]  # shared ones come again
    if len(problems) > len(arguments.problems):
        refuse(arguments.config, problems)
    config, policies = configs.pop(""), configs
    if arguments.scale == TINY and not has_part("tiny runs"):
        refuse(arguments.config, [missing_part("tiny runs", "--scale")])
    if arguments.scale == TINY:
        shrunk = needed_part("tiny runs", "--scale")
        models, keys = stand_ins(config, arguments.dry_run and not submits), {key for key, _ in arguments.overrides}
        config, scaled = shrunk(config, keys, models)
        policies = {name: shrunk(each, keys, models)[0] for name, each in policies.items()}
    try:
        config = with_models(config)  # no model that --scale has replaced
        policies = {name: with_models(each) for name, each in policies.items()}
    except FetchFailed as error:
        refuse(arguments.config, [str(error)])
    away = config.hosts.at_addresses and config.hosts.device == "cuda"  # the workers' hosts have GPUs
    planned = arguments.dry_run and config.hosts.device != "cpu" and config.hosts.gpu_memory_gb
    if not gpus.count and (away or planned):
        gpus = planned_gpus(config)
    if gpus.here and gpus.count and not gpus.nbytes and config.hosts.device != "cpu":
        gpus = replace(gpus, nbytes=int(config.hosts.gpu_memory_gb * 2**30))
        if not gpus.nbytes:
            why = "because neither nvidia-smi nor the driver has it, as for some MIG slices"
            arguments.problems.append(f"hosts.gpu_memory_gb: expected the memory of one GPU in GiB, {why}, found 0")
    config, policies = with_card(config, gpus), {name: with_card(each, gpus) for name, each in policies.items()}
    return Invocation(
        given_name=arguments.config,
        config_name=path.stem,
        config=config,
        dry_run=arguments.dry_run,
        policies=policies,
        adapters=AdapterCounts.of_policies(len(policies) or 1),
        gpus=gpus,
        problems=tuple(arguments.problems),
        warnings=tuple(notes),
        scaled=tuple(scaled),
    )


def stand_ins(config: Config, dry_run: bool) -> Path:
    """Return where --scale writes tiny models for roles: next to the dump folder, or where a dry run leaves nothing."""
    if not dry_run:
        return Path(f"{config.job.dump_folder}_tiny_models")
    folder = tempfile.mkdtemp(prefix="titan_rl-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return Path(folder)


def planned_gpus(config: Config) -> Gpus:
    """Return the GPUs that a dry run plans for: of one host, or of a machine whose `processes` share them."""
    hosts = config.hosts
    count = hosts.slots or -(-gpus_needed(config) // hosts.number)
    if hosts.kind == "processes":
        count *= hosts.number
    return Gpus(count, int(config.hosts.gpu_memory_gb * 2**30), here=False)


def with_card(config: Config, gpus: Gpus) -> Config:
    """Return the config with the name of the GPUs that it runs on, unless it names others."""
    return config if config.hosts.gpu else replace(config, hosts=replace(config.hosts, gpu=gpus.name))


def read(argv: Sequence[str]) -> Arguments:
    arguments = Arguments()
    rest = deque(argv)
    while rest:
        flag, equals, value = rest.popleft().partition("=")
        if not flag.startswith("--"):
            found = f"{as_toml(f'{flag}{equals}{value}')}{foreign_hint(flag)}"
            arguments.problems.append(f"expected a flag, such as --training.steps 20, found {found}")
        elif flag == "--dry-run":
            arguments.dry_run = True
            if equals:
                arguments.problems.append(f"--dry-run: expected no value, found {as_toml(value)}")
        else:
            if not equals:  # one dash: a negative number
                value = rest.popleft() if rest and not rest[0].startswith("--") else None
            _take(arguments, flag, value)
    return arguments


def _take(arguments: Arguments, flag: str, value: str | None) -> None:
    name = flag.removeprefix("--").replace("-", "_")
    section, dot, key_name = name.partition(".")
    key = schema().get(section, {}).get(key_name)
    if name == "config":
        if arguments.config:
            arguments.problems.append(f"--config: expected one file, found {as_toml(value or '')} too")
        arguments.config = value or ""
    elif name == "scale":
        if value != TINY:
            arguments.problems.append(f"--scale: expected {as_toml(TINY)}, found {as_toml(value or '')}")
        arguments.scale = value or ""
    elif key and value is None and not key.is_switch:
        arguments.problems.append(f"--{name}: expected {key.expected}, found no value")
    elif hint := "" if key else foreign_hint(name):
        arguments.problems.append(f"--{name}: unknown flag{hint}")
    elif dot:  # `load` refuses keys that do not exist
        arguments.overrides.append((name, "true" if value is None else value))
    else:
        arguments.problems.append(f"{flag}: unknown flag{_similar(name)}")


def _similar(name: str) -> str:
    """Return the end of a message about an unknown flag: the flags of that key, or a flag of nearly that name."""
    homes = {name: [f"--{name.replace('_', '-')}"] for name in ("dry_run", "config", "scale", "help")}
    for section, keys in schema().items():
        for key in keys:
            homes.setdefault(key, []).append(f"--{section}.{key}")
    near = difflib.get_close_matches(name[:100], homes, n=1, cutoff=0.75)
    return f"; did you mean {' or '.join(homes[near[0]])}?" if near else ""
