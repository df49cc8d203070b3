"""The sandbox as its users see it: how executions end, several at a time, and fork servers that die."""

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace

import psutil
import pytest

from titan_rl.config.sections import SandboxSection
from titan_rl.ext.agents.tools import Toolbox, ToolCall, ToolFailed
from titan_rl.ext.sandbox import code_tools, local
from titan_rl.ext.sandbox.code_tools import CodeTools, python, shell, shown
from titan_rl.ext.sandbox.execution import Execution, ExecutionLimits
from titan_rl.ext.sandbox.local import LocalSandbox
from titan_rl.wire.errors import SandboxRefused

SECTION = SandboxSection(wall_seconds=30, memory_mb=256)
LIMITS = ExecutionLimits(cpu_seconds=2, wall_seconds=30, memory_mb=256)


@pytest.fixture(scope="module")
def sandbox() -> Iterator[LocalSandbox]:
    sandbox = LocalSandbox(SECTION, limits=LIMITS)
    yield sandbox
    sandbox.close()


def servers(sandbox: LocalSandbox) -> list[int]:
    return [each._process.pid for each in sandbox._idle.queue if each is not None]


@pytest.mark.parametrize(
    ("code", "status", "detail", "stdout"),
    [
        ("print(input())", "ok", "", "typed\n"),
        ("import sys; print('é'); sys.exit(0)", "ok", "", "é\n"),
        ("import sys; sys.exit(3)", "error", "exit code 3", ""),
        ("import sys; sys.exit('no')", "error", "exit code 1", ""),
        ("print(1); 1/0", "error", "exit code 1", "1\n"),
        ("def f(:", "error", "exit code 1", ""),
        ("import os; os.abort()", "killed", "signal 6 (SIGABRT)", ""),
        ("x = bytearray(1 << 30)", "memory", "a process needs more than 256 MiB", ""),
        ("import os; os._exit(0)", "ok", "", ""),
        ("import atexit; atexit.register(print, 'bye')", "ok", "", "bye\n"),
        ("import threading; threading.Timer(.05, print, ['late']).start()", "ok", "", "late\n"),
        ("import multiprocessing as m; print(m.get_context('fork').Pool(2).map(abs, [-1, 2]))", "ok", "", "[1, 2]\n"),
        ("import asyncio\nasync def f(): return 5\nprint(asyncio.run(f()))", "ok", "", "5\n"),
        ("import sys, subprocess as s; print(s.run([sys.executable, '-c', 'print(7)'], capture_output=True).stdout)",
         "ok", "", "b'7\\n'\n"),
        ("import os; print(dict(os.environ).keys() - {'OMP_NUM_THREADS'} >= {'PATH'}, os.getcwd())", "ok", "",
         "True /tmp/work\n"),
        ("open('a', 'w').write('b'); print(open('a').read(), __name__)", "ok", "", "b __main__\n"),
        ("print({'a', 'b', 'c', 'd', 'e'})", "ok", "", None),
    ],
)  # fmt: skip
def test_how_a_program_ends(code: str, status: str, detail: str, stdout: str | None, sandbox: LocalSandbox) -> None:
    found = sandbox.run_here(code, stdin="typed\n")
    assert (found.status, found.detail) == (status, detail), found
    assert stdout is None or found.stdout == stdout


def test_a_traceback_shows_the_programs_lines_only(sandbox: LocalSandbox) -> None:
    found = sandbox.run_here("def f():\n    return 1 / 0\nf()")
    lines = found.stderr.splitlines()
    assert lines[0] == "Traceback (most recent call last):"
    assert lines[1] == '  File "<code>", line 3, in <module>'
    assert lines[-1] == "ZeroDivisionError: division by zero"
    assert "titan_rl" not in found.stderr


def test_shell(sandbox: LocalSandbox) -> None:
    found = sandbox.run_here("echo $((6 * 7)); cat; echo no >&2; exit 4", language="shell", stdin="in")
    assert (found.status, found.exit_code, found.stdout, found.stderr) == ("error", 4, "42\nin", "no\n")


def test_the_order_of_sets_is_the_same_in_every_server() -> None:
    outputs = set()
    for _ in range(2):
        sandbox = LocalSandbox(SECTION, limits=LIMITS)
        outputs.add(sandbox.run_here("print({'a', 'b', 'c', 'd', 'e', 'f'}, hash('a'))").stdout)
        sandbox.close()
    assert len(outputs) == 1


def test_packages_are_there_if_they_are_wanted() -> None:
    sandbox = LocalSandbox(replace(SECTION, packages=True, memory_mb=1024, wall_seconds=120))
    found = sandbox.run_here("import numpy; print(numpy.arange(4).sum())")
    assert found.stdout == "6\n", found
    assert sandbox.run_tests_here(
        "import numpy as np\ndef f(n): return np.arange(n)", ["import numpy\nassert numpy.allclose(f(3), [0, 1, 2])"]
    ).solved
    sandbox.close()


def test_without_packages_there_are_none(sandbox: LocalSandbox) -> None:
    assert "No module named 'numpy'" in sandbox.run_here("import numpy").stderr


async def test_several_at_a_time() -> None:
    sandbox = LocalSandbox(SECTION, limits=LIMITS)
    await sandbox.warm()
    began = time.monotonic()
    found = await asyncio.gather(*(sandbox.run(f"import time; time.sleep(.5); print({n})") for n in range(4)))
    assert [each.stdout for each in found] == [f"{n}\n" for n in range(4)]
    assert sum(each.seconds for each in found) > 1.5 * (time.monotonic() - began)  # two at a time
    sandbox.close()


async def test_a_cancelled_execution_ends_and_its_server_is_replaced(sandbox: LocalSandbox) -> None:
    began = time.monotonic()
    task = asyncio.create_task(sandbox.run("import time; time.sleep(25)"))
    await asyncio.sleep(0.5)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    found = await asyncio.gather(*(sandbox.run("print(1)") for _ in range(4)))
    assert [each.stdout for each in found] == ["1\n"] * 4
    assert time.monotonic() - began < 20


def test_a_server_that_dies_is_named_and_replaced(sandbox: LocalSandbox) -> None:
    async def run() -> Execution:
        task = asyncio.create_task(sandbox.run("import time; time.sleep(25)"))
        while len(servers(sandbox)) == 2:
            await asyncio.sleep(0.01)
        (idle,) = servers(sandbox)
        running = {int(pid) for pid in os.listdir("/proc") if pid.isdigit() and is_server(int(pid))} - {idle}
        for pid in running:
            os.kill(pid, signal.SIGKILL)
        return await task

    asyncio.run(sandbox.warm())
    found = asyncio.run(run())
    assert found.status == "sandbox_failed"
    assert found.detail == "the fork server ended with exit code -9"
    assert sandbox.run_here("print(1)").stdout == "1\n"


def test_nothing_outlives_its_host() -> None:
    program = (
        "import time\nfrom titan_rl.ext.sandbox.local import shared\nprint(shared().run_here('').status, flush=True)\n"
        "shared().run_here('import os; os.fork(); import time; time.sleep(77)')"
    )
    host = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True)
    assert host.stdout is not None
    assert host.stdout.readline() == "ok\n"
    mine = psutil.Process(host.pid)
    deadline = time.monotonic() + 60
    while (
        len(found := mine.children(recursive=True)) < 5 and time.monotonic() < deadline
    ):  # the server's, the program's
        time.sleep(0.01)
    host.kill()
    host.wait()
    host.stdout.close()
    assert psutil.wait_procs(found, timeout=60)[1] == []


def is_server(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat") as file:
            parent = int(file.read().rpartition(")")[2].split()[1])
        with open(f"/proc/{pid}/cmdline") as file:
            return parent == os.getpid() and "sandbox.fork_server" in file.read()
    except OSError:
        return False


def test_a_closed_sandbox_runs_nothing() -> None:
    sandbox = LocalSandbox(SECTION, limits=LIMITS, workers=1)
    assert sandbox.run_here("print(1)").stdout == "1\n"
    sandbox.close()
    with pytest.raises(SandboxRefused, match="the sandbox is closed"):
        sandbox.run_here("print(1)")


async def test_limits_of_one_call(sandbox: LocalSandbox) -> None:
    found = await sandbox.run("import time; time.sleep(9)", limits=replace(sandbox.limits, wall_seconds=0.3))
    assert (found.status, found.detail) == ("timeout", "more than 0.3 s")
    assert 0.3 <= found.seconds < 9


def test_tools(monkeypatch: pytest.MonkeyPatch, sandbox: LocalSandbox) -> None:
    monkeypatch.setattr(code_tools, "shared", lambda: sandbox)
    tools = Toolbox(CodeTools().tools)
    assert [each["function"]["name"] for each in tools.schemas] == ["python", "shell"]
    assert tools.schemas[0]["function"]["parameters"]["required"] == ["code"]

    async def run(name: str, **arguments: str) -> str:
        found = await tools.call(ToolCall(name, arguments))
        assert isinstance(found, str)
        return found

    assert asyncio.run(run("python", code="print(6 * 7)")) == "42\n"
    assert asyncio.run(run("shell", script="echo a; exit 2")) == "a\n[exit code 2]"
    assert asyncio.run(run("python", code="while True: print('x' * 999)")).endswith(
        "[too much output: more than 64 KiB of output; this is the beginning]"
    )


def test_a_long_output_is_cut_in_the_middle() -> None:
    text = shown(Execution("ok", stdout="a" * 5000 + "b" * 5000))
    assert text == f"{'a' * 2000}\n[6000 characters are left out]\n{'b' * 2000}"


def test_a_sandbox_that_fails_is_no_observation(monkeypatch: pytest.MonkeyPatch) -> None:
    class Broken:
        async def run(self, code: str, language: str = "python") -> Execution:
            return Execution("sandbox_failed", detail="namespaces: no")

    monkeypatch.setattr(code_tools, "shared", Broken)
    for tool, keyword in ((python, "code"), (shell, "script")):
        with pytest.raises(SandboxRefused, match="the sandbox failed: namespaces: no"):
            asyncio.run(Toolbox([tool]).call(ToolCall(tool.__name__, {keyword: "1"})))
    with pytest.raises(ToolFailed):
        asyncio.run(Toolbox([python]).result(ToolCall("python", {"code": 3})))


def test_shared_is_configured_and_one_in_a_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(local.VARIABLE, "{}")
    local.configure(SandboxSection(wall_seconds=7))
    assert local.shared() is local.shared()
    assert local.shared().limits.wall_seconds == 7
    program = "from titan_rl.ext.sandbox.local import shared; print(shared().limits.wall_seconds)"
    assert subprocess.run([sys.executable, "-c", program], capture_output=True, text=True).stdout == "7\n"
    local.configure(SandboxSection())
    assert local.shared().limits.wall_seconds == 10
