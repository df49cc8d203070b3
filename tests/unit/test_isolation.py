"""A network of the run's own: any user can have it, and only threads that are started outside are not in it."""

import ctypes
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from titan_rl import isolation
from titan_rl.run import main

ROOT = Path(__file__).parents[2]
CAP_SYS_ADMIN, PR_CAPBSET_DROP = 21, 24

PROGRAM = """
import os, socket, threading
from titan_rl import isolation
network = lambda: os.readlink("/proc/thread-self/ns/net")
before, user = network(), os.getuid()
seen = []
thread = threading.Thread(target=lambda: seen.append(network()))
assert isolation.refusal() == "" and network() == before
assert isolation.isolate() == ""
isolation.start_outside(thread)
with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname()):
    pass
while not seen:
    pass
inside = os.popen("readlink /proc/self/ns/net").read().strip()
others = [line for line in open("/proc/thread-self/net/dev") if ":" in line and "lo:" not in line]
assert isolation.outside(network) == before
print(network() != before, seen == [before], inside == network(), others, os.getuid() == user)
"""


def without_privilege() -> None:
    """Lose CAP_SYS_ADMIN at the next exec, as the processes of most users and containers have."""
    ctypes.CDLL(None).prctl(PR_CAPBSET_DROP, CAP_SYS_ADMIN, 0, 0, 0)


@pytest.mark.parametrize("drop", [None, without_privilege], ids=["as this user", "unprivileged"])
def test_all_but_threads_that_are_started_outside_are_in_a_network_of_their_own(
    drop: Callable[[], None] | None,
) -> None:
    ask = "from titan_rl import isolation; print(isolation.refusal())"
    done = subprocess.run([sys.executable, "-c", ask], cwd=ROOT, capture_output=True, text=True, preexec_fn=drop)
    if why := done.stdout.strip():
        pytest.skip(f"this kernel refuses: {why}")
    done = subprocess.run([sys.executable, "-c", PROGRAM], cwd=ROOT, capture_output=True, text=True, preexec_fn=drop)
    assert done.stdout.split() == ["True", "True", "True", "[]", "True"], done.stderr


def refuse(flags: int) -> None:
    raise PermissionError(1, "Operation not permitted")


def test_where_the_kernel_refuses_nothing_changes_and_the_plan_names_the_risk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(isolation, "_unshare", refuse)
    argv = ["--config", "grpo_llama", "--dry-run", "--job.dump_folder", str(tmp_path / "run")]
    assert main(argv) == 0
    out = " ".join(capsys.readouterr().out.split())
    assert "not isolated: no network namespace can be made (Operation not permitted)" in out
    assert "any local user can execute code as you" in out

    with pytest.raises(SystemExit) as ended:
        main([*argv, "--hosts.isolation", "require"])
    assert ended.value.code == 2
    assert "hosts.isolation: expected" in capsys.readouterr().err

    assert main([*argv, "--hosts.isolation=off"]) == 0
    out = " ".join(capsys.readouterr().out.split())
    assert 'hosts.isolation is "off"' in out
    assert 'Leave hosts.isolation at "auto"' in out
    assert "user namespaces" not in out  # the kernel has them


def test_hosts_isolation_is_known_before_the_config_is_checked(tmp_path: Path) -> None:
    from titan_rl.run import ATTACHED, OPTED_OUT, early_config, opted_out

    config = tmp_path / "run.toml"
    config.write_text('base = "grpo_llama"\n[hosts]\nisolation = "off"\n')

    def refusal_of(argv: list[str]) -> str:
        config = early_config(argv)
        return opted_out(config.hosts) if config else ""

    assert refusal_of(["--config", str(config)]) == OPTED_OUT
    assert refusal_of([f"--config={config}", "--hosts.isolation", "require"]) == ""
    assert refusal_of(["--hosts.isolation=off", "--config", "grpo_llama"]) == OPTED_OUT
    assert refusal_of(["--hosts.kind=attach", "--config", "grpo_llama"]) == ATTACHED
    assert refusal_of(["--config", "no such file"]) == ""
