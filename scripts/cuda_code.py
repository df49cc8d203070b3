"""Zeroes the code of other GPUs in a CUDA library, in place, so that it compresses to almost nothing.

A library's section .nv_fatbin has fat binaries; each has entries with machine code (ELF) or PTX for one architecture. A
fat binary keeps the entries that a driver would choose, and all headers, so that it chooses as before. cuobjdump cannot
read the result where entries are compressed: it uncompresses all of them.
"""

import mmap
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

MAGIC = struct.pack("<I", 0xBA55ED50)  # a fat binary's first bytes
PTX, ELF = 1, 2
SECTION = b".nv_fatbin"
LOAD = 1  # kind of a segment


@dataclass(frozen=True, slots=True)
class Entry:
    kind: int
    arch: int  # compute capability without its dot: 90
    begin: int  # offset of the code in the library
    end: int


@dataclass(slots=True)
class Pruned:
    kept: int = 0  # bytes of code
    zeroed: int = 0
    binaries: int = 0
    without: int = 0  # binaries that have no machine code for the architecture


def prune(path: Path, arch: int) -> Pruned:
    """Zero the code that a GPU of this architecture never runs."""
    done = Pruned()
    with path.open("r+b") as file, mmap.mmap(file.fileno(), 0) as data:
        at, stop = gpu_code(data)
        while (at := data.find(MAGIC, at, stop)) >= 0:
            version, header, length = struct.unpack_from("<HHQ", data, at + 4)
            if version != 1 or header < 16 or at + header + length > stop:
                at += len(MAGIC)  # the same bytes by chance
                continue
            found = list(entries(data, at + header, at + header + length))
            own = chosen(found, arch)
            done.binaries += 1
            done.without += not own or own[0].kind == PTX
            for entry in found:
                size = entry.end - entry.begin
                if entry in own:
                    done.kept += size
                else:
                    data[entry.begin : entry.end] = bytes(size)
                    done.zeroed += size
            at += header + length
    return done


def chosen(found: list[Entry], arch: int) -> list[Entry]:
    """Return the entries of a fat binary that a driver may choose. Machine code runs on its own and later minor
    versions of one compute capability, PTX on all later ones."""
    for kind, least in ((ELF, arch // 10 * 10), (PTX, 0)):
        usable = [entry for entry in found if entry.kind == kind and least <= entry.arch <= arch]
        if usable:
            newest = max(entry.arch for entry in usable)
            return [entry for entry in usable if entry.arch == newest]
    return []


def gpu_code(data: mmap.mmap) -> tuple[int, int]:
    """Return where the section of fat binaries begins and ends; an empty range if there is none."""
    if data[:4] != b"\x7fELF":
        return 0, 0
    (table,) = struct.unpack_from("<Q", data, 0x28)
    size, count, strings = struct.unpack_from("<HHH", data, 0x3A)
    sections = [struct.unpack_from("<IIQQQQIIQQ", data, table + i * size) for i in range(count)]
    for name, _, _, _, offset, nbytes, *_ in sections:
        begin = sections[strings][4] + name
        if data[begin : data.find(b"\0", begin)] == SECTION:
            return offset, offset + nbytes
    return 0, 0


def entries(data: mmap.mmap, at: int, end: int) -> Iterator[Entry]:
    """Yield the entries of one fat binary."""
    while at + 64 <= end:
        kind, _, header, size = struct.unpack_from("<HHIQ", data, at)
        (arch,) = struct.unpack_from("<I", data, at + 28)
        if kind not in (PTX, ELF) or not 64 <= header <= 4096 or at + header + size > end:
            return
        yield Entry(kind, arch, at + header, at + header + size)
        at += header + size


def loads(path: Path) -> bool:
    """Return True if a loader can map each segment of a library: its place in the file and in memory agree by pages."""
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        (table,) = struct.unpack_from("<Q", data, 0x20)
        size, count = struct.unpack_from("<HH", data, 0x36)
        segments = [struct.unpack_from("<IIQQ", data, table + i * size) for i in range(count)]
    return all((address - offset) % mmap.PAGESIZE == 0 for kind, _, offset, address in segments if kind == LOAD)
