"""Append-only files of JSON lines, and small files that are replaced whole.

A crash can tear the last line of an append-only file: it then has no line end. A disk can flip a bit in any line. The
next process that opens the file moves torn, damaged and superseded lines to `*.superseded.jsonl`. All sound lines stay,
and no byte is deleted. Readers leave a torn last line out.
"""

import errno
import json
import math
import os
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO, Self, TypeGuard

import orjson

from titan_rl.config.plain_files import refuse_other
from titan_rl.wire.errors import RunError

BUFFER = 8192  # bytes
PIECE = 1 << 20  # bytes of a large step that are written at a time: collecting all 53 MB costs as much as writing them
SHOWN = 8  # line numbers in a warning


def no_room(path: Path, why: str) -> str:
    """Return the free bytes where `path` is, if the error `why` is about a full disk; else ""."""
    if not _full(why):
        return ""
    with suppress(OSError):
        return f" ({shutil.disk_usage(path if path.is_dir() else path.parent).free:,} bytes free)"
    return ""


def _full(text: str) -> str:
    """Return which of the kernel's words for a full disk are in `text`, or ""."""
    return next((words for number in (errno.ENOSPC, errno.EDQUOT) if (words := os.strerror(number)) in text), "")


class Unwritable(RunError):
    """A file or folder of the run cannot be written: the disk is full, or a permission is missing."""

    def __init__(self, path: Path, error: OSError | str) -> None:
        why = error if isinstance(error, str) else error.strerror or str(error)
        super().__init__(
            f"{path} cannot be written: {why}{no_room(path, why)}",
            "Expected a disk with free space (df), no quota or file size limit in the way (ulimit -f), and write "
            "permission. What was written before is whole.",
        )

    @classmethod
    def of_rank(cls, path: Path, error: RunError) -> "Unwritable | None":
        """Return the error that names `path` if a rank failed because its disk is full."""
        return cls(path, why) if (why := _full(error.details)) else None


class SelfClosing:
    """A context manager that closes itself."""

    def close(self) -> None: ...

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class LineFile(SelfClosing):
    """A file that is open for appending lines. A write that fails leaves no part of a line behind and raises
    Unwritable, as does every later write."""

    def __init__(
        self,
        path: Path,
        *,
        sound: Callable[[bytes], object] = lambda line: True,
        stays: Callable[[bytes], object] = lambda line: True,
        warn: Callable[[str], None] = lambda message: None,
    ) -> None:
        """Move aside the lines that are not `sound`, naming them to `warn`, and everything from the first sound line on
        that does not stay."""
        self._path = path
        self._pending = bytearray()
        self._begun = 0  # bytes in the file that `append` has not finished
        self._failed: Unwritable | None = None
        with must_write(path):
            self.kept = _settle(path, sound, stays, warn)
            self._file = path.open("ab", buffering=0)
            self._size = self._file.seek(0, os.SEEK_END)

    def append(self, lines: Iterable[bytes], *, flush: bool = True) -> None:
        """Write all of `lines`, in order: a crash tears only the end of them."""
        for line in lines:
            self._pending += line
            self._pending += b"\n"
            if len(self._pending) > PIECE:
                self._put()
        if flush or len(self._pending) > BUFFER:
            self.flush()

    def flush(self) -> None:
        self._put()
        self._size += self._begun
        self._begun = 0

    def _put(self) -> None:
        with self._whole():
            written = 0
            with memoryview(self._pending) as pending:
                while written < len(pending):
                    written += self._file.write(pending[written:])
            self._begun += written
            self._pending.clear()

    def to_disk(self) -> None:
        self.flush()
        with self._whole():
            os.fsync(self._file.fileno())

    def close(self) -> None:
        """Everything is on disk when this returns, unless a write failed."""
        if self._file.closed:
            return
        try:
            if self._failed is None:
                self.to_disk()
        finally:
            self._file.close()

    @contextmanager
    def _whole(self) -> Iterator[None]:
        if self._failed is not None:
            raise self._failed
        try:
            yield
        except OSError as error:
            with suppress(OSError):
                self._file.truncate(self._size)
            self._failed = Unwritable(self._path, error)
            raise self._failed from None


@contextmanager
def must_write(path: Path) -> Iterator[None]:
    """End the run with an error that names `path` if the body cannot write it."""
    try:
        yield
    except OSError as error:
        raise Unwritable(path, error) from None


def superseded(path: Path) -> Path:
    """Return where the lines of `path` move that no longer count."""
    return path.with_suffix(f".superseded{path.suffix}")


def _settle(
    path: Path,
    sound: Callable[[bytes], object],
    stays: Callable[[bytes], object],
    warn: Callable[[str], None],
) -> int:
    """Move lines aside as LineFile describes, and return the number of lines that stay. Moved lines are safe on disk
    before they leave `path`."""
    if not path.exists():
        return 0
    kept = size = 0
    damaged: set[int] = set()
    for number, line in _numbered(path):
        if not line.endswith(b"\n"):
            break
        if not sound(line):
            damaged.add(number)
        elif stays(line):
            kept += 1
        else:
            break
        size += len(line)
    if size == path.stat().st_size and not damaged:
        return kept
    aside = superseded(path)
    with path.open("rb") as file, aside.open("ab") as other:
        other.truncate(sum(map(len, whole_lines(aside))))  # a crash tore it: those lines move again
        other.writelines(line for number, line in _numbered(path, size) if number in damaged)
        file.seek(size)
        shutil.copyfileobj(file, other)
        file.seek(-1, os.SEEK_END)
        other.write(b"" if file.read() == b"\n" else b"\n")
        _sync(other)
    if damaged:
        shown = ", ".join(map(str, sorted(damaged)[:SHOWN])) + ", ..." * (len(damaged) > SHOWN)
        warn(f"{path}, line {shown}: damaged, and moved to {aside.name}; all other lines stay")
        with replacing(path) as other:
            other.writelines(line for number, line in _numbered(path, size) if number not in damaged)
    else:
        os.truncate(path, size)
    return kept


def _numbered(path: Path, size: int | None = None) -> Iterator[tuple[int, bytes]]:
    """Yield the lines up to byte `size`, or all, with numbers from 1 on."""
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            if size is not None and (size := size - len(line)) < 0:
                return
            yield number, line


def whole_lines(path: Path, start: int = 0) -> Iterator[bytes]:
    """Yield the lines from byte `start` on, with their line ends and without a torn last line."""
    refuse_other(path)
    with path.open("rb") as file:
        file.seek(start)
        yield from (line for line in file if line.endswith(b"\n"))


def write_whole(path: Path, text: str) -> None:
    """Replace the file atomically: after a crash it holds all of `text` or its whole old text."""
    with replacing(path) as file:
        file.write(text.encode())


@contextmanager
def replacing(path: Path) -> Iterator[BinaryIO]:
    """Give a new file to write, which replaces `path` atomically if the body succeeds."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with temporary.open("wb") as file:
            yield file
            _sync(file)
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def _sync(file: BinaryIO) -> None:
    file.flush()
    os.fsync(file.fileno())


def encode(value: Mapping[str, Any]) -> bytes:
    """Return `value` as compact JSON, with null for NaN and the infinities. The fallback escapes what UTF-8 cannot
    encode, and writes integers of any size."""
    try:
        return orjson.dumps(value, option=orjson.OPT_SERIALIZE_NUMPY)
    except TypeError:
        return json.dumps(strict(value), separators=(",", ":")).encode()


def strict(value: Any) -> Any:
    """Return `value` with null for NaN and the infinities, which JSON cannot hold."""
    match value:
        case float():
            return value if math.isfinite(value) else None
        case Mapping():
            return {key: strict(item) for key, item in value.items()}
        case list() | tuple():
            return [strict(item) for item in value]
        case _ if hasattr(value, "tolist"):  # numpy's, which this module does not import
            return strict(value.tolist())
        case _:
            return value


def is_count(value: Any) -> bool:
    return type(value) is int and 0 <= value < 1 << 63


def is_number(value: Any) -> TypeGuard[float]:
    return math.isfinite(value) if type(value) is float else type(value) is int and abs(value) < 1 << 63
