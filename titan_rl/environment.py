"""What must be in the controller's environment before Monarch is imported, for Monarch reads it then."""

import getpass
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

CONTROLLER_ENV = {
    "MONARCH_FILE_LOG": "error",  # Monarch's own log grows by 30 MB an hour otherwise
}


def prepare_environment(detect_seconds: float = 2.0) -> None:
    """`detect_seconds`: how soon a dead process is to be known."""
    poll = {"HYPERACTOR_MESH_SUPERVISION_POLL_FREQUENCY": f"{max(1, round(500 * detect_seconds))}ms"}  # default 10 s
    for name, value in {**CONTROLLER_ENV, **poll}.items():
        os.environ.setdefault(name, value)


@contextmanager
def socket_folder() -> Iterator[None]:
    """Monarch leaves socket directories in TMPDIR when a process dies. A run gets a TMPDIR of its own, named after the
    controller, which goes with it; what a killed controller left behind is removed by the next run."""
    base = Path(tempfile.gettempdir())
    os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(base / f"torchinductor_{getpass.getuser()}"))  # outlives a run
    for left in base.glob("titan_rl-*"):
        owner = left.name.removeprefix("titan_rl-")
        if owner.isdigit() and (int(owner) == os.getpid() or not Path(f"/proc/{owner}").exists()):
            shutil.rmtree(left, ignore_errors=True)
    folder = base / f"titan_rl-{os.getpid()}"
    folder.mkdir(mode=0o700)  # one that is there already is somebody else's: ours was removed above
    os.environ["TMPDIR"] = str(folder)
    try:
        yield
    finally:
        shutil.rmtree(folder, ignore_errors=True)
