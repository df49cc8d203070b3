"""Checks of [launch], and of what python -m titan_rl.launch needs to submit a run."""

import re
import shutil
from collections.abc import Iterator
from dataclasses import fields
from pathlib import PurePosixPath
from typing import Literal

from titan_rl.config.sections import Config
from titan_rl.config.toml import as_toml

Scheduler = Literal["slurm", "kubernetes"]
PROGRAMS = ("sbatch", "squeue", "scontrol")
STOP_SECONDS = 30  # on top of fault.stop_grace_seconds: ranks end, and schedulers signal late
MOUNT = re.compile(r"(/[^:,]*|(pvc|secret)/[a-z0-9.-]+):/[^:,]*(:ro)?")
NAME = re.compile(r"[a-z0-9]([a-z0-9-]{0,50}[a-z0-9])?")  # Kubernetes adds a dash and a number, of 63 characters
CLAIMED = ("pvc/", "secret/")


def gpus_of_node(config: Config) -> int:
    return config.launch.gpus_per_node or (config.hosts.slots if config.hosts.device != "cpu" else 0)


def stop_seconds(config: Config) -> int:
    """Return how long before its end a job must hear of it, so that the run has saved by then."""
    return int(config.fault.stop_grace_seconds) + STOP_SECONDS


def check_launch(config: Config) -> Iterator[str]:
    launch = config.launch
    for key in fields(launch):
        value = getattr(launch, key.name)
        for text in value if isinstance(value, list) else [value]:
            if isinstance(text, str) and key.name != "setup" and not text.isprintable():
                yield f"launch.{key.name}: expected one line of printable text, found {as_toml(text)}"
    for mount in launch.mounts:
        if not MOUNT.fullmatch(mount):
            expected = '"/folder:/path", "pvc/claim:/path" or "secret/name:/path", each also with ":ro"'
            yield f"launch.mounts: expected {expected}, found {as_toml(mount)}"
    for argument in launch.extra_args:
        if not argument.startswith("-"):
            yield f"launch.extra_args: expected arguments of sbatch, such as --constraint=h100, found {argument!r}"
    if launch.minutes and 60 * launch.minutes <= stop_seconds(config):
        least = stop_seconds(config) // 60 + 1
        yield (
            f"launch.minutes: expected at least {least} with fault.stop_grace_seconds = "
            f"{config.fault.stop_grace_seconds:g}, found {launch.minutes}"
        )


def check_submission(config: Config, on: Scheduler, prints: bool) -> Iterator[str]:
    launch = config.launch
    if prints and config.job.fresh:
        yield "job.fresh: expected false with --print, which moves no folder, found true"
    if config.hosts.device == "cuda" and not gpus_of_node(config):
        yield 'launch.gpus_per_node: expected the GPUs of each node with hosts.device = "cuda", found 0'
    if on == "slurm":
        missing = [program for program in PROGRAMS if shutil.which(program) is None]
        if missing and not prints:
            found = f"found no {', '.join(missing)}; --print needs none"
            yield f"--on slurm: expected {', '.join(PROGRAMS)} on PATH, {found}"
        for mount in launch.mounts:
            if mount.startswith(CLAIMED):
                yield f"launch.mounts: expected a folder of the nodes with --on slurm, found {as_toml(mount)}"
        if launch.mounts and not launch.image:
            yield "launch.mounts: expected none without launch.image, found some"
        return
    if not launch.image:
        yield "launch.image: expected a container image with --on kubernetes, found none"
    if config.job.fresh:
        yield "job.fresh: expected false with --on kubernetes: pods that start again would start over, found true"
    if launch.name and not NAME.fullmatch(launch.name):
        expected = "lowercase letters, digits and dashes, at most 52,"
        yield f"launch.name: expected {expected} with --on kubernetes, found {as_toml(launch.name)}"
    targets = [mount.split(":")[1] for mount in launch.mounts if MOUNT.fullmatch(mount)]
    folder = PurePosixPath(config.job.dump_folder)
    if not any(folder.is_relative_to(target) for target in targets):
        expected = f"a folder below one of launch.mounts ({', '.join(targets) or 'none'}), which outlives the pods"
        yield f"job.dump_folder: expected {expected}, found {as_toml(config.job.dump_folder)}"
