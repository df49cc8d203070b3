"""Hosts on this machine that are as separate as machines: each has its own network, name, /etc/hosts and processes.

    pytest ── unshare ── init of the switch     a network that has only a bridge
           ├─ unshare ── init of node1          its eth0 is a port of the bridge
           └─ unshare ── init of head           for a controller: it shares the processes of this machine

No namespace has a name. Each lives as long as its processes, and those end with pytest, however that ends.
"""

import ctypes
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path

import psutil

from support.rank_launchers import launched

NETWORK = "10.91.0"
PR_SET_PDEATHSIG = 1
INIT = """
import signal, sys
signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the kernel reaps orphans
print("up", flush=True)
sys.stdin.read()  # until pytest is gone
"""
LIBC = ctypes.CDLL(None)


def why_not() -> str:
    """Return what this machine lacks for such hosts, or ""."""
    if missing := [name for name in ("unshare", "nsenter", "ip") if shutil.which(name) is None]:
        return f"separate hosts need {' and '.join(missing)}, which this machine does not have"
    tried = "ip link add br0 type bridge && mount -t tmpfs none /mnt"
    command = ["unshare", "--net", "--uts", "--mount", "--pid", "--fork", "--mount-proc", "sh", "-c", tried]
    done = subprocess.run(command, capture_output=True, text=True)
    return f"separate hosts need namespaces, which root makes: {done.stderr.strip()}" if done.returncode else ""


def dies_with_parent() -> None:
    LIBC.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


@dataclass
class SeparateHost:
    name: str
    address: str
    init: psutil.Process
    port: str  # a port of the switch
    own: Sequence[str]  # options of nsenter for what only some hosts have
    switch: "Switch"

    def command(self, *words: str) -> list[str]:
        """Return a command that runs `words` on this host, in the current folder."""
        namespaces = ["--net", "--uts", "--mount", *self.own, f"--wdns={os.getcwd()}"]
        return ["nsenter", "--target", str(self.init.pid), *namespaces, *words]

    def cut(self) -> None:
        """Let nothing through to this host or from it. Packets vanish without an error."""
        self.switch.unplug(self.port)

    def heal(self) -> None:
        self.switch.plug(self.port)

    def die(self) -> None:
        """Kill all its processes at once, as a power cut does. `Switch.boot` starts a new host of its name."""
        self.init.kill()
        self.init.wait()

    def ranks(self) -> dict[str, psutil.Process]:
        """Return the living ranks on this host, by name, without snapshot servers."""
        network = os.readlink(f"/proc/{self.init.pid}/ns/net")
        found: dict[str, psutil.Process] = {}
        for launcher, name, pid in launched(psutil.process_iter()):
            with suppress(OSError, psutil.Error):  # it ended
                rank, here = psutil.Process(pid), os.readlink(f"/proc/{launcher.pid}/ns/net") == network
                if here and not name.startswith("snapshots") and rank.status() != psutil.STATUS_ZOMBIE:
                    found[name] = rank
        return found

    def reachable_ports(self) -> set[int]:
        """Return the TCP ports at which something listens here, except on the loopback device."""
        tables = (Path(f"/proc/{self.init.pid}/net/{name}").read_text() for name in ("tcp", "tcp6"))
        rows = [line.split() for table in tables for line in table.splitlines()[1:]]
        places = [row[1].split(":") for row in rows if row[3] == "0A"]  # listening
        return {int(port, 16) for host, port in places if not host.endswith("7F")}

    def received(self) -> int:
        """Return the bytes that have come from other hosts."""
        return int(self._counters()[1])

    def sent(self) -> int:
        """Return the bytes that have left for other hosts."""
        return int(self._counters()[9])

    def _counters(self) -> list[str]:
        table = Path(f"/proc/{self.init.pid}/net/dev").read_text()
        (row,) = (line.split() for line in table.splitlines() if line.strip().startswith("eth0:"))
        return row

    def pids(self) -> set[int]:
        """Return the processes of its living ranks."""
        return {process.pid for process in self.ranks().values()}


class Switch:
    """A bridge in a separate network, and the hosts that are plugged into it."""

    def __init__(
        self,
        stack: ExitStack,
        hosts_file: Path,
        names: Sequence[str],
        inner: Callable[[str], Sequence[str]] = lambda _: (),
        own: Sequence[str] = (),
    ) -> None:
        """The hosts know each other by these names. The last is the one for controllers: it has the processes of this
        machine. `inner` returns a command for each other host: its first process executes that command, followed by
        its own. If the command makes namespaces, `own` are their options of nsenter."""
        self._stack, self._hosts_file, self._inner, self._own = stack, hosts_file, inner, own
        self._addresses = {name: f"{NETWORK}.{number}" for number, name in enumerate(names, start=10)}
        lines = ["127.0.0.1 localhost", *(f"{address} {name}" for name, address in self._addresses.items())]
        hosts_file.write_text("\n".join(lines) + "\n")
        self._init = self._start([], "ip link set lo up && ip link add br0 type bridge && ip link set br0 up")
        self.hosts: dict[str, SeparateHost] = {}
        for name in names:
            self.boot(name, own_processes=name != names[-1])

    def boot(self, name: str, *, own_processes: bool = True) -> SeparateHost:
        """Start a host of this name, which has died or was never there."""
        self.hosts[name] = self._plug_in(name, self._addresses[name], own_processes=own_processes)
        return self.hosts[name]

    def _start(self, namespaces: Sequence[str], setup: str, inner: Sequence[str] = ()) -> psutil.Process:
        """Start the first process of new namespaces, a network among them, and return it once these are set up."""
        init = [*inner, sys.executable, "-I", "-S", "-c", INIT]
        command = ["unshare", "--net", *namespaces, "--fork", "--kill-child=SIGKILL"]
        process = subprocess.Popen(
            [*command, "sh", "-c", f'{setup} && exec "$@"', "init", *init],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            process_group=0,
            preexec_fn=dies_with_parent,
        )
        self._stack.callback(process.wait)
        self._stack.callback(process.kill)
        assert process.stdout is not None
        said = process.stdout.readline()
        assert said == "up\n", said + process.stdout.read()
        (child,) = psutil.Process(process.pid).children()
        return child

    def _plug_in(self, name: str, address: str, *, own_processes: bool) -> SeparateHost:
        port = f"to-{name}"
        namespaces = ["--uts", "--mount", *(["--pid", "--mount-proc"] if own_processes else [])]
        named = f"hostname {name} && mount --bind {self._hosts_file} /etc/hosts && ip link set lo up"
        init = self._start(namespaces, named, self._inner(name) if own_processes else ())
        self._ip("link", "add", port, "type", "veth", "peer", "name", "eth0", "netns", str(init.pid))
        self.plug(port)
        inside = ["nsenter", "--target", str(init.pid), "--net", "ip"]
        subprocess.run([*inside, "addr", "add", f"{address}/24", "dev", "eth0"], check=True)
        subprocess.run([*inside, "link", "set", "eth0", "up"], check=True)
        return SeparateHost(name, address, init, port, ["--pid", *self._own] if own_processes else [], self)

    def plug(self, port: str) -> None:
        self._ip("link", "set", port, "master", "br0", "up")

    def unplug(self, port: str) -> None:
        self._ip("link", "set", port, "nomaster")  # still up: its host sees no difference

    def limit(self, name: str, rate: str) -> None:
        """Limit a host's port in each direction, to a rate such as "200mbit"."""
        shape = ["root", "tbf", "rate", rate, "burst", "256kb", "latency", "400ms"]
        host = self.hosts[name]
        for init, device in ((self._init, host.port), (host.init, "eth0")):
            inside = ["nsenter", "--target", str(init.pid), "--net", "tc", "qdisc", "add", "dev", device]
            subprocess.run([*inside, *shape], check=True)

    def _ip(self, *words: str) -> None:
        subprocess.run(["nsenter", "--target", str(self._init.pid), "--net", "ip", *words], check=True)
