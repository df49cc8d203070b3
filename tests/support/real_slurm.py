"""A real Slurm cluster on this machine: munged, slurmctld on `head`, and slurmd on separate hosts.

Debian's packages are installed where they are missing. Files, keys and sockets are in the fixture's folder; all daemons
end with pytest.
"""

import json
import math
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from support.namespaces import Switch, dies_with_parent, why_not
from support.running import SMALL, RunFiles
from titan_rl.ext.fork_servers.fork_servers import VARIABLE

PROGRAMS = ("slurmctld", "slurmd", "munged", "sbatch")
NODES, HEAD = ("node1", "node2", "node3"), "head"
GPUS = 2  # per node: device files, which nothing opens
GRACE_SECONDS = 60
KILL_WAIT = 30
CGROUPS = Path("/sys/fs/cgroup")
CONTROLLERS = ("freezer", "cpuset", "memory", "devices", "cpuacct")
CONF = """\
ClusterName=mini
SlurmctldHost=head({head})
SlurmUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge
CredType=cred/munge
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
ProctrackType=proctrack/{tracking}
TaskPlugin=task/{task}
SelectType=select/cons_tres
SelectTypeParameters=CR_Core_Memory
SlurmdParameters=config_overrides
ReturnToService=2
KillWait={kill_wait}
SlurmdTimeout=30
PrologFlags=Contain
GresTypes=gpu
MailProg=/bin/true
AccountingStorageType=accounting_storage/none
SchedulerParameters=sched_interval=5,bf_interval=5
{nodes}
PartitionName=normal Nodes=ALL Default=YES DefaultTime=60
PartitionName=low Nodes=ALL DefaultTime=60 PriorityTier=1 PreemptMode=REQUEUE GraceTime={grace}
PartitionName=lowest Nodes=ALL DefaultTime=60 PriorityTier=1 PreemptMode=REQUEUE GraceTime=0
PartitionName=high Nodes=ALL DefaultTime=60 PriorityTier=100 PreemptMode=OFF
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
"""
CGROUP_CONF = """\
CgroupPlugin=cgroup/v1
CgroupMountpoint=/sys/fs/cgroup
CgroupAutomount=no
ConstrainRAMSpace=yes
"""


def why_no_slurm() -> str:
    """Install Slurm if need be. Return what this machine lacks for a cluster, or ""."""
    if os.getuid():
        return "a Slurm cluster needs namespaces, which root makes"
    if missing := [name for name in PROGRAMS if shutil.which(name) is None]:
        if shutil.which("apt-get") is None:
            return f"a Slurm cluster needs {', '.join(missing)}, which this machine has not and apt-get would install"
        quiet = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
        install = "apt-get update -q && apt-get install -y -q --no-install-recommends slurm-wlm munge"
        done = subprocess.run(["sh", "-c", install], capture_output=True, text=True, env=quiet, timeout=600)
        if done.returncode:
            last = (done.stderr.strip().splitlines() or ["no reason"])[-1]
            return f"a Slurm cluster needs {', '.join(missing)}, which apt-get did not install: {last}"
    return why_not()


def wait_for(condition: Callable[[], Any], what: str, timeout: float = 120) -> None:
    deadline = time.monotonic() + timeout
    while not condition():
        assert time.monotonic() < deadline, f"{what}: not within {timeout:g} s"
        time.sleep(0.1)


class RealSlurm:
    """Three nodes of two cores and two GPUs, and a head."""

    def __init__(self, stack: ExitStack, folder: Path) -> None:
        self.folder, self._stack = folder, stack
        self._cgroups = (CGROUPS / CONTROLLERS[0]).is_dir()  # version 1, the only one of 22.05 without systemd
        self.env = {key: value for key, value in os.environ.items() if key != VARIABLE}  # each node forks its own
        self.env |= {"SLURM_CONF": str(folder / "slurm.conf"), "PYTHONPATH": str(Path(__file__).parent)}
        inner, own = (own_cgroups, ["--cgroup"]) if self._cgroups else (lambda _: (), [])
        stack.callback(remove_cgroups)
        self.switch = Switch(stack, folder / "hosts", [*NODES, HEAD], inner, own)
        self._munge()
        self._configure()
        self._daemon(self.switch.hosts[HEAD].command("slurmctld", "-D", "-c", "-i"))
        for name in NODES:
            self.start_slurmd(name)
        self.wait_for_idle()

    def _munge(self) -> None:
        key = self.folder / "munge.key"
        key.write_bytes(os.urandom(128))
        key.chmod(0o600)
        files = {"key-file": key, "socket": self.folder / "munge", "pid-file": self.folder / "munged.pid"}
        files |= {"log-file": self.folder / "munged.log", "seed-file": self.folder / "munge.seed"}
        self._daemon(["munged", "--force", "--foreground", *(f"--{name}={path}" for name, path in files.items())])
        wait_for((self.folder / "munge").exists, "munged", 20)

    def _configure(self) -> None:
        hosts, nodes = self.switch.hosts, []
        for gpu in range(GPUS):
            os.mknod(self.folder / f"gpu{gpu}", 0o20666, os.makedev(1, 3))  # /dev/null by another name
        for name in NODES:
            nodes.append(f"NodeName={name} NodeAddr={hosts[name].address} CPUs=2 RealMemory=6000 Gres=gpu:{GPUS}")
            (self.folder / f"spool-{name}").mkdir()
        (self.folder / "state").mkdir()
        facts = {
            "head": hosts[HEAD].address,
            "folder": self.folder,
            "tracking": "cgroup" if self._cgroups else "linuxproc",
            "task": "cgroup" if self._cgroups else "none",
            "kill_wait": KILL_WAIT,
            "grace": GRACE_SECONDS,
            "nodes": "\n".join(nodes),
        }
        (self.folder / "slurm.conf").write_text(CONF.format(**facts))
        (self.folder / "cgroup.conf").write_text(CGROUP_CONF)
        gpus = f"NodeName={','.join(NODES)} Name=gpu File={self.folder}/gpu[0-{GPUS - 1}]\n"
        (self.folder / "gres.conf").write_text(gpus)

    def start_slurmd(self, name: str) -> None:
        into = f"for c in {' '.join(CONTROLLERS)}; do echo 0 > {CGROUPS}/$c/cgroup.procs; done; " * self._cgroups
        self._daemon(self.switch.hosts[name].command("sh", "-c", f"{into}exec slurmd -D"))

    def _daemon(self, command: Sequence[str]) -> None:
        with open(self.folder / "daemons.log", "ab") as log:
            daemon = subprocess.Popen(
                command, stdout=log, stderr=log, stdin=subprocess.DEVNULL, env=self.env, preexec_fn=dies_with_parent
            )
        self._stack.callback(daemon.wait)
        self._stack.callback(daemon.kill)

    def ask(self, *command: str) -> str:
        """Return what one of Slurm's programs prints on the head."""
        inside = self.switch.hosts[HEAD].command(*command)
        done = subprocess.run(inside, capture_output=True, text=True, env=self.env, timeout=60)
        assert done.returncode == 0, f"{command}: {done.stdout}{done.stderr}"
        return done.stdout.strip()

    def states(self) -> dict[str, str]:
        """Return the state of each node."""
        return dict(
            line.split() for line in self.ask("sinfo", "--Node", "-h", "-p", "normal", "-o", "%N %T").splitlines()
        )

    def wait_for_idle(self, timeout: float = 90) -> None:
        wait_for(lambda: set(self.states().values()) == {"idle"}, "all nodes are idle", timeout)

    def kill_node(self, name: str) -> None:
        self.switch.hosts[name].die()

    def boot_node(self, name: str) -> None:
        self.switch.boot(name)
        self.start_slurmd(name)

    @contextmanager
    def urgent_job(self) -> Iterator[None]:
        """Queue a job of all nodes that pre-empts others, until the end of the block."""
        job = self.ask("sbatch", "--parsable", "-p", "high", "-N3", "--exclusive", "-o/dev/null", "--wrap=sleep 600")
        try:
            yield
        finally:
            self.ask("scancel", job)

    def launch(self, folder: Path, *flags: str, within: Sequence[str] = ()) -> "SlurmRun":
        """Launch a run. `within`: a command that executes what follows it."""
        return SlurmRun.start(self, folder, within, *flags)


@dataclass
class SlurmRun(RunFiles):
    """A run that titan_rl launch follows on the head."""

    slurm: RealSlurm
    process: "subprocess.Popen[bytes]"
    held: Path  # while it exists, no reward is computed

    @classmethod
    def start(cls, slurm: RealSlurm, folder: Path, within: Sequence[str], *flags: str) -> "SlurmRun":
        command = [
            sys.executable,
            "-m",
            "titan_rl.tools.launch",
            "--config",
            "grpo_llama",
            "--on",
            "slurm",
            "--poll",
            "0.5",
        ]
        keys = {**SMALL, "algorithm.max_dead_steps": 0, "task.reward": "held_reward:exact", "job.dump_folder": folder}
        own = [f"--{key}={value}" for key, value in keys.items()]
        inside = slurm.switch.hosts[HEAD].command(*within, *command, *own, *flags)
        held = folder.with_suffix(".held")
        env = {**slurm.env, "HELD_REWARD": str(held)}
        with open(folder.with_suffix(".out"), "ab") as out:
            process = subprocess.Popen(inside, stdout=out, stderr=out, env=env, preexec_fn=dies_with_parent)
        return cls(folder, slurm, process, held)

    @property
    def out(self) -> str:
        """Return what the launcher has printed, in one line."""
        return " ".join(self.folder.with_suffix(".out").read_text(errors="replace").split())

    @property
    def launched(self) -> Path:
        return self.folder / "launch"

    @property
    def job(self) -> str:
        return str(json.loads((self.launched / "job.json").read_text())["slurm"])

    @property
    def launcher(self) -> psutil.Process:
        """Return the process of titan_rl.tools.launch."""
        started = [psutil.Process(self.process.pid), *psutil.Process(self.process.pid).children(recursive=True)]
        (launch,) = (each for each in started if each.cmdline()[1:3] == ["-m", "titan_rl.tools.launch"])
        return launch

    @property
    def facts(self) -> dict[str, str]:
        words = self.slurm.ask("scontrol", "show", "job", "--oneliner", self.job).split()
        return dict(word.split("=", 1) for word in words if "=" in word)

    @property
    def last_step(self) -> int:
        return max((line["step"] for line in self.lines("metrics.jsonl")), default=0)

    @property
    def back(self) -> int:
        """Return how many losses are over."""
        return sum(line["outcome"] == "back" for line in self.written("faults.jsonl"))

    def wait_for(self, condition: Callable[[], Any], what: str, timeout: float = 300) -> None:
        def happened() -> bool:
            assert self.process.poll() is None or condition(), f"it ended before {what}:\n{self.out}"
            return bool(condition())

        try:
            wait_for(happened, what, timeout)
        except AssertionError as error:
            raise AssertionError(f"{error}\n{self.out}") from None

    def wait_for_step(self, step: int, timeout: float = 300) -> None:
        self.wait_for(lambda: self.last_step >= step, f"step {step}", timeout)

    def wait_for_out(self, text: str, what: str, timeout: float = 300) -> None:
        """Wait until the launcher has printed a text once more."""
        before = self.out.count(text)
        self.wait_for(lambda: self.out.count(text) > before, what, timeout)

    def hold_after(self, step: int, timeout: float = 300) -> None:
        self.wait_for_step(step, timeout)
        self.held.touch()

    def release(self) -> None:
        self.held.unlink()

    def limit_soon(self) -> None:
        """Move the job's time limit, a number of minutes, to 40 to 100 seconds from now."""
        hours, minutes, seconds = (int(part) for part in self.facts["RunTime"].split(":"))
        limit = math.ceil((3600 * hours + 60 * minutes + seconds + 40) / 60)
        self.slurm.ask("scontrol", "update", f"JobId={self.job}", f"TimeLimit={limit}")

    def hurry(self, restarts: int) -> None:
        """Wait until the requeued job has started again, at once: Slurm would wait for two minutes."""

        def started() -> bool:
            facts = self.facts
            if facts["Reason"] == "BeginTime":  # set once more when the last node has left the job
                self.slurm.ask("scontrol", "update", f"JobId={self.job}", "StartTime=now")
            return facts["JobState"] == "RUNNING" and facts["Restarts"] == str(restarts)

        self.wait_for(started, f"its restart {restarts}")

    def finish(self, timeout: float = 400) -> int:
        """Return the launcher's exit code."""
        try:
            return self.process.wait(timeout)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"it runs for more than {timeout:g} s:\n{self.out}") from None


def own_cgroups(name: str) -> list[str]:
    """Return a command that executes what follows it in new cgroups, which it mounts in place of this machine's."""
    enter, mount = "", ""
    for controller in CONTROLLERS:
        folder = f"{CGROUPS}/{controller}/{cgroup_of(name)}"
        enter += f"mkdir -p {folder} && "
        if controller == "cpuset":
            enter += f"for f in cpus mems; do cat {CGROUPS}/cpuset/cpuset.$f > {folder}/cpuset.$f || exit 1; done && "
        enter += f"echo 0 > {folder}/cgroup.procs && "
        target = f"{CGROUPS}/{controller}"
        mount += f"mkdir {target} && mount -t cgroup -o {controller} cgroup {target} && "
    inside = f'mount -t tmpfs none {CGROUPS} && {mount}exec "$@"'
    return ["sh", "-c", f"{enter}exec unshare --cgroup sh -c '{inside}' init \"$@\"", "init"]


def cgroup_of(name: str) -> str:
    return f"titan-{os.getpid()}-{name}"


def remove_cgroups() -> None:
    """Remove the cgroups of hosts that have been killed, with all that Slurm made in them."""

    def removed() -> bool:
        for controller in CONTROLLERS:
            for top in (CGROUPS / controller).glob(cgroup_of("*")):
                for folder in sorted((path for path in [top, *top.rglob("*")] if path.is_dir()), reverse=True):
                    with suppress(OSError):  # its last process has not ended yet
                        folder.rmdir()
        return not list(CGROUPS.glob(f"*/{cgroup_of('*')}"))

    wait_for(removed, "cgroups of the hosts are empty", 20)
