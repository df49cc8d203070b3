"""Ordinary users of one machine, who run at once: in private networks, in a container, without a home."""

import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from support.other_users import listening, reached
from support.running import Run, Runs
from titan_rl.ext.fork_servers.fork_servers import VARIABLE

pytestmark = pytest.mark.root

USERS = {"isolated": 64101, "without a home": 64102, "in a container": 64103}  # ids without a name
# As Docker's seccomp profile does for processes without CAP_SYS_ADMIN.
CONTAINER = """
import os, sys
from titan_rl.ext.sandbox import seccomp
refuse = (seccomp.EQUAL, 0, 1, 272), (seccomp.RETURN, 0, 0, seccomp.FAIL | 1)  # unshare: EPERM
calls = (seccomp.LOAD, 0, 0, 0), *refuse, (seccomp.RETURN, 0, 0, seccomp.ALLOW)
seccomp.instructions = lambda **_: [__import__("struct").pack("HBBI", *each) for each in calls]
seccomp.restrict()
os.execv(sys.argv[1], sys.argv[1:])
"""
STEP_SECONDS = 240.0  # three runs start cold at once


def become(kind: str, home: Path) -> list[str]:
    """Return a command that runs what follows it as this user."""
    user = USERS[kind]
    own = ["setpriv", "--reuid", str(user), "--regid", str(user), "--clear-groups"]
    hidden = ["-u", VARIABLE, "-u", "USER", "-u", "LOGNAME", "-u", "XDG_CACHE_HOME", "-u", "TMPDIR"]
    command = [*own, "env", *hidden, f"HOME={home}", "sh", "-c", 'umask 077; exec "$@"', "sh"]
    return [*command, sys.executable, "-c", CONTAINER] if kind == "in a container" else command


@pytest.fixture
def homes() -> Iterator[dict[str, Path]]:
    """The users' folders, in a place that they all reach."""
    tried = subprocess.run([*become("isolated", Path("/")), sys.executable, "-c", "import titan_rl.run"])
    if tried.returncode:
        pytest.skip(f"other users cannot read {sys.executable} or this checkout: .ci/run has a copy that they can")
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:
        os.chmod(folder, 0o755)
        found = {kind: Path(folder, str(user)) for kind, user in USERS.items()}
        for kind, home in found.items():
            home.mkdir()
            shutil.chown(home, USERS[kind], USERS[kind])
        yield found
    for user in USERS.values():
        shutil.rmtree(f"/tmp/uid{user}", ignore_errors=True)  # Monarch's log
        shutil.rmtree(f"/tmp/torchinductor_{user}", ignore_errors=True)
        shutil.rmtree(f"/tmp/titan_rl_cache_{user}", ignore_errors=True)


def processes_of(user: int) -> list[psutil.Process]:
    found = [each for each in psutil.process_iter(["uids", "status"]) if each.info["uids"]]
    return [each for each in found if each.info["uids"].real == user and each.info["status"] != psutil.STATUS_ZOMBIE]


def test_ordinary_users_run_at_once_and_none_reaches_anothers_run(runs: Runs, homes: dict[str, Path]) -> None:
    started: dict[str, Run] = {}
    for kind, folder in homes.items():
        own = Runs(become(kind, Path("/proc/none") if kind == "without a home" else folder))
        started[kind] = own.start(folder / "run", training__steps=500, eval__size=0)
        runs.started.append(started[kind])
    for run in started.values():
        run.wait_for_step(1, timeout=STEP_SECONDS)

    host = os.readlink("/proc/self/ns/net")
    networks = {kind: os.readlink(f"/proc/{run.process.pid}/ns/net") for kind, run in started.items()}
    assert networks.pop("in a container") == host
    assert len({host, *networks.values()}) == 3
    for kind in networks:
        sockets = listening(started[kind].process.pid)
        assert sockets
        assert reached(sockets) == []

    for run in started.values():
        run.process.send_signal(signal.SIGINT)
    said = {kind: " ".join(run.finish().split()) for kind, run in started.items()}
    assert {run.code for run in started.values()} == {130}, said
    assert (
        "the run is not isolated: no network namespace can be made (Operation not permitted)"
        in (said["in a container"])
    )
    assert "/proc/none/.cache cannot be written" in said["without a home"]
    assert "cannot be written" not in said["isolated"]
    assert "not isolated" not in said["isolated"] + said["without a home"]
    assert not [each for user in USERS.values() for each in processes_of(user)]
    for kind, run in started.items():
        assert {path.stat().st_uid for path in run.folder.rglob("*")} == {USERS[kind]}
