"""`python -m titan_rl warm`: keep the engines imported between runs, so that each run starts in a third of the time.

It prints the variable that runs need, and keeps two processes (about 0.7 GB) until Ctrl-C:

    $ python -m titan_rl warm
    export TITAN_RL_FORK_SERVERS=/tmp/titan_rl-4711-abcdefgh

A run's ranks are forked from these processes instead of the run's own (titan_rl/ext/fork_servers). They import nothing
of titan_rl, so runs always execute the current code. After an upgrade of an engine, start it again.
"""

import argparse
import os
import shlex
import signal
import sys
import threading
from collections.abc import Sequence

from titan_rl.environment import socket_folder
from titan_rl.ext.fork_servers.fork_servers import VARIABLE, ForkStarter
from titan_rl.meshes.starter import KINDS
from titan_rl.wire.gpus import visible_gpus
from titan_rl.wire.program import command_of

ENDED, REFUSED = 0, 2


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(
        prog=command_of("warm"), description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.parse_args(argv)
    reason = refusal()
    if reason:
        print(f"titan_rl warm: {reason}", file=sys.stderr)
        return REFUSED
    end = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda *_: end.set())
    with socket_folder() as folder, ForkStarter().serving(folder) as servers:
        servers.keep(KINDS)
        print(f"export {VARIABLE}={shlex.quote(str(folder))}", flush=True)
        print("runs with this variable start warm; Ctrl-C ends it", file=sys.stderr)
        end.wait()
    return ENDED


def refusal() -> str:
    """Return why there is nothing to keep warm, or ""."""
    value = os.environ.get(VARIABLE)
    if value:
        return f"expected {VARIABLE} to be unset, found {value!r}"
    if visible_gpus():
        return "expected a machine without a GPU: ranks that use CUDA are never forked"
    return ""


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
