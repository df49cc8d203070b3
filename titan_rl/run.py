"""`python -m titan_rl.run --config grpo_llama.toml`

Exit codes: 0 finished, 1 failed (the failing actor and rank are named), 2 bad input, 130 stopped by Ctrl-C.
"""

import asyncio
import os
import sys
import tempfile
import traceback
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import TYPE_CHECKING

from titan_rl.environment import prepare_environment, socket_folder
from titan_rl.meshes.zygotes import KINDS, Zygotes, serving

if TYPE_CHECKING:  # imported while the zygotes import too
    from titan_rl.preflight.setup import Setup
    from titan_rl.record.terminal import Terminal

FINISHED, FAILED, STOPPED = 0, 1, 130
NVIDIA = Path("/proc/driver/nvidia")  # of a machine that has NVIDIA's driver


def main(argv: Sequence[str] | None = None) -> int:
    argv = sys.argv[1:] if argv is None else argv
    with ExitStack() as stack:
        zygotes = None
        if not {"--dry-run", "--help", "-h"} & set(argv):
            zygotes = stack.enter_context(serving(stack.enter_context(socket_folder())))
            if not NVIDIA.exists():
                zygotes.keep(KINDS)  # before anything else: what they import takes longer than all the rest
        return check_and_run(argv, zygotes)


def check_and_run(argv: Sequence[str], zygotes: Zygotes | None) -> int:
    from titan_rl.preflight.cli import parse
    from titan_rl.preflight.describe import describe
    from titan_rl.preflight.setup import prepare
    from titan_rl.record.terminal import Terminal
    from titan_rl.wire.gpus import visible_gpus

    invocation = parse(argv)
    config = invocation.config
    terminal = Terminal()
    device = "cuda" if visible_gpus() and config.hosts.device != "cpu" else "cpu"
    if zygotes is None:
        with tempfile.TemporaryDirectory() as scratch:
            setup = prepare(invocation.config_name, config, device=device, scratch=Path(scratch))
            terminal.plan(describe(setup, invocation.warnings))
        terminal.note("dry run: everything was checked, nothing was started")
        return FINISHED
    # None on CUDA: an import may initialize it, and then no process may fork.
    kinds = () if device == "cuda" else KINDS if config.samples_rollouts else KINDS[:1]
    zygotes.keep(kinds, threads=config.hosts.threads)
    setup = prepare(invocation.config_name, config, device=device)
    terminal.plan(describe(setup, invocation.warnings))
    if setup.finished:
        terminal.note(
            f"nothing is left to train in {setup.folder}: raise training.steps, or start over with --job.fresh"
        )
        return FINISHED
    return run(setup, terminal)


def run(setup: "Setup", terminal: "Terminal") -> int:
    prepare_environment(setup.config.fault.detect_seconds)
    from titan_rl.session import session
    from titan_rl.wire.errors import RunError

    try:
        finished = asyncio.run(session(setup, terminal))
    except RunError as error:
        terminal.error(str(error), error.details)
        terminal.note(resume_hint(setup))
        return FAILED
    except asyncio.CancelledError:
        finished = False
    if not finished:
        terminal.note(f"stopped; {resume_hint(setup)}")
        return STOPPED
    return FINISHED


def resume_hint(setup: "Setup") -> str:
    from titan_rl.record.run_folder import Resume

    if at := str(Resume.find(setup.folder, setup.config)):
        return f"the same command resumes from {at} in {setup.folder}"
    return "no checkpoint was written yet: the same command starts over"


def entry() -> None:
    """Exit without waiting for threads or workers: worker processes die with the controller."""
    with suppress(FileNotFoundError):  # the current folder was removed
        if os.getcwd() not in sys.path:
            sys.path.append(os.getcwd())  # where a reward's module is, which `python -m` finds too
    try:
        code = main()
    except SystemExit:
        raise
    except KeyboardInterrupt:  # later ones are the run's to handle
        print("stopped before anything was started")
        code = STOPPED
    except BaseException:  # a bug; Monarch's threads would abort an interpreter that ends by an exception
        traceback.print_exc()
        code = FAILED
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__":
    entry()
