"""Sets the controller's environment before Monarch is imported, which reads it at import."""

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
    """`detect_seconds` bounds how late a dead process is noticed."""
    poll = {"HYPERACTOR_MESH_SUPERVISION_POLL_FREQUENCY": f"{max(1, round(500 * detect_seconds))}ms"}  # default 10 s
    for name, value in {**CONTROLLER_ENV, **poll}.items():
        os.environ.setdefault(name, value)


@contextmanager
def socket_folder() -> Iterator[Path]:
    """Give the run a TMPDIR of its own, named after the controller's pid, and remove it at the end. Monarch leaves
    socket directories there when a process dies; the next run removes what a killed controller left behind."""
    base = Path(tempfile.gettempdir())
    os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(base / f"torchinductor_{getpass.getuser()}"))  # outlives a run
    for left in base.glob("titan_rl-*"):
        owner = left.name.removeprefix("titan_rl-")
        if owner.isdigit() and (int(owner) == os.getpid() or not Path(f"/proc/{owner}").exists()):
            shutil.rmtree(left, ignore_errors=True)
    folder = base / f"titan_rl-{os.getpid()}"
    folder.mkdir(mode=0o700)  # fails if another user owns that name: ours was removed above
    before = os.environ.get("TMPDIR")
    os.environ["TMPDIR"] = str(folder)
    try:
        yield folder
    finally:
        os.environ.pop("TMPDIR")
        if before is not None:
            os.environ["TMPDIR"] = before
        shutil.rmtree(folder, ignore_errors=True)
