"""`python -m titan_rl worker`: offer this machine as a host, on which runs start ranks (docs/clusters.md).

    python -m titan_rl worker --init-tls FOLDER --hosts head,node1,node2       once: a CA, and certificates to copy
    python -m titan_rl worker --address tls://node1:26600 --tls FOLDER/node1   on node1, in the folder of the runs

It listens only at the host or IP of --address. The port of --address answers with the port that serves the run, one of
--ports or any free one. It serves one run after the other, until Ctrl-C.
"""

import argparse
import asyncio
import ctypes
import errno
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import psutil

from titan_rl.actors.meeting import HOST, PORTS
from titan_rl.environment import prepare_environment, socket_folder
from titan_rl.ext.hosts.certificates import certificate_problems, make_certificates
from titan_rl.ext.hosts.worker_address import (
    SECONDS,
    Holder,
    address_of,
    answer_lookups,
    holder_in,
    listen_at,
    split_address,
    takes_connections,
    unreachable,
)
from titan_rl.meshes.starter import KINDS, starter
from titan_rl.wire.gpus import visible_gpus
from titan_rl.wire.ports import free_port, port_range
from titan_rl.wire.program import DONE, FAILED, USAGE, command_of

PR_SET_PDEATHSIG = 1
MIN_SERVE_SECONDS = 2.0  # a worker that ends sooner cannot listen at its address
LEAVE_SECONDS = 10.0  # limit for a worker without a run to end
RETRY_SECONDS = 0.2  # between attempts to listen at an address that another worker has


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog=command_of("worker"), description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--address", help="where runs reach this worker: tls://NAME:PORT")
    parser.add_argument("--tls", default="", help="folder with ca.pem, cert.pem and key.pem of this host")
    parser.add_argument(
        "--insecure", action="store_true", help="allow tcp://: anyone who reaches it executes code as you"
    )
    parser.add_argument("--ports", default="", help="serve runs at ports LOW-HIGH (docs/clusters.md); default: any")
    parser.add_argument("--init-tls", metavar="FOLDER", help="make a CA there, unless it has one, and certificates")
    parser.add_argument("--hosts", default="", help="with --init-tls: names or IPs as in addresses")
    parser.add_argument("--days", type=float, default=365, help="with --init-tls: how long certificates are valid")
    parser.add_argument("--until-eof", action="store_true", help="end when standard input ends, as through ssh")
    parser.add_argument("--parent", type=int, default=0, help=argparse.SUPPRESS)
    options = parser.parse_args(argv)
    if options.parent:  # a run, or serve_runs
        return serve_run(options.address, options.parent)
    if options.init_tls:
        hosts = [name.strip() for name in options.hosts.split(",") if name.strip()]
        if not hosts:
            complain("--hosts: expected the names or IPs of the hosts, as --hosts head,node1, found none")
            return USAGE
        make_certificates(Path(options.init_tls), hosts, options.days)
        print(f"made certificates for {', '.join(hosts)} in {options.init_tls}; ca.key is for no host")
        return DONE
    if problems := refusals(options.address, options.tls, options.ports, insecure=options.insecure):
        print("\n".join(f"titan_rl.worker: {problem}" for problem in problems), file=sys.stderr)
        return USAGE
    if options.until_eof:
        signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell may have it ignored
        threading.Thread(target=interrupt_at_eof, daemon=True).start()
    try:
        listening = listen_when_free(options.address, waits=options.until_eof)
    except OSError as error:
        complain(f"expected to listen at {options.address}, found: {error.strerror or error}")
        return FAILED
    with listening, socket_folder() as folder, starter().serving(folder) as servers:
        if not visible_gpus():
            servers.keep(KINDS)
            for kind in KINDS:
                asyncio.run(starter().launcher(kind))
        return serve_runs(listening, options.address, options.tls, options.ports)


def complain(what: str) -> None:
    print(f"titan_rl.worker: {what}", file=sys.stderr, flush=True)


def refusals(address: str | None, tls: str, ports: str = "", *, insecure: bool) -> list[str]:
    try:
        scheme, host, _ = split_address(address or "")
    except ValueError:
        return [f"--address: expected tls://NAME:PORT, found {address or 'none'}"]
    if problem := unreachable(host, f"give --address {scheme}://IP:PORT"):
        return [f"--address: {problem}"]
    try:
        port_range(ports)
    except ValueError as error:
        return [f"--ports: {error}"]
    if scheme == "tcp" and not insecure:
        return [f"--address: expected tls://, or --insecure on a network that is yours alone, found {address}"]
    if scheme == "tls" and not tls:
        return ["--tls: expected the folder of this host's certificate (--init-tls makes one), found none"]
    return [f"--tls: {problem}" for problem in certificate_problems(Path(tls), host=host)] if scheme == "tls" else []


def interrupt_at_eof() -> None:
    """End this process as Ctrl-C does, once its standard input has ended."""
    while os.read(0, 4096):
        pass
    os.kill(os.getpid(), signal.SIGINT)


def listen_when_free(address: str, *, waits: bool) -> socket.socket:
    """Listen at a worker's address. With `waits`, wait while another worker of this user has it for a run whose
    controller is silent: that worker ends with its run."""
    began, again, owner = time.monotonic(), 0.0, ""
    while True:
        try:
            return listen_at(address)
        except OSError as error:
            if not waits or error.errno != errno.EADDRINUSE:
                raise
        worker = worker_at(address)
        holder = holder_of(worker)
        again = again or holder.again
        if holder.again > again or time.monotonic() - max(began, holder.ends) > LEAVE_SECONDS:
            owner = f"another worker, process {worker}, has it for {holder.run}" if worker else "another process has it"
            raise OSError(errno.EADDRINUSE, f"{owner}: wait for its end, stop it, or use another address")
        if worker and not owner:
            owner = f"another worker, process {worker}, has it for {holder.run}"
            print(f"waiting for {address}: {owner}, whose controller {holder.how_silent}", flush=True)
        time.sleep(RETRY_SECONDS)


def worker_at(address: str) -> int:
    """Return the process of this user's worker that listens at an address; 0: there is none."""
    _, host, port = split_address(address)
    place = (socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][4][0], port)
    for process in psutil.process_iter():
        with suppress(psutil.Error):  # it has ended, or is another user's
            if "titan_rl.worker" not in process.cmdline():
                continue
            connections = process.net_connections("tcp")
            if any(each.status == psutil.CONN_LISTEN and each.laddr == place for each in connections):
                return process.pid
    return 0


def holder_of(worker: int) -> Holder:
    """Return which run has another worker's host."""
    with suppress(psutil.Error):  # it has ended
        for child in psutil.Process(worker).children() if worker else ():
            if "--parent" in child.cmdline():
                return holder_in(Path(child.environ().get("TMPDIR", "")))
    return Holder("another run", 0.0, 0.0)


def serve_runs(listening: socket.socket, address: str, tls: str, ports: str) -> int:
    """Serve one run after the other, each in a new process and at a new port. Lookups at `address` return the port;
    Monarch's state of a run ends with its process."""
    scheme, host, _ = split_address(address)
    os.environ |= {HOST: host, PORTS: ports}
    prepare_environment(tls=tls)
    serving, served = "", list[int]()
    answer_lookups(listening, lambda: serving if serving and takes_connections(serving, SECONDS) else "", complain)
    print(f"worker at {address}; Ctrl-C ends it", flush=True)
    while True:
        began, within = time.monotonic(), port_range(ports)
        try:
            port = free_port(host, within, served)
        except OSError as error:
            complain(f"--ports: expected a free port for a run, found: {error.strerror}")
            return FAILED
        served = [*(each for each in served if each in within and each != port), port]
        serving = address_of(scheme, host, port)
        command = [sys.executable, "-m", "titan_rl.worker", "--address", serving, "--parent", str(os.getpid())]
        code = subprocess.Popen(command, stdin=subprocess.DEVNULL, process_group=0).wait()
        if time.monotonic() - began < MIN_SERVE_SECONDS:
            complain(f"expected to serve runs at {serving}, found exit code {code}")
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
