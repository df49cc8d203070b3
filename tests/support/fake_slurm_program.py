"""sbatch, squeue, scontrol, scancel and srun of a cluster on this machine: nodes are loopback addresses.

AS is the name it is called by, FAKE_SLURM the folder of the cluster's state. Jobs wait until its file `free` exists. A
job is a folder: state.json, script, steps/N (a step, with the process groups of its tasks).
"""

import fcntl
import json
import math
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

CLUSTER = Path(os.environ["FAKE_SLURM"])
KILL_WAIT = 60.0
ENDED = ("COMPLETED", "FAILED", "CANCELLED")


def state_of(job: str) -> dict[str, Any]:
    return json.loads((CLUSTER / job / "state.json").read_text())


def change(job: str, **facts: Any) -> None:
    with locked():
        folder = CLUSTER / job
        facts = {**(state_of(job) if (folder / "state.json").exists() else {}), **facts}
        (folder / "new.json").write_text(json.dumps(facts))
        (folder / "new.json").rename(folder / "state.json")


@contextmanager
def locked() -> Iterator[None]:
    with open(CLUSTER / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def numbered(folder: Path) -> int:
    """Make the first free folder 0, 1, 2, ... and return its number."""
    folder.mkdir(exist_ok=True, parents=True)
    number = 0
    while True:
        with suppress(FileExistsError):
            (folder / str(number)).mkdir()
            return number
        number += 1


def options(arguments: Sequence[str]) -> dict[str, str]:
    return {name: value for name, _, value in (a.removeprefix("--").partition("=") for a in arguments)}


def sbatch(argv: Sequence[str]) -> None:
    if (CLUSTER / "refuses").exists():
        sys.exit(
            "sbatch: error: Batch job submission failed: Invalid account or account/partition combination specified"
        )
    (CLUSTER / "submitting").touch()
    while (CLUSTER / "slow").exists():
        time.sleep(0.02)
    script = Path(argv[-1]).read_text()
    given = options(re.findall(r"^#SBATCH (\S+)$", script, re.M))
    job = str(os.getpid())
    (CLUSTER / job).mkdir()
    (CLUSTER / job / "script").write_text(script)
    nodes = [f"127.0.0.{2 + n}" for n in range(int(given["nodes"]))]
    restarts = int(path.read_text()) if (path := CLUSTER / "restarts").exists() else 0
    change(job, state="PENDING", reason="Priority", nodes=nodes, given=given, restarts=restarts, code=0)
    daemon = [sys.executable, "-S", __file__, job]
    own = {**os.environ, "AS": "ctld"}
    with open(CLUSTER / job / "ctld.log", "wb") as log:
        subprocess.Popen(daemon, start_new_session=True, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=own)
    print(f"{job};cluster")


def ctld(argv: Sequence[str]) -> None:
    """Run a job: start it when there are nodes, and again when it is requeued."""
    (job,) = argv
    change(job, daemon=os.getpid())
    folder, facts = CLUSTER / job, state_of(job)
    while True:
        while not (CLUSTER / "free").exists():
            time.sleep(0.02)
        facts = state_of(job)
        (folder / "requeue").unlink(missing_ok=True)
        output = facts["given"]["output"].replace("%j", job)
        own = {
            "SLURM_JOB_ID": job,
            "SLURM_JOB_NODELIST": ",".join(facts["nodes"]),
            "SLURMD_NODENAME": facts["nodes"][0],
            "SLURM_RESTART_COUNT": str(facts["restarts"]),
            "SLURM_NTASKS": str(len(facts["nodes"]) * int(facts["given"]["ntasks-per-node"])),
        }
        with open(output, "ab") as log:
            batch = subprocess.Popen(
                ["bash", str(folder / "script")],
                stdout=log,
                stderr=log,
                cwd=facts["given"]["chdir"],
                env={**os.environ, **own},
                start_new_session=True,
            )
        change(job, state="RUNNING", reason="None", batch=batch.pid)
        deadline = math.inf
        while batch.poll() is None:
            time.sleep(0.02)
            ending = (folder / "requeue").exists() or state_of(job)["state"] == "CANCELLED"
            if ending and deadline == math.inf:
                deadline = time.monotonic() + KILL_WAIT
                signal_all(job, signal.SIGTERM)
            if ending and (time.monotonic() > deadline or not left(job)):
                break
        signal_all(job, signal.SIGKILL)
        with suppress(ProcessLookupError):
            os.killpg(batch.pid, signal.SIGKILL)
        code = batch.wait()
        if (folder / "requeue").exists():
            change(job, state="PENDING", reason="BeginTime", restarts=facts["restarts"] + 1)
            continue
        if state_of(job)["state"] != "CANCELLED":
            change(
                job, state="FAILED" if code else "COMPLETED", reason="NonZeroExitCode" if code else "None", code=code
            )
        return


def groups(job: str, step: str = "*") -> list[int]:
    return [int(path.name) for path in (CLUSTER / job / "steps").glob(f"{step}/*") if path.name.isdecimal()]


def left(job: str) -> list[int]:
    return [group for group in groups(job) if alive(group)]


def alive(group: int) -> bool:
    with suppress(ProcessLookupError):
        os.killpg(group, 0)
        return True
    return False


def signal_all(job: str, number: int, step: str = "*") -> None:
    for group in groups(job, step):
        with suppress(ProcessLookupError):
            os.killpg(group, number)


def srun(argv: Sequence[str]) -> None:
    at = argv.index("bash")
    given, job = options(argv[:at]), os.environ["SLURM_JOB_ID"]
    if "SLURM_MEM_PER_CPU" in os.environ:  # srun would take it as the limit of each step
        sys.exit(f"slurmstepd: error: Detected 1 oom-kill event(s) in StepId={job}.0")
    facts = state_of(job)
    if given.get("gres") == "none" and "gpus-per-node" in facts["given"]:
        specification = "Invalid Trackable RESource (TRES) specification"
        sys.exit(f"srun: error: Unable to create step for job {job}: {specification}")
    nodes = facts["nodes"][: int(given["nodes"])]
    if named := given.get("nodelist"):
        nodes = [named]
    number = int(given.get("ntasks") or os.environ["SLURM_NTASKS"])  # this one counts, not --ntasks-per-node
    if number > len(nodes):
        can = "srun: Warning: can't honor --ntasks-per-node set to"
        print(f"{can} {given['ntasks-per-node']} which doesn't match the requested tasks {number}", file=sys.stderr)
    step = numbered(CLUSTER / job / "steps")
    (CLUSTER / job / "steps" / str(step) / "arguments").write_text("\n".join(argv))
    tasks = []
    for node in (nodes[task % len(nodes)] for task in range(number)):
        own = {**os.environ, "SLURMD_NODENAME": node, "SLURM_STEP_ID": str(step)}
        with open(given["output"].replace("%N", node) if "output" in given else "/dev/stdout", "ab") as log:
            task = subprocess.Popen(argv[at:], env=own, stdout=log, stderr=log, start_new_session=True)
        (CLUSTER / job / "steps" / str(step) / str(task.pid)).touch()
        tasks.append(task)
    codes = [task.wait() for task in tasks]
    sys.exit(max(code if code >= 0 else 128 - code for code in codes))


def squeue(argv: Sequence[str]) -> None:
    job = options(argv)["jobs"]
    if not (CLUSTER / job).exists() or state_of(job)["state"] in ENDED:
        sys.exit("slurm_load_jobs error: Invalid job id specified")
    facts = state_of(job)
    print(f"{facts['state']}|{facts['reason']}")


def scontrol(argv: Sequence[str]) -> None:
    if argv[:2] == ["show", "hostnames"]:
        print("\n".join(argv[2].split(",")))
    elif argv[0] == "requeue":
        (CLUSTER / argv[1] / "requeue").touch()
    else:
        facts = state_of(argv[-1])
        print(f"JobId={argv[-1]} JobState={facts['state']} Reason={facts['reason']} ExitCode={facts['code']}:0")


def scancel(argv: Sequence[str]) -> None:
    job, _, step = argv[-1].partition(".")
    if step:
        signal_all(job, getattr(signal, f"SIG{options(argv)['signal']}"), step)
    else:
        change(job, state="CANCELLED", reason="None")


if __name__ == "__main__":
    globals()[os.environ.pop("AS", "") or Path(sys.argv[0]).name](sys.argv[1:])
