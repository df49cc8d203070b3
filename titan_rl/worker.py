"""`python -m titan_rl.worker`: offer this machine as a host, on which a run may start ranks.

python -m titan_rl.worker --address ipc:///run/user/1000/worker
"""

import argparse
import ctypes
import os
import signal
import sys
from collections.abc import Sequence

from titan_rl.environment import prepare_environment
from titan_rl.wire.program import DONE, enter

PR_SET_PDEATHSIG = 1


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m titan_rl.worker", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--address", required=True, help="where the run reaches this worker")
    parser.add_argument("--parent", type=int, default=0, help="end with this process, which started the worker")
    given = parser.parse_args(argv)
    if given.parent and not end_with(given.parent):
        return DONE
    prepare_environment()
    from monarch.actor import run_worker_loop_forever

    run_worker_loop_forever(address=given.address, ca="trust_all_connections")
    return DONE


def end_with(parent: int) -> bool:
    """Die with the parent, and leave signals to it. Return False if it is gone already."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    return os.getppid() == parent


if __name__ == "__main__":
    enter(lambda: main(sys.argv[1:]))
