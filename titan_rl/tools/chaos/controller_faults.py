"""Faults of the controller: how it is stopped, killed and crowded, and how the same command continues.

crash, preempt, full    the controller ends ── its processes are gone ── the same command ── training continues
freeze, second          the controller stays, and no process may be replaced
"""

import asyncio
import os
import re
import resource
import signal
import subprocess
import time
from collections.abc import Callable
from contextlib import suppress

from titan_rl.tools.chaos.outcome import FaultOutcome, continued
from titan_rl.tools.chaos.subject import END_SECONDS, ChaosRun
from titan_rl.tools.inspect.run_files import RunFiles

FREEZE = 1.5  # times fault.hang_seconds
LOG_ROOM = 8192  # bytes that the log may grow by, for the error of the full disk
EXIT_SECONDS = 60.0  # for a controller to end: the grace of a stop, and some
REFUSED, STOPPED, FAILED = 2, 130, 1


async def crash(run: ChaosRun, outcome: FaultOutcome) -> None:
    """Kill the controller; its processes end with it, and the same command continues from the last checkpoint."""
    outcome.injected = time.time()
    os.kill(run.process.pid, signal.SIGKILL)
    await _started_again(run, outcome, -signal.SIGKILL, saves=False)


async def preempt(run: ChaosRun, outcome: FaultOutcome) -> None:
    """Send SIGTERM as schedulers do: to the controller, its process group, or every process of the run. The last step
    that finished is saved."""
    outcome.injected = time.time()
    pid = run.process.pid
    targets = {"controller": [pid], "all": list(run.processes())}.get(outcome.fault.point)
    with suppress(ProcessLookupError):
        if targets is None:
            os.killpg(pid, signal.SIGTERM)
        for target in targets or ():
            os.kill(target, signal.SIGTERM)
    await _started_again(run, outcome, STOPPED, saves=True)


async def fill_disk(run: ChaosRun, outcome: FaultOutcome) -> None:
    """Let the controller's files grow to a size that its log does not have yet: the run ends by name, and the same
    command continues."""
    outcome.injected = time.time()
    _, hard = resource.prlimit(run.process.pid, resource.RLIMIT_FSIZE)
    resource.prlimit(run.process.pid, resource.RLIMIT_FSIZE, (run.log.stat().st_size + LOG_ROOM, hard))
    await _started_again(run, outcome, FAILED, saves=False)
    lines = [line.text for line in run.output if line.time >= outcome.injected]
    if not any("File too large" in text for text in lines):
        outcome.wrong.append("expected an error with the system's reason, 'File too large'; found none")
    if any(text.startswith("Traceback (most recent call last)") for text in lines):
        outcome.wrong.append("the run ended with a traceback")


async def freeze(run: ChaosRun, outcome: FaultOutcome, hang_seconds: float) -> None:
    """Stop the controller for longer than fault.hang_seconds, as Ctrl-Z and a suspended laptop do."""
    outcome.injected = time.time()
    os.kill(run.process.pid, signal.SIGSTOP)
    try:
        await asyncio.sleep(FREEZE * hang_seconds)
    finally:
        os.kill(run.process.pid, signal.SIGCONT)
    await continued(run, outcome)


async def start_second(run: ChaosRun, outcome: FaultOutcome) -> None:
    """Start the same command again in the same folder, also with --job.fresh: both are refused by name."""
    outcome.injected = time.time()
    for fresh in ("false", "true"):
        command = [*run.command, f"--job.fresh={fresh}"]
        second = await asyncio.create_subprocess_exec(*command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
        try:
            out, _ = await asyncio.wait_for(second.communicate(), EXIT_SECONDS)
        except TimeoutError:
            second.kill()
            outcome.wrong.append(f"a second run with --job.fresh={fresh} was not refused within {EXIT_SECONDS:g} s")
            continue
        if second.returncode != REFUSED:
            outcome.wrong.append(f"a second run with --job.fresh={fresh}: exit code {second.returncode}, expected 2")
        if not re.search(rf"\b{run.process.pid}\b", out.decode()):
            outcome.wrong.append("the refusal of a second run does not name the first one's process")
    await continued(run, outcome)


async def _started_again(run: ChaosRun, outcome: FaultOutcome, code: int, *, saves: bool) -> None:
    """Wait for the controller to end with this exit code and its processes to be gone; start the same command, and wait
    until it trains. `saves`: no finished step may be lost."""
    outcome.detected = await _within(EXIT_SECONDS, lambda: run.ended, run) - outcome.injected
    found = run.process.returncode
    if found != code:
        outcome.wrong.append(f"expected exit code {code}, found {found}")
    await _within(END_SECONDS, lambda: not run.processes(), run)
    outcome.wrong += [f"process {pid} ({name}) outlived the controller" for pid, name in run.processes().items()]
    made = _last_step(run)
    left = run.socket_folders()
    run.start_again()
    outcome.recovered = await run.until("training to continue", lambda: run.healthy) - outcome.injected
    outcome.wrong += [f"{folder} is left" for folder in left if folder.exists()]
    outcome.steps = made - _begun(run)
    outcome.blamed = "controller"
    if saves and outcome.steps > 0:
        outcome.wrong.append(f"{outcome.steps} finished steps were lost")


async def _within(seconds: float, condition: Callable[[], object], run: ChaosRun) -> float:
    deadline = time.monotonic() + seconds
    while not condition() and time.monotonic() < deadline:
        await asyncio.sleep(0.03)
    if not run.ended:
        run.process.kill()
        run.process.wait()
    return time.time()


def _last_step(run: ChaosRun) -> int:
    """Return the last RL step that metrics.jsonl has."""
    return max((line["step"] for line in RunFiles(run.folder).metrics() if line["kind"] == "rl"), default=0)


def _begun(run: ChaosRun) -> int:
    """Return the step after which the run continued the last time."""
    return [event["step"] for event in RunFiles(run.folder).ledger() if event["event"] == "begun"][-1]
