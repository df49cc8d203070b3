"""A job in Slurm's queue, seen through Slurm's own programs."""

import os
import signal
import subprocess
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from titan_rl.tools.launch.following import ENDED, Look, SubmissionFailed
from titan_rl.wire.program import FAILED, STOPPED

CALL_SECONDS = 120.0  # a busy controller of Slurm takes a minute
GONE = "Invalid job id"  # squeue's word for jobs that ended a while ago
CLUSTER = ("SLURM_CONF", "SLURM_CONF_SERVER", "SLURM_CLUSTERS", "SLURM_JWT")  # which cluster, and access to it


def submit_script(path: Path) -> str:
    """Return the number of the job. It has this process's environment, without what describes the job or allocation
    that this process is in: srun would take limits and numbers of tasks from it."""
    own = {name: value for name, value in os.environ.items() if not name.startswith(("SLURM_", "SLURMD_"))}
    own |= {name: os.environ[name] for name in CLUSTER if name in os.environ}
    answer = call("sbatch", "--parsable", str(path), env=own)
    if answer.returncode:
        raise SubmissionFailed(f"sbatch refused {path}: {answer.stderr.strip()}")
    return answer.stdout.strip().partition(";")[0]


def run_script(path: Path) -> int:
    """Run a job's script in the allocation that this process is in. A signal to stop makes the run save and end."""
    process = subprocess.Popen(["bash", str(path), "here"], stdin=subprocess.DEVNULL, start_new_session=True)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda *_: process.send_signal(signal.SIGUSR1))
    return process.wait()


def check_allocation(nodes: int) -> Iterator[str]:
    found = os.environ.get("SLURM_JOB_NUM_NODES", "0")
    if found != str(nodes):
        yield f"--here: expected an allocation of hosts.count nodes (salloc --nodes={nodes}), found {found} nodes"


def call(*command: str, env: Mapping[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    try:
        return subprocess.run(
            command, capture_output=True, text=True, timeout=CALL_SECONDS, stdin=subprocess.DEVNULL, env=env
        )
    except subprocess.TimeoutExpired:
        return subprocess.CompletedProcess(command, 1, "", f"no answer within {CALL_SECONDS:g} s")


@dataclass(slots=True)
class SlurmJob:
    """A submitted job, whose files are in `own`."""

    number: str
    own: Path
    read: int = 0  # bytes of its log

    @property
    def name(self) -> str:
        return f"Slurm job {self.number}"

    @property
    def ends_it(self) -> str:
        return f"scancel {self.number}"

    def look(self) -> Look:
        answer = call("squeue", "--noheader", f"--jobs={self.number}", "--format=%T|%r")
        if answer.returncode and GONE not in answer.stderr:
            return Look("unknown", answer.stderr.strip())  # Slurm's controller restarts, perhaps
        state, _, reason = answer.stdout.strip().partition("|")
        over = not state or state in ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "OUT_OF_MEMORY")
        return ENDED if over else Look(state.lower(), "" if reason == "None" else reason)

    def output(self) -> str:
        """Return what the job's log has got since the last call."""
        try:
            with open(self.own / f"job-{self.number}.log", "rb") as log:
                log.seek(self.read)
                new = log.read()
        except FileNotFoundError:
            return ""
        self.read += len(new)
        return new.decode(errors="replace")

    def exit_code(self) -> tuple[int, str]:
        """Return the run's exit code. If the job ended without one, also return how."""
        try:
            return int((self.own / f"exit-{self.number}").read_text()), ""
        except (FileNotFoundError, ValueError):
            facts = dict(
                word.split("=", 1)
                for word in call("scontrol", "show", "job", "--oneliner", self.number).stdout.split()
                if "=" in word
            )
        state, reason = facts.get("JobState", "unknown"), facts.get("Reason", "None")
        why = f"ended as {state}" + (f" ({reason})" if reason != "None" else "")
        return (STOPPED if state == "CANCELLED" else FAILED), f"{why}; its log: {self.own}/job-{self.number}.log"
