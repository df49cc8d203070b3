"""Checks of what a scheduler needs to take a run, besides the checks of every run."""

import shutil
from collections.abc import Iterator
from pathlib import PurePosixPath
from typing import Literal

from titan_rl.config.sections import Config
from titan_rl.config.toml import as_toml
from titan_rl.preflight.checks.hosts import MOUNT

Scheduler = Literal["slurm", "kubernetes"]
PROGRAMS = ("sbatch", "squeue", "scontrol")
CLAIMED = ("pvc/", "secret/")


def gpus_of_node(config: Config) -> int:
    return config.hosts.slots if config.hosts.device != "cpu" else 0


def check_submission(config: Config, on: Scheduler, prints: bool) -> Iterator[str]:
    launch = config.launch
    if prints and config.job.fresh:
        yield "job.fresh: expected false with --print, which moves no folder, found true"
    if config.hosts.device == "cuda" and not gpus_of_node(config):
        yield 'hosts.slots: expected the GPUs of each node with hosts.device = "cuda", found 0'
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
    targets = [mount.split(":")[1] for mount in launch.mounts if MOUNT.fullmatch(mount)]
    folder = PurePosixPath(config.job.dump_folder)
    if not any(folder.is_relative_to(target) for target in targets):
        expected = f"a folder below one of launch.mounts ({', '.join(targets) or 'none'}), which outlives the pods"
        yield f"job.dump_folder: expected {expected}, found {as_toml(config.job.dump_folder)}"
