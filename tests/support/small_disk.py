"""A folder on a separate small disk: a tmpfs in a mount namespace, which commands enter."""

import os
import shutil
import subprocess
from contextlib import suppress
from pathlib import Path

HOLD = 'mount -t tmpfs -o size="$1" none "$2" && echo up && exec cat'


class SmallDisk:
    """It is gone when this process ends, however it ends."""

    def __init__(self, folder: Path, megabytes: int) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.folder = folder
        self._namespaces = ["--mount"] if os.getuid() == 0 else ["--user", "--mount"]
        apart = ["unshare", *self._namespaces, *([] if os.getuid() == 0 else ["--map-root-user"])]
        self._init = subprocess.Popen(
            [*apart, "sh", "-c", HOLD, "sh", f"{megabytes}m", str(folder)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self._init.stdout is not None
        assert self._init.stdout.readline() == "up\n"

    def __enter__(self) -> "SmallDisk":
        return self

    def __exit__(self, *exc: object) -> None:
        self._init.kill()
        self._init.communicate()

    @property
    def seen(self) -> Path:
        """Return where this process finds the folder."""
        return Path(f"/proc/{self._init.pid}/root{self.folder}")

    def within(self) -> list[str]:
        """Return a command that runs what follows it where the folder is on this disk, in the current folder."""
        preserved = [] if os.getuid() == 0 else ["--preserve-credentials"]
        return ["nsenter", f"--target={self._init.pid}", *self._namespaces, *preserved, f"--wdns={os.getcwd()}"]

    def free(self) -> int:
        return shutil.disk_usage(self.seen).free

    def fill(self, leave: int = 0) -> None:
        """Fill it up, but for `leave` bytes."""
        with open(self.seen / "full", "wb", buffering=0) as file, suppress(OSError):  # others write there too
            while (room := self.free() - leave) >= 4096:
                file.write(bytes(room // 4096 * 4096))

    def make_room(self) -> None:
        (self.seen / "full").unlink()
