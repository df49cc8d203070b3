"""A job in Slurm's queue, seen through Slurm's own programs."""

import subprocess
from dataclasses import dataclass
from pathlib import Path

from titan_rl.launch.following import ENDED, Look, SubmissionFailed
from titan_rl.wire.program import FAILED, STOPPED

CALL_SECONDS = 120.0  # a busy controller of Slurm takes a minute
GONE = "Invalid job id"  # squeue's word for jobs that ended a while ago


def submit_script(path: Path) -> str:
    """Return the number of the job."""
    answer = call("sbatch", "--parsable", str(path))
    if answer.returncode:
        raise SubmissionFailed(f"sbatch refused {path}: {answer.stderr.strip()}")
    return answer.stdout.strip().partition(";")[0]


def call(*command: str) -> subprocess.CompletedProcess[str]:
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=CALL_SECONDS, stdin=subprocess.DEVNULL)
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
