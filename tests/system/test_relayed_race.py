"""Star against chain over hosts with limited links: bytes out of the trainer's port, and seconds of a version."""

import json
import os
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from support.namespaces import Switch, why_not

pytestmark = pytest.mark.root

READERS, ROWS, SLICE, PULLS = int(os.environ.get("RELAY_READERS", "4")), 16384, 1 << 18, 2  # 32 MiB in 128 slices
VERSION = ROWS * 1024 * 2
RATE = os.environ.get("RELAY_RATE", "200mbit")
PORT = 26600
WORKER = """
import sys
from monarch.actor import enable_transport, run_worker_loop_forever
enable_transport("tcp")
run_worker_loop_forever(address=sys.argv[1], ca="trust_all_connections")
"""


def test_a_chain_of_hosts_takes_a_version_out_of_the_trainers_port_once(tmp_path: Path) -> None:
    if why := why_not():
        pytest.skip(why)
    names = [f"host{i}" for i in range(READERS + 1)]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(Path(__file__).parents[1]), os.getcwd()])}
    with ExitStack() as stack:
        switch = Switch(stack, tmp_path / "hosts", [*names, "head"])
        addresses = [f"tcp://{switch.hosts[name].address}:{PORT}" for name in names]
        for name, address in zip(names, addresses, strict=True):
            switch.limit(name, RATE)
            inside = switch.hosts[name].command(sys.executable, "-c", WORKER, address)
            worker = subprocess.Popen(inside, env=env, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
            stack.callback(worker.wait)
            stack.callback(worker.kill)
        program = [sys.executable, "-m", "support.passing_hosts", str(ROWS), str(SLICE), str(PULLS), *addresses]
        racing = subprocess.Popen(
            switch.hosts["head"].command(*program), env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        stack.callback(racing.wait)
        stack.callback(racing.kill)
        star, chain = (measured(racing, switch) for _ in range(2))
    print(json.dumps({"readers": READERS, "rate": RATE, "star": star, "chain": chain}, indent=1))
    for way in (star, chain):
        assert way["equal"]
        assert not way["fell_back"]
        assert way["bytes"] == PULLS * READERS * VERSION
    assert (star["relayed"], chain["relayed"]) == (0, PULLS * (READERS - 1) * VERSION)
    assert star["sent"] > READERS * PULLS * VERSION
    assert PULLS * VERSION < chain["sent"] < 1.5 * PULLS * VERSION
    assert max(chain["sent_by_readers"]) < 1.5 * PULLS * VERSION


def measured(racing: "subprocess.Popen[str]", switch: Switch) -> dict[str, Any]:
    """Run one way; add the bytes that left the port of the trainer's host and of each reader's."""
    assert racing.stdin is not None
    assert racing.stdout is not None

    def go() -> None:
        racing.stdin.write("go\n")  # type: ignore[union-attr]
        racing.stdin.flush()  # type: ignore[union-attr]

    go()
    assert racing.stdout.readline() == "ready\n"
    before = {name: host.sent() for name, host in switch.hosts.items()}
    go()
    found: dict[str, Any] = json.loads(racing.stdout.readline())
    sent = {name: host.sent() - before[name] for name, host in switch.hosts.items()}
    return {**found, "sent": sent.pop("host0"), "sent_by_readers": [n for name, n in sent.items() if name != "head"]}
