"""What a scheduler runs, from a config: pure functions of it."""

import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from titan_rl.config.presets import algorithm_of
from titan_rl.config.sections import Config
from titan_rl.config.toml import as_toml, schema
from titan_rl.launch.submission import gpus_of_node
from titan_rl.preflight.checks.hosts import stop_seconds

FOLDER = "launch"  # in the run's folder: the script, its config, the logs of nodes

RETRIES = 1
"""Starts of a job after its run has failed (exit code 1)."""
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
    folder: Path  # of the run

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
