"""Checksums of a checkpoint's files: written with the checkpoint, and compared before a run resumes from it.

    step-20/__0_0.distcp, ...   each rank sums the bytes of its file while it writes them
    step-20/checksums.json      the bytes and the sum of every file
    step-20/.metadata           renamed into place last; only then does the checkpoint count

Checkpoints without checksums.json were written by an earlier version. They are not compared. The .metadata of every
checkpoint is read for what it would execute (checkpoint_pickle.py): whoever can change it can also change the sums.
"""

import json
import os
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import xxhash

from titan_rl.wire.checkpoint_pickle import foreign_content

FOLDER = "checkpoint"
"""Folder of a run's checkpoints, in its dump folder."""
METADATA = ".metadata"
SUMS = "checksums.json"
ALGORITHM = "xxh3_128"  # faster than crc32 and sha256
THREADS = 8  # read files concurrently; hashing releases the GIL
BLOCK = 8 << 20  # bytes


class FileSum(NamedTuple):
    nbytes: int
    digest: str  # hexadecimal


class SummedFile:
    """A file that is open for writing, and the sum of the bytes written."""

    def __init__(self, file: Any) -> None:
        self._file, self._hashed, self._nbytes = file, xxhash.xxh3_128(), 0
        self.tell, self.flush, self.fileno, self.close = file.tell, file.flush, file.fileno, file.close

    def write(self, data: Any) -> int:
        self._hashed.update(data)
        self._nbytes += memoryview(data).nbytes
        return self._file.write(data)

    @property
    def sum(self) -> FileSum:
        return FileSum(self._nbytes, self._hashed.hexdigest())


def write_sums(folder: Path, sums: Mapping[str, FileSum]) -> None:
    """Write them to disk. The checkpoint does not count yet, so this need not be atomic."""
    with (folder / SUMS).open("w") as file:
        json.dump({"algorithm": ALGORITHM, "files": sums}, file, indent=1)
        file.flush()
        os.fsync(file.fileno())


def damage(folder: Path, *, read: bool = False) -> str:
    """Return the problem of a checkpoint's files, or "". Compare sizes only, or `read` all bytes too."""
    why = changed(folder, read=read)
    if not why and read and (foreign := foreign_content(folder / METADATA)):
        return f"{METADATA} cannot be read: {foreign}"
    return why


def changed(folder: Path, *, read: bool = False) -> str:
    """Return how a folder's files differ from its checksums, or ""."""
    try:
        if not (folder / SUMS).exists():
            return "" if (folder / METADATA).stat().st_size else f"{METADATA} is empty"
        saved = json.loads((folder / SUMS).read_bytes())
        expected = {name: FileSum(int(nbytes), str(digest)) for name, (nbytes, digest) in saved["files"].items()}
        comparable = saved["algorithm"] == ALGORITHM
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        return f"{SUMS} cannot be read: {error!r}"
    for name, (nbytes, _) in expected.items():
        found = (folder / name).stat().st_size if (folder / name).is_file() else None
        if found != nbytes:
            return f"{name} is missing" if found is None else f"{name}: expected {nbytes:,} bytes, found {found:,}"
    if not read or not comparable:
        return ""
    with ThreadPoolExecutor(THREADS) as pool:
        found = pool.map(lambda name: _sum_of(folder / name), expected)
        for (name, (_, digest)), other in zip(expected.items(), found, strict=True):
            if other != digest:
                return f"{name}: expected the checksum {digest}, found {other}"
    return ""


def _sum_of(path: Path) -> str:
    """Return the checksum of a file, or why it cannot be read."""
    hashed = xxhash.xxh3_128()
    try:
        with path.open("rb", buffering=0) as file:
            while block := file.read(BLOCK):
                hashed.update(block)
    except OSError as error:
        return f"none ({error.strerror})"
    return hashed.hexdigest()
