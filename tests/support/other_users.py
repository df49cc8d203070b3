"""What another user of this machine reaches of a run."""

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import psutil

from support.running import Run

ATTACK = """
import json, os, socket, sys
names, reached = json.load(sys.stdin), []
def served():  # ports of loopback in this network, by anybody
    lines = [line.split() for name in ("tcp", "tcp6") for line in open(f"/proc/self/net/{name}")]
    return {int(words[1].rpartition(":")[2], 16) for words in lines if words[3] == "0A"}
if os.getuid() == 0:
    os.setgroups([])
    os.setgid(65534)
    os.setuid(65534)
for family, address in names:
    with socket.socket(getattr(socket, family)) as attacker:
        attacker.settimeout(2)
        others = served()
        try:
            attacker.connect(tuple(address) if isinstance(address, list) else address)
        except OSError:
            continue
        # a port of the run's network may be another program's in this one, or the one that connect() took itself
        if family == "AF_UNIX" or not (address[1] in others | served() or attacker.getsockname() == tuple(address)):
            reached.append(address)
print(json.dumps(reached))
"""
Address = tuple[str, str | tuple[str, int]]


def reached(addresses: list[Address]) -> list[str]:
    """Return the ones of another network that another user can connect to from this one. A test run that is not root
    can try it as its own user only."""
    command = [sys.executable, "-I", "-S", "-c", ATTACK]
    done = subprocess.run(command, input=json.dumps(addresses), text=True, capture_output=True)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def listening(pid: int) -> list[Address]:
    """Return every socket in the network of this process that listens, or takes datagrams."""
    found: list[Address] = []
    for line in Path(f"/proc/{pid}/net/unix").read_text().splitlines()[1:]:
        fields = line.split(maxsplit=7)
        listens = int(fields[3], 16) & 0x10000 or fields[4] == "0002"
        if len(fields) == 8 and listens:
            found.append(("AF_UNIX", fields[7].replace("@", "\0", 1) if fields[7][0] == "@" else fields[7]))
    hosts = {
        address.address
        for each in psutil.net_if_addrs().values()
        for address in each
        if address.family == socket.AF_INET
    }
    for name in ("tcp", "tcp6", "udp", "udp6"):
        for line in Path(f"/proc/{pid}/net/{name}").read_text().splitlines()[1:]:
            _, local, _, state = line.split()[:4]
            if state == "0A" or name.startswith("udp"):
                port = int(local.rpartition(":")[2], 16)
                found += [("AF_INET", (host, port)) for host in sorted(hosts)]
    return found


def own_paths(run: Run) -> list[Address]:
    """Return the paths at which this run's sockets are."""
    folders = Path(os.environ.get("TMPDIR", "/tmp")).glob(f"titan_rl-{run.process.pid}-*")
    return [("AF_UNIX", str(path)) for folder in folders for path in folder.rglob("*") if path.is_socket()]
