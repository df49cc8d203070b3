"""Lets the processes of a group find each other through a file of the run instead of a TCP port.

torch.distributed's default, env://, makes the first process listen on every interface, and whoever connects may read
and write the keys from which the group is built. Engines ask for env:// by name, so the file is put in its place.
"""

import os
from collections.abc import Iterator
from typing import Any

MEETING = "TITAN_RL_MEETING"  # the file's path


def meet_in_file() -> None:
    """Make env:// use the file that this process was launched with, if any. Call it before an engine is built."""
    if not (path := os.environ.get(MEETING)):
        return
    from torch._C._distributed_c10d import FileStore
    from torch.distributed.rendezvous import _rendezvous_handlers

    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])

    def by_file(url: str, **options: Any) -> Iterator[tuple[FileStore, int, int]]:
        yield FileStore(path, size), rank, size

    _rendezvous_handlers["env"] = by_file
