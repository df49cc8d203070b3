"""Keeps the lengths of rows in the user's cache folder, so that a large data set is tokenized once.

    cached(digest of everything that the lengths depend on, rows) -> rows, from the cache or measured

An entry is the digest's own file: a checksum, and JSON. An entry that is damaged, or of another user, is measured anew.
"""

import functools
import hashlib
import json
import os
import platform
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import suppress
from importlib import metadata
from pathlib import Path
from typing import Any, NamedTuple

import titan_rl
from titan_rl.environment import cache_folder

FOLDER = "row_lengths"
MOST_BYTES = 256 * 2**20
"""Size of all entries: the oldest are removed."""


class RowLength(NamedTuple):
    """Tokens of the parts of a row; answers include EOS."""

    prompt: int
    answer: int = 0
    rejected: int = 0


Rows = Iterator[RowLength | str]
"""The lengths of rows, or why a row cannot be read."""


def digest_of(parts: Iterable[Any]) -> str:
    """Return the digest of values whose `repr` tells all that lengths depend on, and of the code that measures them."""
    digest = hashlib.blake2b(_code(), digest_size=32)
    for part in parts:
        digest.update(part if isinstance(part, bytes) else repr(part).encode(errors="surrogatepass"))
        digest.update(b"\0")
    return digest.hexdigest()


def cached(digest: str, rows: Rows) -> Rows:
    """Yield the rows of the entry of that digest. If there is none, yield the measured `rows`, and write it."""
    if (known := _read(digest)) is not None:
        yield from known
        return
    measured: list[RowLength | str] = []
    for row in rows:
        measured.append(row)
        yield row
    with suppress(OSError):  # a full disk, or a home that is read-only: the next run measures again
        _write(digest, json.dumps(measured).encode())


def _read(digest: str) -> list[RowLength | str] | None:
    try:
        path = _folder() / digest
        if not path.is_file():
            return None
        checksum, _, content = path.read_bytes().partition(b"\n")
        if checksum != _checksum(digest, content):
            return None
        os.utime(path)  # it is the newest now
    except OSError:
        return None
    return [RowLength(*row) if isinstance(row, list) else row for row in json.loads(content)]


def _write(digest: str, content: bytes) -> None:
    """Write an entry, which appears whole or not at all, and remove the oldest entries beyond the bound."""
    if len(content) > MOST_BYTES:
        return
    folder = _folder()
    with tempfile.NamedTemporaryFile(dir=folder, delete=False) as file:
        file.write(_checksum(digest, content) + b"\n" + content)
    os.replace(file.name, folder / digest)
    total = 0
    for _, nbytes, path in sorted((s.st_mtime, s.st_size, p) for p in folder.iterdir() for s in [p.stat()])[::-1]:
        total += nbytes
        if total > MOST_BYTES:
            path.unlink(missing_ok=True)


def _folder() -> Path:
    """Return the folder of the entries. Raise PermissionError if other users can write to it."""
    folder = cache_folder() / FOLDER
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    status = folder.stat()
    if status.st_uid != os.geteuid() or status.st_mode & 0o022:
        raise PermissionError(f"{folder}: expected a folder that only this user can write to")
    return folder


def _checksum(digest: str, content: bytes) -> bytes:
    """Return the checksum of an entry, which also tells an entry from a renamed one."""
    return hashlib.blake2b(content, key=digest[:64].encode()).hexdigest().encode()


@functools.cache
def _code() -> bytes:
    """Return the digest of this package and of the libraries that render and tokenize."""
    digest = hashlib.blake2b(platform.python_version().encode())
    for name in ("tokenizers", "jinja2"):
        digest.update(metadata.version(name).encode())
    for path in sorted(Path(titan_rl.__file__).parent.rglob("*.py")):
        digest.update(path.read_bytes())
    return digest.digest()
