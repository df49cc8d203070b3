"""`python -m titan_rl.worker`: offer this machine as a host, on which runs start ranks (docs/scaling.md).

    python -m titan_rl.worker --init-tls FOLDER --hosts head,node1,node2       once: a CA, and certificates to copy
    python -m titan_rl.worker --address tls://node1:26600 --tls FOLDER/node1   on node1, in the folder of the runs

Its host or IP is the only address that it listens at. It serves one run after the other, until Ctrl-C.
"""

import argparse
import ctypes
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from titan_rl.actors.meeting import HOST
from titan_rl.environment import prepare_environment, socket_folder
from titan_rl.meshes.zygotes import KINDS, VARIABLE, serving
from titan_rl.wire.certificates import certificate_problems, make_certificates
from titan_rl.wire.dial import split_address
from titan_rl.wire.gpus import visible_gpus
from titan_rl.wire.program import DONE, FAILED, USAGE, enter

PR_SET_PDEATHSIG = 1
READY_SECONDS = 120.0
SHORTEST_SECONDS = 2.0  # a worker that ends sooner cannot listen at its address


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m titan_rl.worker", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--address", help="where runs reach this worker: tls://NAME:PORT")
    parser.add_argument("--tls", default="", help="folder with ca.pem, cert.pem and key.pem of this host")
    parser.add_argument("--insecure", action="store_true", help="allow tcp://: whoever reaches it executes code as you")
    parser.add_argument("--init-tls", metavar="FOLDER", help="make a CA there, unless it has one, and certificates")
    parser.add_argument("--hosts", default="", help="with --init-tls: names or IPs, as addresses have them")
    parser.add_argument("--days", type=float, default=365, help="with --init-tls: how long certificates are valid")
    parser.add_argument("--parent", type=int, default=0, help=argparse.SUPPRESS)
    given = parser.parse_args(argv)
    if given.parent:  # a run, or serve_runs
        return serve_run(given.address, given.parent)
    if given.init_tls:
        hosts = [name.strip() for name in given.hosts.split(",") if name.strip()]
        make_certificates(Path(given.init_tls), hosts, given.days)
        print(f"made certificates for {', '.join(hosts) or 'no host'} in {given.init_tls}; ca.key is for no host")
        return DONE
    if problems := refusals(given.address, given.tls, insecure=given.insecure):
        print("\n".join(f"titan_rl.worker: {problem}" for problem in problems), file=sys.stderr)
        return USAGE
    with socket_folder() as folder, serving(folder) as zygotes:
        if not visible_gpus():
            zygotes.keep(KINDS)
            wait_for_zygotes()
        return serve_runs(given.address, given.tls)


def refusals(address: str | None, tls: str, *, insecure: bool) -> list[str]:
    try:
        scheme, host, _ = split_address(address or "")
    except ValueError:
        return [f"--address: expected tls://NAME:PORT, found {address}"]
    try:
        socket.getaddrinfo(host, None)
    except (OSError, UnicodeError) as error:
        return [f"--address: expected a name or an address of this host, found {host} ({error})"]
    if scheme == "tcp" and not insecure:
        return [f"--address: expected tls://, or --insecure on a network that is yours alone, found {address}"]
    if scheme == "tls" and not tls:
        return ["--tls: expected the folder of this host's certificate (--init-tls makes one), found none"]
    return [f"--tls: {problem}" for problem in certificate_problems(Path(tls))] if scheme == "tls" else []


def serve_runs(address: str, tls: str) -> int:
    """Serve one run after the other, each in a new process: what Monarch keeps of a run ends with it."""
    _, os.environ[HOST], _ = split_address(address)
    prepare_environment(tls=tls)
    command = [sys.executable, "-m", "titan_rl.worker", "--address", address, "--parent", str(os.getpid())]
    print(f"worker at {address}; Ctrl-C ends it", flush=True)
    while True:
        began = time.monotonic()
        code = subprocess.Popen(command, stdin=subprocess.DEVNULL, process_group=0).wait()
        if time.monotonic() - began < SHORTEST_SECONDS:
            print(f"titan_rl.worker: expected to serve {address}, found exit code {code}", file=sys.stderr)
            return FAILED


def serve_run(address: str, parent: int) -> int:
    """Be a host of one run, and die with the parent. Signals are the parent's to handle."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        return DONE
    prepare_environment()
    from monarch.actor import enable_transport, run_worker_loop_forever

    enable_transport(address.partition("://")[0])
    run_worker_loop_forever(address=address, ca="trust_all_connections")
    return DONE


def wait_for_zygotes() -> None:
    """Return when ranks can be forked; without zygotes they start cold."""
    for kind in KINDS:
        with suppress(OSError), socket.socket(socket.AF_UNIX) as asking:
            asking.settimeout(READY_SECONDS)
            asking.connect(f"{os.environ[VARIABLE]}/{kind}")
            asking.sendall(b"\0\0")
            asking.recv(16)


if __name__ == "__main__":
    enter(lambda: main(sys.argv[1:]))
