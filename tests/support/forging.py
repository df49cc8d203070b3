"""Changes one thing in the files of a finished run, and audits them."""

import json
import shutil
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

from titan_rl.record.ledger import Ledger
from titan_rl.record.run_names import LEDGER
from titan_rl.tools.audit import main
from titan_rl.tools.inspect.audit_rules import audit
from titan_rl.tools.inspect.run_files import RunFiles

Line = dict[str, Any]
Change = Callable[[Path], object]
Forge = Callable[[list[Line]], Any]


def found_in(original: Path, folder: Path, change: Change) -> list[str]:
    shutil.copytree(original, folder, dirs_exist_ok=True)
    change(folder)
    problems, _ = audit(folder)
    assert main([str(folder)]) == (1 if problems else 0)
    return problems


def lines_of(name: str, forge: Forge) -> Change:
    """Change the lines of metrics.jsonl or rollouts.jsonl."""

    def change(folder: Path) -> None:
        lines = [json.loads(line) for line in (folder / name).read_bytes().splitlines()]
        forge(lines)
        (folder / name).write_text("".join(json.dumps(line) + "\n" for line in lines))

    return change


def rollouts(forge: Forge) -> Change:
    return lines_of("rollouts.jsonl", forge)


def metrics(forge: Forge) -> Change:
    return lines_of("metrics.jsonl", forge)


def ledger(forge: Forge) -> Change:
    """Change events, with right numbers and checksums, as a bug of the writer would."""

    def change(folder: Path) -> None:
        found = list(RunFiles(folder).ledger())
        forge(found)
        (folder / LEDGER).unlink()
        with Ledger(folder) as ledger:
            for event in found:
                ledger._append(**{key: value for key, value in event.items() if key != "n"})

    return change


def raw(name: str, forge: Callable[[bytes], bytes]) -> Change:
    def change(folder: Path) -> None:
        (folder / name).write_bytes(forge((folder / name).read_bytes()))

    return change


def of(lines: list[Line], **what: Any) -> Line:
    """Return the first line with these values."""
    return next(line for line in lines if all(line.get(key) == value for key, value in what.items()))


def every(lines: list[Line], **what: Any) -> list[Line]:
    return [line for line in lines if all(line.get(key) == value for key, value in what.items())]


def swap(a: Line, b: Line, *keys: str) -> None:
    for key in keys:
        a[key], b[key] = b[key], a[key]


def place(lines: list[Line], **what: Any) -> int:
    return lines.index(of(lines, **what))


def without(lines: list[Line], *gone: Line) -> None:
    lines[:] = [line for line in lines if line not in gone]


def crc(text: bytes) -> bytes:
    """Return a line of the ledger with its checksum."""
    return b"%08x %s\n" % (zlib.crc32(text), text)


def third(line: bytes) -> Callable[[bytes], bytes]:
    """Put this in place of the third line."""
    return lambda whole: b"".join([*whole.splitlines(keepends=True)[:2], line, *whole.splitlines(keepends=True)[3:]])
