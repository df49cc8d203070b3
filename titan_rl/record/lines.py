"""Append-only files of JSON lines, and small files that are replaced whole.

A crash can tear the last line of an append-only file: it then has no line end. Readers leave a torn line out; the next
process that opens the file removes it before it appends.
"""

import json
import math
import os
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Self


class SelfClosing:
    """A context manager that closes itself."""

    def close(self) -> None: ...

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class LineFile(SelfClosing):
    """A file that is open for appending lines."""

    def __init__(
        self, path: Path, keep: Callable[[bytes], object] = lambda line: True, superseded: Path | None = None
    ) -> None:
        """Keep the leading whole lines for which `keep` is true. Remove the first other line and everything after it,
        or move it to the file `superseded`, where it is safe on disk before it leaves `path`."""
        self._file = path.open("a+b")
        self._file.seek(0)
        self.kept = size = 0
        for line in self._file:
            if not line.endswith(b"\n") or not keep(line):
                break
            self.kept, size = self.kept + 1, size + len(line)
        if superseded is not None and self._file.seek(0, os.SEEK_END) > size:
            with LineFile(superseded) as other:
                self._file.seek(size)
                shutil.copyfileobj(self._file, other._file)
                self._file.seek(-1, os.SEEK_END)
                other._file.write(b"" if self._file.read() == b"\n" else b"\n")
                other.to_disk()
        self._file.truncate(size)

    def append(self, lines: Iterable[bytes], *, flush: bool = True) -> None:
        """Write all of `lines` at once: a crash tears only the end of them."""
        self._file.write(b"".join(line + b"\n" for line in lines))
        if flush:
            self._file.flush()

    def flush(self) -> None:
        self._file.flush()

    def to_disk(self) -> None:
        self._file.flush()
        os.fsync(self._file.fileno())

    def close(self) -> None:
        self._file.close()


def whole_lines(path: Path, start: int = 0) -> Iterator[bytes]:
    """Yield the lines from byte `start` on, with their line ends and without a torn last line."""
    with path.open("rb") as file:
        file.seek(start)
        yield from (line for line in file if line.endswith(b"\n"))


def write_whole(path: Path, text: str) -> None:
    """Replace the file atomically: after a crash it holds all of `text` or all of what it held before."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    with temporary.open("w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)


def encode(value: Mapping[str, Any]) -> bytes:
    """Return `value` as standard JSON. NaN and infinities are rare and slow to find, so a search is the fallback."""
    try:
        return json.dumps(value, allow_nan=False).encode()
    except ValueError:
        return json.dumps(strict(value)).encode()


def strict(value: Any) -> Any:
    """Return `value` with null for NaN and the infinities, which JSON cannot hold."""
    match value:
        case float():
            return value if math.isfinite(value) else None
        case Mapping():
            return {key: strict(item) for key, item in value.items()}
        case list() | tuple():
            return [strict(item) for item in value]
        case _:
            return value
