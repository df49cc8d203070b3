"""System calls that Python has no function for."""

import ctypes
import os
import platform

NEWNS, NEWCGROUP, NEWUTS, NEWIPC = 0x20000, 0x2000000, 0x4000000, 0x8000000
NEWUSER, NEWPID, NEWNET = 0x10000000, 0x20000000, 0x40000000
MS_RDONLY, MS_NOSUID, MS_NODEV, MS_NOEXEC, MS_BIND, MS_REC, MS_PRIVATE = 1, 2, 4, 8, 4096, 16384, 1 << 18
MNT_DETACH = 2
ATTR_RDONLY, ATTR_NOSUID, ATTR_NODEV = 1, 2, 4
AT_FDCWD, AT_RECURSIVE = -100, 0x8000
SET_PDEATHSIG, SET_DUMPABLE, SET_SECCOMP, CAPBSET_DROP, CHILD_SUBREAPER, NO_NEW_PRIVS = 1, 4, 22, 24, 36, 38

MACHINE = platform.machine()
PIVOT_ROOT, CAPSET = {"aarch64": (41, 91)}.get(MACHINE, (155, 126))
MOUNT_SETATTR, LANDLOCK = 442, 444  # the same on every machine since Linux 5.1

_libc = ctypes.CDLL(None, use_errno=True)


def checked(result: int, what: str) -> int:
    if result == -1:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")
    return result


def call(number: int, *arguments: object, what: str) -> int:
    """Make a system call by its number. Integers are passed as longs."""
    longs = [ctypes.c_long(each) if isinstance(each, int) else each for each in arguments]
    return checked(_libc.syscall(ctypes.c_long(number), *longs), what)


def control(option: int, value: int = 0, more: int = 0) -> None:
    """Call prctl."""
    longs = [ctypes.c_ulong(each) for each in (value, more, 0, 0)]
    checked(_libc.prctl(option, *longs), f"prctl {option}")


def unshare(flags: int) -> None:
    checked(_libc.unshare(flags), "unshare")


def mount(source: str, target: str, kind: str = "", flags: int = 0, data: str = "") -> None:
    texts = [each.encode() or None for each in (source, target, kind)]
    checked(_libc.mount(*texts, ctypes.c_ulong(flags), data.encode() or None), f"mount {target}")


def set_read_only(path: str, *, recursive: bool, attributes: int = ATTR_RDONLY | ATTR_NOSUID | ATTR_NODEV) -> None:
    """Make a mount, or all mounts below a path, read-only."""
    wanted = (ctypes.c_uint64 * 4)(attributes, 0, 0, 0)
    flags = AT_RECURSIVE if recursive else 0
    call(MOUNT_SETATTR, AT_FDCWD, path.encode(), flags, wanted, 32, what=f"mount_setattr {path} (Linux 5.12)")


def detach(path: str) -> None:
    checked(_libc.umount2(path.encode(), MNT_DETACH), f"umount {path}")


def pivot_root(new: str, old: str) -> None:
    call(PIVOT_ROOT, new.encode(), old.encode(), what="pivot_root")


def drop_capabilities() -> None:
    """Give up every capability, for good."""
    for capability in range(64):
        if _libc.prctl(CAPBSET_DROP, ctypes.c_ulong(capability), 0, 0, 0) == -1:
            break  # the kernel knows no more, or this process may not drop any, because it has none
    header, none = (ctypes.c_uint32 * 2)(0x20080522, 0), (ctypes.c_uint32 * 6)()
    call(CAPSET, header, none, what="capset")
