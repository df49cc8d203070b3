"""Starts one rank as a run does, in a private network where the kernel allows it, and asks it for an answer.

    python -m titan_rl.tools.doctor.one_rank

If that fails, the last line of the output has the reason.
"""

import asyncio
import os
import subprocess
import sys
import tempfile
from contextlib import suppress

from titan_rl import isolation
from titan_rl.environment import prepare_environment, socket_folder

SECONDS = 60.0  # from the start of this program, with imports from a cold disk
RANK_SECONDS = 40.0  # for the rank alone


def reason() -> str:
    """Return why a rank cannot be started here, or ""."""
    command = [sys.executable, "-m", "titan_rl.tools.doctor.one_rank"]
    # The output is a file: a launcher of Monarch may hold a pipe for longer than this program lives.
    with tempfile.TemporaryFile() as output:
        try:
            done = subprocess.run(
                command, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT, timeout=SECONDS
            )
        except subprocess.TimeoutExpired:
            return f"it did not answer within {SECONDS:g} s"
        except OSError as error:
            return str(error)
        output.seek(0)
        lines = output.read().decode(errors="replace").strip().splitlines()
    if done.returncode == 0:
        return ""
    named = [line for line in lines if line.startswith("titan_rl: ")]  # by the rank's launcher, before Monarch's report
    return (named or lines or [f"exit code {done.returncode}"])[-1].strip().removeprefix("titan_rl: ")


async def answer() -> None:
    from monarch.actor import Actor, endpoint, this_host

    from titan_rl.meshes.faults import ask
    from titan_rl.meshes.spawn import end, spawn

    class Answering(Actor):
        @endpoint
        def pid(self) -> int:
            return os.getpid()

    name = "doctor[rank=0]"
    procs = await spawn(this_host(), name="doctor", shape={"rank": 1})
    try:
        actor = procs.spawn("doctor", Answering)
        await ask(actor.pid.call(), actor=name, verb="pid", seconds=RANK_SECONDS)
    finally:
        with suppress(Exception):  # the first error is the reason
            await end([name], procs)


def main() -> int:
    prepare_environment()
    with socket_folder():
        isolation.isolate()
        import monarch.actor

        from titan_rl.wire.errors import RunError

        monarch.actor.unhandled_fault_hook = lambda failure: None  # the call that fails reports it
        try:
            asyncio.run(answer())
        except RunError as error:
            print(error.details, error, sep="\n")
            return 1
    return 0


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    os._exit(code)  # Monarch's threads take seconds to end
