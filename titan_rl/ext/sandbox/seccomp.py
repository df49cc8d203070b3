"""A seccomp filter: system calls that a program of the sandbox has no use for fail.

Calls are refused by number. Numbers that are newer than this table are refused as unknown, so a new kernel adds no
way out.
"""

import ctypes
import errno
import struct

from titan_rl.ext.sandbox.syscalls import MACHINE, NO_NEW_PRIVS, SET_SECCOMP, control

AUDIT = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
# Name: (number on x86_64, number on aarch64); None where the machine has no such call.
REFUSED: dict[str, tuple[int | None, int | None]] = {
    # other processes
    "ptrace": (101, 117), "process_vm_readv": (310, 270), "process_vm_writev": (311, 271), "kcmp": (312, 272),
    "pidfd_open": (434, 434), "pidfd_getfd": (438, 438), "process_madvise": (440, 440), "migrate_pages": (256, 238),
    "move_pages": (279, 239), "process_mrelease": (448, 448),
    # namespaces and mounts
    "unshare": (272, 97), "setns": (308, 268), "mount": (165, 40), "umount2": (166, 39), "pivot_root": (155, 41),
    "chroot": (161, 51), "open_tree": (428, 428), "move_mount": (429, 429), "fsopen": (430, 430),
    "fsconfig": (431, 431), "fsmount": (432, 432), "fspick": (433, 433), "mount_setattr": (442, 442),
    "statmount": (457, 457), "listmount": (458, 458), "open_by_handle_at": (304, 265),
    "name_to_handle_at": (303, 264), "mknod": (133, None), "mknodat": (259, 33), "quotactl": (179, 60),
    "quotactl_fd": (443, 443), "fanotify_init": (300, 262),
    # the network: a socketpair is the only socket, with buffers of the default size
    "socket": (41, 198), "bind": (49, 200), "connect": (42, 203), "listen": (50, 201), "accept": (43, 202),
    "accept4": (288, 242), "setsockopt": (54, 208),
    # memory that no limit counts, or that outlives its process
    "memfd_create": (319, 279), "memfd_secret": (447, 447), "shmget": (29, 194), "msgget": (68, 186),
    "semget": (64, 190), "mq_open": (240, 180),
    # large surfaces of the kernel
    "io_uring_setup": (425, 425), "io_uring_enter": (426, 426), "io_uring_register": (427, 427), "bpf": (321, 280),
    "perf_event_open": (298, 241), "userfaultfd": (323, 282), "keyctl": (250, 219), "add_key": (248, 217),
    "request_key": (249, 218), "modify_ldt": (154, None), "uselib": (134, None), "personality": (135, 92),
    "lookup_dcookie": (212, 18), "vmsplice": (278, 75),
    # the machine
    "kexec_load": (246, 104), "kexec_file_load": (320, 294), "init_module": (175, 105), "finit_module": (313, 273),
    "delete_module": (176, 106), "swapon": (167, 224), "swapoff": (168, 225), "reboot": (169, 142), "acct": (163, 89),
    "syslog": (103, 116), "sethostname": (170, 161), "setdomainname": (171, 162), "iopl": (172, None),
    "ioperm": (173, None), "clock_settime": (227, 112), "settimeofday": (164, 170), "adjtimex": (159, 171),
    "clock_adjtime": (305, 266), "vhangup": (153, 58), "nfsservctl": (180, 42),
}  # fmt: skip
# Without namespaces the user's other files and processes are there, and Landlock has no say in these.
REFUSED_ALONE: dict[str, tuple[int | None, int | None]] = {
    "chmod": (90, None), "fchmod": (91, 52), "fchmodat": (268, 53), "fchmodat2": (452, 452), "chown": (92, None),
    "fchown": (93, 55), "lchown": (94, None), "fchownat": (260, 54), "utime": (132, None), "utimes": (235, None),
    "futimesat": (261, None), "utimensat": (280, 88), "setxattr": (188, 5), "lsetxattr": (189, 6),
    "fsetxattr": (190, 7), "removexattr": (197, 14), "lremovexattr": (198, 15), "fremovexattr": (199, 16),
    "inotify_init": (253, None), "inotify_init1": (294, 26), "setpriority": (141, 140), "ioprio_set": (251, 30),
    "sched_setaffinity": (203, 122), "sched_setscheduler": (144, 119), "sched_setparam": (142, 118),
    "sched_setattr": (314, 274),
}  # fmt: skip
PRLIMIT = {"x86_64": 302, "aarch64": 261}
CLONE, CLONE3 = {"x86_64": 56, "aarch64": 220}, 435
IOCTL = {"x86_64": 16, "aarch64": 29}
SOCKETPAIR = {"x86_64": 53, "aarch64": 199}
NEWEST = 462  # mseal, Linux 6.10
NAMESPACES = 0x7E020000  # flags of clone
TIOCSTI, TIOCLINUX = 0x5412, 0x541C  # put text into a terminal
SOCK_STREAM, SOCK_TYPE = 1, 0xF

LOAD, EQUAL, AT_LEAST, ANY_BIT, AND, RETURN = 0x20, 0x15, 0x35, 0x45, 0x54, 0x06
ALLOW, KILL, FAIL = 0x7FFF0000, 0x80000000, 0x00050000
NUMBER, ARCH, ARGUMENTS = 0, 4, 16


def instructions(machine: str = MACHINE, *, alone: bool = False) -> list[bytes]:
    """Return the filter as BPF. `alone`: there are no namespaces."""
    found: list[bytes] = []

    def add(code: int, value: int, if_true: int = 0, if_false: int = 0) -> None:
        found.append(struct.pack("HBBI", code, if_true, if_false, value))

    def fail(number: int, why: int) -> None:
        add(EQUAL, number, 0, 1)
        add(RETURN, FAIL | why)

    def argument(index: int) -> None:
        add(LOAD, ARGUMENTS + 8 * index)

    which = ("x86_64", "aarch64").index(machine)
    add(LOAD, ARCH)
    add(EQUAL, AUDIT[machine], 1, 0)
    add(RETURN, KILL)  # 32-bit calls have other numbers
    add(LOAD, NUMBER)
    add(AT_LEAST, NEWEST + 1, 0, 1)  # also x32
    add(RETURN, FAIL | errno.ENOSYS)
    fail(CLONE3, errno.ENOSYS)  # its flags are in memory, which a filter cannot read; libc falls back to clone
    for numbers in [*REFUSED.values(), *(REFUSED_ALONE.values() if alone else ())]:
        if (number := numbers[which]) is not None:
            fail(number, errno.EPERM)
    add(EQUAL, CLONE[machine], 0, 4)
    argument(0)
    add(ANY_BIT, NAMESPACES, 0, 1)
    add(RETURN, FAIL | errno.EPERM)
    add(RETURN, ALLOW)
    add(EQUAL, PRLIMIT[machine], 0, 4)
    argument(0)
    add(EQUAL, 0, 1, 0)  # its own limits, which it cannot raise
    add(RETURN, FAIL | errno.EPERM)
    add(RETURN, ALLOW)
    add(EQUAL, SOCKETPAIR[machine], 0, 5)
    argument(1)
    add(AND, SOCK_TYPE)
    add(EQUAL, SOCK_STREAM, 1, 0)  # a datagram socket can be sent to any address
    add(RETURN, FAIL | errno.EPERM)
    add(RETURN, ALLOW)
    add(EQUAL, IOCTL[machine], 0, 5)
    argument(1)
    add(EQUAL, TIOCSTI, 1, 0)
    add(EQUAL, TIOCLINUX, 0, 1)
    add(RETURN, FAIL | errno.EPERM)
    add(RETURN, ALLOW)
    add(RETURN, ALLOW)
    return found


def restrict(*, alone: bool = False) -> None:
    """Put the calling process, and all that it starts, under the filter."""
    if MACHINE not in AUDIT:
        raise OSError(errno.ENOSYS, f"expected {' or '.join(AUDIT)}, found {MACHINE}")
    program = instructions(alone=alone)
    code = ctypes.create_string_buffer(b"".join(program))
    header = ctypes.create_string_buffer(struct.pack("HxxxxxxQ", len(program), ctypes.addressof(code)))
    control(NO_NEW_PRIVS, 1)
    control(SET_SECCOMP, 2, ctypes.addressof(header))
