"""The job that a scheduler runs, as a pure function of a config; and the checks of the keys that it needs."""

import re
import shutil
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path, PurePosixPath
from typing import Literal

from titan_rl.config.presets import algorithm_of
from titan_rl.config.sections import Config, HostsSection
from titan_rl.config.toml import as_toml, schema
from titan_rl.tools.launch.checks import MOUNT, stop_seconds
from titan_rl.tools.launch.pod_patch import PatchRefused, read_patch

Scheduler = Literal["slurm", "kubernetes"]
PROGRAMS = ("sbatch", "squeue", "scontrol")
FOLDER = "launch"  # in the run's folder: the script, its config, the logs of nodes

OWN = "/titan_rl"  # in pods: the folder of the TOML and the certificates
SHARED_MEMORY = "/dev/shm"
LABEL = r"[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?"  # as Kubernetes wants names
LETTERS = "lower-case letters, digits and dashes"

RETRIES = 1
"""Starts of a job after its run has failed (exit code 1)."""
JOIN_SECONDS = 1800
"""hosts.join_seconds of a job that sets none: nodes are made, and import an image."""
REQUEUES = 100
"""Returns of a Slurm job to the queue after it was asked to stop before its time limit."""

WAIT = """\
while :; do
    interrupted=
    wait "$run"; status=$?
    [ "$status" = 127 ] || code=$status  # 127: it was waited for already
    [ -n "$interrupted" ] || break
done
"""
"""Waits in bash for the process $run, however often a trap interrupts that and sets $interrupted. Its exit code is in
$code."""


@dataclass(frozen=True, slots=True)
class Job:
    """A run as one job of `nodes` nodes."""

    config: Config
    config_name: str
    folder: Path  # the run's

    @classmethod
    def of(cls, config: Config, config_name: str) -> "Job":
        """An old run is moved before the job is submitted, not whenever the job starts."""
        config = replace(config, job=replace(config.job, fresh=False))
        return cls(config, config_name, Path(config.job.dump_folder).absolute())

    @property
    def name(self) -> str:
        return self.folder.name

    @property
    def nodes(self) -> int:
        return self.config.hosts.number

    @property
    def gpus(self) -> int:
        """Return the GPUs of a node."""
        return gpus_of_node(self.config)

    @property
    def scheme(self) -> str:
        return "tcp" if self.config.hosts.insecure and not self.config.hosts.tls else "tls"

    @property
    def python(self) -> str:
        return self.config.launch.python or ("python3" if self.config.launch.image else sys.executable)

    @property
    def stop_seconds(self) -> int:
        return stop_seconds(self.config)

    @property
    def joining(self) -> str:
        """Return the argument that gives late nodes time, unless the config sets hosts.join_seconds."""
        unset = self.config.hosts.join_seconds == HostsSection().join_seconds
        return f" --hosts.join_seconds={JOIN_SECONDS}" if unset else ""

    @property
    def own(self) -> Path:
        return self.folder / FOLDER

    @property
    def config_file(self) -> str:
        return f"{self.config_name}.toml"

    def toml(self) -> str:
        """Return a TOML file of the run that needs no other: a job that waits for days does not change with its base,
        and a restarted one continues the same run. Where its hosts are is decided by the job."""
        hosts = replace(self.config.hosts, kind="local", addresses=[], count=0)
        return changed_toml(replace(self.config, hosts=hosts))


def changed_toml(config: Config) -> str:
    """Write the keys that differ from their defaults; `load` reads an equal config."""
    own = {"name": config.algorithm.name, "proximal": config.algorithm.proximal}  # other defaults depend on these two
    usual = replace(Config(), algorithm=algorithm_of(own, config))

    def lines(section: str) -> Iterator[str]:
        for name in schema()[section]:
            value = getattr(getattr(config, section), name)
            if value != getattr(getattr(usual, section), name) or (section == "algorithm" and name in own):
                yield f"{name} = {as_toml(value)}"

    blocks = {section: list(lines(section)) for section in schema()}
    return "\n".join("\n".join([f"[{section}]", *block, ""]) for section, block in blocks.items() if block)


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
            if mount.startswith(("pvc/", "secret/")):
                yield f"launch.mounts: expected a folder of the nodes with --on slurm, found {as_toml(mount)}"
        if launch.mounts and not launch.image:
            yield "launch.mounts: expected none without launch.image, found some"
        return
    yield from _names_problems(config)
    try:
        read_patch(launch.pod)
    except PatchRefused as error:
        yield f"launch.pod: {error}"
    if not launch.image:
        yield "launch.image: expected a container image with --on kubernetes, found none (docs/clusters.md makes one)"
    if config.job.fresh:
        yield "job.fresh: expected false with --on kubernetes: pods that start again would start over, found true"
    targets = [mount.split(":")[1] for mount in launch.mounts if MOUNT.fullmatch(mount)]
    folder = PurePosixPath(config.job.dump_folder)
    if not any(folder.is_relative_to(target) for target in targets):
        expected = f"a folder below one of launch.mounts ({', '.join(targets) or 'none'}), which outlives the pods"
        yield f"job.dump_folder: expected {expected}, found {as_toml(config.job.dump_folder)}"


def _names_problems(config: Config) -> Iterator[str]:
    """Yield which names and paths Kubernetes would refuse."""
    launch = config.launch
    if launch.namespace and not re.fullmatch(LABEL, launch.namespace):
        yield f"launch.namespace: expected {LETTERS}, at most 63, found {as_toml(launch.namespace)}"
    for secret in launch.secrets:
        if len(secret) > 253 or not re.fullmatch(rf"{LABEL}(\.{LABEL})*", secret):
            yield f"launch.secrets: expected {LETTERS}, also with dots, found {as_toml(secret)}"
    taken = {SHARED_MEMORY, f"{OWN}/config", f"{OWN}/tls"}
    for source, path in (mount.split(":")[:2] for mount in launch.mounts if MOUNT.fullmatch(mount)):
        if ".." in source.split("/"):
            yield f'launch.mounts: expected a folder without "..", found {as_toml(source)}'
        if path in taken:
            yield f"launch.mounts: expected other paths than {', '.join(sorted(taken))}, found {as_toml(path)}"
        taken.add(path)
