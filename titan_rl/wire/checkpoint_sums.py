"""Checksums of a checkpoint's files: written with the checkpoint, and compared before a run resumes from it.

    step-20/__0_0.distcp, ...   each rank sums the bytes of its file while it writes them
    step-20/checksums.json      the bytes and the sum of every file, and the folder's name
    step-20/.metadata           renamed into place last; only then does the checkpoint count

RUN/.id names the run, so that files of another run, whose sums are right too, do not count in this one's folder.

Checkpoints without checksums.json were written by an earlier version. They are not compared. The .metadata of every
checkpoint is searched for calls (checkpoint_pickle.py), with matching sums too: an attacker can change both.
"""

import json
import os
import secrets
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import xxhash

from titan_rl.config.plain_files import text_of
from titan_rl.wire.checkpoint_pickle import foreign_content

FOLDER = "checkpoint"
"""Folder of a run's checkpoints, in its dump folder."""
METADATA = ".metadata"
SUMS = "checksums.json"
RUN_ID = ".id"
ALGORITHM = "xxh3_128"  # faster than crc32 and sha256
THREADS = 8  # read files concurrently; hashing releases the GIL
BLOCK = 8 << 20  # bytes
WEIGHTS = ("*.distcp", METADATA, "*.safetensors")  # each of a folder's files by these names has a sum


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


def identify(run: Path) -> None:
    """Give a run's folder a random name that its checkpoints and exports bear, unless it has one. A folder that has
    only the checkpoints of a run takes over their name."""
    if not (run / RUN_ID).exists():
        (run / RUN_ID).write_text(_name_in_sums(run) or secrets.token_hex(8))


def _name_in_sums(run: Path) -> str:
    for path in sorted(run.glob(f"{FOLDER}/step-*/{SUMS}"), reverse=True):
        with suppress(OSError, ValueError, AttributeError):
            return str(json.loads(text_of(path)).get("run", ""))
    return ""


def _run_of(folder: Path) -> str:
    """Return the name of the run that a folder is in; "" if it is in none, or in one of an earlier version."""
    for parent in [*folder.absolute().parents][:3]:  # RUN/checkpoint/critic/step-20
        with suppress(OSError, ValueError):
            return text_of(parent / RUN_ID)
    return ""


def write_sums(folder: Path, sums: Mapping[str, FileSum], name: str = "") -> None:
    """Write them to disk, with the run's name, and the folder's if it counts under that one alone. It does not count
    yet, so this need not be atomic."""
    names = {key: value for key, value in (("run", _run_of(folder)), ("name", name)) if value}
    with (folder / SUMS).open("w") as file:
        json.dump({"algorithm": ALGORITHM, **names, "files": sums}, file, indent=1)
        file.flush()
        os.fsync(file.fileno())


def damage(folder: Path, *, read: bool = False) -> str:
    """Return the problem of a checkpoint's files, or "". Compare sizes only, or `read` all bytes too."""
    if not (folder / SUMS).exists():
        why = "" if (folder / METADATA).is_file() and (folder / METADATA).stat().st_size else f"{METADATA} is empty"
    else:
        why = changed(folder, read=read)
    if not why and read and (foreign := foreign_content(folder / METADATA)):
        return f"{METADATA} cannot be read: {foreign}"
    return why


def changed(folder: Path, *, read: bool = False) -> str:
    """Return how a folder's files differ from its checksums, or ""."""
    if not (folder / SUMS).is_file():  # to open a FIFO would wait for a writer
        return f"{SUMS} is no file"
    try:
        saved = json.loads((folder / SUMS).read_bytes())
        expected = {name: FileSum(int(nbytes), str(digest)) for name, (nbytes, digest) in saved["files"].items()}
        algorithm, written_as = saved["algorithm"], saved.get("name", folder.name)
        own, writer = _run_of(folder), saved.get("run", "")
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        return f"{SUMS} cannot be read: {str(repr(error))[:200]}"
    if algorithm != ALGORITHM:
        return f"{SUMS}: expected sums of the kind {ALGORITHM}, found {str(algorithm)[:40]}"
    if own and writer and own != writer:
        return "another run wrote it"
    if written_as != folder.name:
        return f"it was written as {str(written_as)[:40]}"
    weights = sorted(path.name for pattern in WEIGHTS for path in folder.glob(pattern))
    if unknown := next((name for name in weights if name not in expected), None):
        return f"{SUMS} has no sum of {unknown}"
    for name, (nbytes, _) in expected.items():
        found = (folder / name).stat().st_size if (folder / name).is_file() else None
        if found != nbytes:
            return f"{name} is missing" if found is None else f"{name}: expected {nbytes:,} bytes, found {found:,}"
    if not read:
        return ""
    with ThreadPoolExecutor(THREADS) as pool:
        found = pool.map(lambda name: _sum_of(folder / name), expected)
        for (name, (_, digest)), other in zip(expected.items(), found, strict=True):
            if other != digest:
                return f"{name}: expected the checksum {digest}, found {other}"
    return ""


def sum_files(folder: Path) -> None:
    """Write the checksums of an exported model's files, which are whole."""
    paths = sorted(path for path in folder.rglob("*") if path.is_file())
    with ThreadPoolExecutor(THREADS) as pool:
        digests = list(pool.map(_sum_of, paths))
    names = [path.relative_to(folder).as_posix() for path in paths]
    sums = [FileSum(path.stat().st_size, digest) for path, digest in zip(paths, digests, strict=True)]
    write_sums(folder, dict(zip(names, sums, strict=True)))


def export_damage(folder: Path, *, read: bool = False) -> str:
    """Return the problem of an exported model's files, or "". Earlier versions wrote no sums: then it needs weights."""
    if (folder / SUMS).exists():
        return changed(folder, read=read)
    return "" if any(folder.glob("*.safetensors")) else "it has no weights"


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
