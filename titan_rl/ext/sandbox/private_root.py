"""The files that the sandbox sees: a new root with a Python, the system's programs, and a scratch folder in memory."""

import os
import sys

from titan_rl.ext.sandbox.syscalls import (
    ATTR_NODEV,
    ATTR_NOSUID,
    ATTR_RDONLY,
    MS_BIND,
    MS_NODEV,
    MS_NOSUID,
    MS_PRIVATE,
    MS_REC,
    detach,
    mount,
    pivot_root,
    set_read_only,
)

SYSTEM = (
    *("/usr", "/bin", "/sbin", "/lib", "/lib64", "/etc/alternatives", "/etc/ld.so.cache", "/etc/ld.so.conf"),
    *("/etc/ld.so.conf.d", "/etc/localtime", "/etc/mime.types"),
)
DEVICES = ("/dev/null", "/dev/zero", "/dev/full", "/dev/random", "/dev/urandom")
SCRATCH = "/tmp"
PACKAGES = "/packages"  # where installed packages are shown: their own folder may be below SCRATCH, which covers it
USERS = "code:x:1000:1000::/tmp/work:/bin/sh\n"


def visible(packages: str = "") -> list[str]:
    """Return the folders and files that are shown, read-only. `packages`: a folder of Python packages, or ""."""
    found = list(SYSTEM)
    for path in (sys.base_prefix, packages):
        if path and not any(os.path.commonpath([path, other]) == other for other in found):
            found.append(path)
    return [path for path in found if os.path.lexists(path)]


def enter(paths: list[str], packages: str = "") -> tuple[list[str], str]:
    """Make a root of `paths`, and leave every other file behind. Needs a new mount namespace. Return the paths
    and the folder of packages as they are called there."""
    if os.path.commonpath([sys.base_prefix, SCRATCH]) == SCRATCH:
        raise OSError(f"expected a Python outside {SCRATCH}, which the sandbox hides, found {sys.base_prefix}")
    mount("", "/", flags=MS_REC | MS_PRIVATE)
    mount("tmpfs", SCRATCH, "tmpfs", MS_NOSUID | MS_NODEV, "mode=755")
    os.mkdir(f"{SCRATCH}/old")
    os.mkdir(f"{SCRATCH}/new")
    pivot_root(SCRATCH, f"{SCRATCH}/old")
    os.chdir("/")
    mount("tmpfs", "/new", "tmpfs", MS_NOSUID | MS_NODEV, "mode=755,size=1m")
    for path in paths:
        _show(path, PACKAGES if path == packages else path)
    for device in DEVICES:
        _bind(device)
        set_read_only(f"/new{device}", recursive=False, attributes=ATTR_RDONLY | ATTR_NOSUID)
    os.makedirs(f"/new{SCRATCH}")
    os.symlink(SCRATCH, "/new/dev/shm")
    os.makedirs("/new/etc", exist_ok=True)
    with open("/new/etc/passwd", "w") as users:
        users.write(USERS)
    os.chdir("/new")
    pivot_root(".", ".")  # the old root is now on top of the new one
    detach(".")
    os.chdir("/")
    set_read_only("/", recursive=False, attributes=ATTR_RDONLY | ATTR_NOSUID | ATTR_NODEV)
    if packages not in paths:
        return paths, packages
    return [PACKAGES if path == packages else path for path in paths], PACKAGES


def mount_scratch(size_mb: int) -> None:
    options = f"size={size_mb}m,nr_inodes={64 * size_mb},mode=700"
    mount("tmpfs", SCRATCH, "tmpfs", MS_NOSUID | MS_NODEV, options)


def _show(path: str, name: str) -> None:
    old = f"/old{path}"
    if os.path.islink(old):
        os.makedirs(os.path.dirname(f"/new{name}"), exist_ok=True)
        os.symlink(os.readlink(old), f"/new{name}")
        return
    _bind(path, name)
    set_read_only(f"/new{name}", recursive=True)


def _bind(path: str, name: str = "") -> None:
    old, new = f"/old{path}", f"/new{name or path}"
    if os.path.isdir(old):
        os.makedirs(new, exist_ok=True)
    else:
        os.makedirs(os.path.dirname(new), exist_ok=True)
        with open(new, "w"):
            pass
    mount(old, new, flags=MS_BIND | MS_REC)
