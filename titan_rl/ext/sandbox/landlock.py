"""Landlock: the files that a process may read and write, and whom it may connect to and signal."""

import ctypes
import os
import stat
import struct
from collections.abc import Iterable

from titan_rl.ext.sandbox.syscalls import LANDLOCK, NO_NEW_PRIVS, call, control

EXECUTE, WRITE_FILE, READ_FILE, READ_DIR, TRUNCATE = 1 << 0, 1 << 1, 1 << 2, 1 << 3, 1 << 14
READ = EXECUTE | READ_FILE | READ_DIR
OF_FILES = EXECUTE | WRITE_FILE | READ_FILE | TRUNCATE | 1 << 15
ACCESS = {1: 13, 2: 14, 3: 15, 4: 15, 5: 16}  # bits of file access by ABI
TCP = 3  # bind and connect, from ABI 4
ABSTRACT_SOCKETS, SIGNALS = 1, 2  # scopes, from ABI 6
SCOPED = 6


def version() -> int:
    """Return the kernel's Landlock ABI. 0: none."""
    try:
        return call(LANDLOCK, None, 0, 1, what="landlock")
    except OSError:
        return 0


def restrict(read: Iterable[str], write: Iterable[str]) -> None:
    """Let the calling process, and all that it starts, read only these files and folders and change only those."""
    abi = version()
    every = (1 << ACCESS[min(abi, 5)]) - 1
    attributes = struct.pack("QQQ", every, TCP if abi >= 4 else 0, ABSTRACT_SOCKETS | SIGNALS if abi >= SCOPED else 0)
    size = 24 if abi >= 6 else 16 if abi >= 4 else 8
    ruleset = call(LANDLOCK, ctypes.create_string_buffer(attributes), size, 0, what="landlock_create_ruleset")
    for paths, access in ((read, READ), (write, every)):
        for path in paths:
            try:
                at = os.open(path, os.O_PATH | os.O_CLOEXEC)
            except (FileNotFoundError, PermissionError):  # then the code cannot read it either
                continue
            allowed = access & every if stat.S_ISDIR(os.fstat(at).st_mode) else access & every & OF_FILES
            rule = ctypes.create_string_buffer(struct.pack("=QI", allowed, at))
            call(LANDLOCK + 1, ruleset, 1, rule, 0, what=f"landlock_add_rule {path}")
            os.close(at)
    _enforce(ruleset)


def keep_signals() -> None:
    """Let the calling process signal only itself and its descendants."""
    attributes = ctypes.create_string_buffer(struct.pack("QQQ", 0, 0, SIGNALS))
    _enforce(call(LANDLOCK, attributes, 24, 0, what="landlock_create_ruleset"))


def _enforce(ruleset: int) -> None:
    control(NO_NEW_PRIVS, 1)
    call(LANDLOCK + 2, ruleset, 0, what="landlock_restrict_self")
    os.close(ruleset)
