"""Programs that try to leave the sandbox, to harm its host, or to stay. One that succeeds prints ESCAPED."""

import os
import signal
import socket
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

CALL = """
import ctypes, errno, os, signal, socket, sys, time
libc = ctypes.CDLL(None, use_errno=True)
def call(*arguments):
    found = libc.syscall(*(ctypes.c_long(a) if isinstance(a, int) else a for a in arguments))
    return found if found >= 0 else -ctypes.get_errno()
def nr(x86_64, aarch64): return x86_64 if os.uname().machine == 'x86_64' else aarch64
def refused(found): return found in (-errno.EPERM, -errno.ENOSYS)
def escaped(*what): print('ESCAPED', *what, flush=True)
"""
X86 = os.uname().machine == "x86_64"


@dataclass(frozen=True)
class Target:
    """What is there to harm: a file, a process, a listener on TCP, UDP and Unix sockets, a descriptor."""

    secret: Path
    victim: "subprocess.Popen[bytes]"
    tcp: int
    udp: int
    abstract: str
    path: str
    sockets: list[socket.socket] = field(default_factory=list)

    def fill(self, code: str) -> str:
        values = {
            "SECRET": str(self.secret),
            "VICTIM": self.victim.pid,
            "HOST": os.getpid(),
            "TCP": self.tcp,
            "UDP": self.udp,
            "ABSTRACT": self.abstract,
            "PATH": self.path,
        }
        return CALL + "\n".join(f"{name} = {value!r}" for name, value in values.items()) + "\n" + code

    def harmed(self) -> str:
        """Return how an attack has succeeded, as seen from outside."""
        found = [] if self.victim.poll() is None else ["the victim is dead"]
        for each in self.sockets:
            with suppress(BlockingIOError):
                while True:
                    each.recv(1) if each.type == socket.SOCK_DGRAM else each.accept()[0].close()
                    found.append(f"something arrived at {each.getsockname()!r}")
        return "; ".join(found)


@contextmanager
def target(folder: Path) -> Iterator[Target]:
    for each in (folder, *folder.parents):
        with suppress(OSError):
            each.chmod(each.stat().st_mode | 0o755)  # permissions are not what protects the file
    secret = folder / "secret.txt"
    secret.write_text("SECRET")
    sockets = [socket.socket(socket.AF_INET, kind) for kind in (socket.SOCK_STREAM, socket.SOCK_DGRAM)]
    for each in sockets:
        each.bind(("127.0.0.1", 0))
    abstract, path = f"\0titan-rl-test-{os.getpid()}", str(folder / "s")
    for name in (abstract, path):
        sockets.append(socket.socket(socket.AF_UNIX))
        sockets[-1].bind(name)
    os.chmod(path, 0o777)
    for each in sockets:
        if each.type == socket.SOCK_STREAM:
            each.listen(5)
        each.setblocking(False)
    victim = subprocess.Popen(["sleep", "1000"])
    tcp, udp = (each.getsockname()[1] for each in sockets[:2])
    try:
        yield Target(secret, victim, tcp, udp, abstract, path, sockets)
    finally:
        victim.send_signal(signal.SIGKILL)
        victim.wait()
        for each in sockets:
            each.close()


# Each prints ESCAPED if it succeeded.
ATTACKS = {
    "read passwords": "escaped(open('/etc/shadow').read())",
    "read the run's file": "escaped(open(SECRET).read())",
    "read through a symbolic link": "os.symlink(SECRET, 'x'); escaped(open('x').read())",
    "read through a hard link": "os.link(SECRET, 'y'); escaped(open('y').read())",
    "read by climbing": "escaped(open('../' * 20 + SECRET).read())",
    "list home folders": "escaped(os.listdir('/home'))",
    "write outside": """
for p in ('/', '/usr', '/etc', '/bin', '/root', '/home', '/var/tmp', '/dev', '/proc/sys/kernel'):
    p += '/core_pattern'
    try: open(p, 'w').write('x'); escaped(p)
    except OSError: pass""",
    "change Python's library": """
import json
f = json.__file__
for change in (lambda: open(f, 'a'), lambda: os.rename(f, f + 'x'), lambda: os.chmod(f, 0o777)):
    try: change(); escaped(f)
    except OSError: pass""",
    "remount": """
for flags in (32 | 4096, 32):
    if libc.mount(None, b'/', None, flags, None) == 0: escaped(flags)
if libc.mount(None, b'/usr', None, 32 | 4096, None) == 0: escaped('usr')
if libc.umount2(b'/usr', 2) == 0: escaped('umount')""",
    "environment": "escaped(os.environ['TITAN_RL_TEST_SECRET'])",
    "environment of others": """
for p in ('self', 1, os.getppid(), HOST):
    try: s = open(f'/proc/{p}/environ').read()
    except OSError: continue
    if 'TITAN_RL_TEST_SECRET' in s: escaped(p)""",
    "memory of the fork server": """
import gc
found = [o for o in gc.get_objects() if isinstance(o, dict) and 'TITAN_RL_TEST_SECRET' in o]
if found: escaped()
try: maps = open('/proc/self/maps').read()
except OSError: maps = ''
if 'memfd:text' in maps: escaped('maps')""",
    "inherited descriptors": """
for f in range(3, 1024):
    try: os.fstat(f); escaped(f)
    except OSError: pass""",
    "change its stdin": "os.write(0, b'x'); escaped()",
    "ptrace": """
for p in (VICTIM, HOST, os.getppid(), 1):
    if p and libc.ptrace(16, p, 0, 0) == 0: escaped(p)""",
    "memory of others": """
b = ctypes.create_string_buffer(64)
iov = (ctypes.c_size_t * 2)(ctypes.addressof(b), 8)
for p in (VICTIM, HOST, os.getppid(), 1):
    if p and libc.process_vm_readv(p, iov, 1, iov, 1, 0) > 0: escaped('readv', p)
    try: open(f'/proc/{p}/mem', 'rb'); escaped('mem', p)
    except OSError: pass""",
    "kill the host": "os.kill(HOST, 0); escaped()",
    "kill others": """
for p in (VICTIM, -1):
    try: os.kill(p, 9)
    except OSError: pass""",
    "kill every id": """
for p in range(2, 40000):
    if p not in (os.getpid(), os.getppid()):
        try: os.kill(p, 0); escaped(p)
        except OSError: pass""",
    "kill the first process": """
for s in (9, 15, 11): os.kill(1, s)
time.sleep(.1)""",
    "see other processes": """
if len([p for p in os.listdir('/proc') if p.isdigit()]) > 4: escaped()""",
    "TCP": "socket.socket().connect(('127.0.0.1', TCP)); escaped()",
    "UDP": "socket.socket(socket.AF_INET, socket.SOCK_DGRAM).sendto(b'x', ('127.0.0.1', UDP))",
    "listen": "s = socket.socket(); s.bind(('127.0.0.1', 0)); s.listen(); escaped()",
    "other networks": """
for family, kind in ((16, 3), (40, 1), (17, 3), (2, 3), (10, 1), (38, 5), (31, 3)):
    try: socket.socket(family, kind); escaped(family)
    except OSError: pass""",
    "abstract Unix socket": "s = socket.socket(socket.AF_UNIX); s.connect(ABSTRACT); escaped()",
    "Unix socket with a path": "s = socket.socket(socket.AF_UNIX); s.connect(PATH); escaped()",
    "datagram of a socket pair": """
s = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)[0]; escaped()""",
    "new user namespace": "escaped() if libc.unshare(0x10000000) == 0 else None",
    "clone into a user namespace": """
flags = 0x10000000 | signal.SIGCHLD
pid = call(nr(56, 220), flags, 0, 0, 0, 0)
if pid == 0: os._exit(0)
if pid > 0: escaped()""",
    "clone3 into a user namespace": """
a = (ctypes.c_uint64 * 8)(0x10000000, 0, 0, 0, signal.SIGCHLD)
pid = call(435, a, 64)
if pid == 0: os._exit(0)
if pid > 0: escaped()""",
    "enter a namespace": """
for n in ('net', 'mnt', 'user', 'pid'):
    try: f = os.open(f'/proc/1/ns/{n}', 0)
    except OSError: continue
    if libc.setns(f, 0) == 0: escaped(n)""",
    "mount": "os.mkdir('m'); escaped() if libc.mount(b'tmpfs', b'm', b'tmpfs', 0, None) == 0 else None",
    "chroot": "os.mkdir('c'); os.chroot('c'); [os.chdir('..') for _ in range(64)]; os.chroot('.'); escaped()",
    "make a device": "os.mknod('d', 0o60666, os.makedev(8, 0)); escaped(); open('d', 'rb')",
    "become root": """
for change in (lambda: os.setuid(0), lambda: os.setresuid(0, 0, 0), lambda: os.setgroups([0])):
    try: change(); escaped()
    except OSError: pass
caps = (ctypes.c_uint32 * 6)()
libc.syscall(nr(125, 90), (ctypes.c_uint32 * 2)(0x20080522, 0), caps)
if any(caps): escaped(list(caps))""",
    "run a program that becomes root": """
import subprocess
for p in ('/usr/bin/su', '/bin/su', '/usr/bin/passwd', '/usr/bin/mount'):
    if os.path.exists(p):
        done = subprocess.run([p, '-c', 'id -u'], capture_output=True, text=True, timeout=5)
        if done.stdout.strip() == '0': escaped(p)
os.open('s', os.O_CREAT, 0o4755); os.chmod('s', 0o4755)
with open('/proc/self/status') as f:
    if 'NoNewPrivs:\\t1' not in f.read(): escaped()""",
    "raise a limit": """
import resource
for which in (resource.RLIMIT_AS, resource.RLIMIT_NPROC, resource.RLIMIT_CPU, resource.RLIMIT_FSIZE):
    try: resource.setrlimit(which, (resource.RLIM_INFINITY,) * 2); escaped(which)
    except (ValueError, OSError): pass""",
    "io_uring": "call(425, 4, ctypes.create_string_buffer(256)) < 0 or escaped()",
    "bpf": "refused(call(nr(321, 280), 0, ctypes.create_string_buffer(128), 128)) or escaped()",
    "perf events": "refused(call(nr(298, 241), ctypes.create_string_buffer(256), 0, -1, -1, 0)) or escaped()",
    "keyring": "refused(call(nr(250, 219), 0, -3, 0)) or escaped()",
    "userfaultfd": "call(nr(323, 282), 1) < 0 or escaped()",
    "file handles": "refused(call(nr(304, 265), -100, ctypes.create_string_buffer(64), 0)) or escaped()",
    "shared memory that stays": "call(nr(29, 194), 7, 4096, 0o1777) < 0 or escaped()",
    "larger buffers of sockets": """
s = socket.socketpair()[0]; s.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 22); escaped()""",
    "memory without a limit": "f = os.memfd_create('x'); escaped()",
    "put text into the terminal": """
import fcntl
for f in (0, 1, 2):
    try: fcntl.ioctl(f, 0x5412, b'x'); escaped()
    except OSError: pass
try: os.open('/dev/tty', os.O_RDWR); escaped()
except OSError: pass""",
    "set the clock": "time.clock_settime(time.CLOCK_REALTIME, 0); escaped()",
    "a higher priority": "os.nice(-5); escaped()",
}
if X86:
    ATTACKS["calls of 32 bits"] = """
import mmap
m = mmap.mmap(-1, 4096, prot=7)
m.write(b'\\xb8\\x14\\x00\\x00\\x00\\xcd\\x80\\xc3')  # mov eax, 20 (getpid); int 0x80; ret
ctypes.CFUNCTYPE(ctypes.c_int)(ctypes.addressof(ctypes.c_char.from_buffer(m)))(); escaped()"""

# Each tries to outlast its limit, or to exhaust a shared resource: (code, statuses that it may end with).
BOMBS = {
    "fork bomb": ("while True:\n  try: os.fork()\n  except OSError: pass", {"timeout"}),
    "thread bomb": (
        "import threading\ntry:\n  while True: threading.Thread(target=time.sleep, args=(99,), daemon=True).start()\n"
        "except RuntimeError: os._exit(5)",
        {"error", "memory"},
    ),
    "memory bomb": ("x = bytearray(4 << 30); escaped()", {"memory"}),
    "memory bomb of many processes": (
        "for _ in range(10):\n  if os.fork() == 0:\n    x = bytearray(b'x') * (60 << 20); time.sleep(30); os._exit(0)\n"
        "time.sleep(30); escaped()",
        {"memory"},
    ),
    "shared memory of many processes": (
        "import mmap\nfor _ in range(10):\n  if os.fork() == 0:\n    m = mmap.mmap(-1, 60 << 20)\n"
        "    for k in range(0, len(m), 4096): m[k] = 1\n    time.sleep(30); os._exit(0)\ntime.sleep(30); escaped()",
        {"memory"},
    ),
    "fill the disk": (
        "n = 0\ntry:\n  for i in range(2000): open(f'f{i}', 'wb').write(b'x' * (1 << 20)); n += 1\n"
        "except OSError: os._exit(5)\nescaped(n)",
        {"error"},
    ),
    "fill shared memory": (
        "n = 0\ntry:\n  for i in range(2000): open(f'/dev/shm/f{i}', 'wb').write(b'x' * (1 << 20)); n += 1\n"
        "except OSError: os._exit(5)\nescaped(n)",
        {"error"},
    ),
    "a large file": (
        "signal.signal(25, 1)\nf = open('f', 'wb')\nf.write(b'x' * (40 << 20)); f.flush(); escaped()",
        {"error"},
    ),
    "a million files": (
        "try:\n  for i in range(1_000_000): open(f'g{i}', 'w').close()\nexcept OSError: os._exit(5)\nescaped()",
        {"error"},
    ),
    "endless output": ("while True: print('x' * 4096)", {"output"}),
    "endless errors": ("while True: print('x' * 4096, file=sys.stderr)", {"output"}),
    "busy loop": ("while True: pass", {"timeout"}),
    "sleep, with every signal ignored": (
        "for s in range(1, 32):\n  try: signal.signal(s, signal.SIG_IGN)\n  except (OSError, ValueError): pass\n"
        "while True: time.sleep(9)",
        {"timeout"},
    ),
    "a loop in C": ("10 ** 10 ** 9", {"timeout", "memory"}),
    "segmentation fault": ("ctypes.string_at(0)", {"killed"}),
    "end itself": ("os.kill(os.getpid(), 9)", {"killed"}),
    "close stdout, fork and hang": ("os.fork(); os.close(1); os.close(2); time.sleep(99)", {"timeout"}),
    "a deep recursion": (
        "sys.setrecursionlimit(10 ** 9)\ndef f(n): return f(n + 1)\nf(0)",
        {"killed", "memory", "error", "timeout"},
    ),
}
