"""Limits, results and verdicts of executions.

result = await sandbox.run("print(6 * 7)")      result.status == "ok", result.stdout == "42\\n"
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from titan_rl.config.system_sections import SandboxSection

Language = Literal["python", "shell"]
Ending = Literal["ok", "error", "timeout", "memory", "output", "killed", "sandbox_failed"]
"""How an execution ended: exit code 0; another one; out of time, memory or room for output; by a signal; or it was not
run, because the sandbox could not be set up."""


@dataclass(frozen=True, slots=True)
class ExecutionLimits:
    cpu_seconds: int = 10  # per process
    wall_seconds: float = 10.0
    memory_mb: int = 512  # per process, and for all of them together
    processes: int = 16
    file_mb: int = 16  # per file
    disk_mb: int = 64  # for all files
    output_kb: int = 64  # stdout and stderr together

    @classmethod
    def of(cls, section: SandboxSection) -> "ExecutionLimits":
        wall = section.wall_seconds
        return cls(cpu_seconds=math.ceil(wall), wall_seconds=wall, memory_mb=section.memory_mb)


@dataclass(frozen=True, slots=True)
class Execution:
    """How code ended, and its output."""

    status: Ending
    stdout: str = ""
    stderr: str = ""
    exit_code: int | None = None  # None: it did not exit
    seconds: float = 0.0
    cpu_seconds: float = 0.0
    detail: str = ""  # the exceeded limit, or why the sandbox failed
    tests: Mapping[str, Any] | None = None  # the report of process 1


@dataclass(frozen=True, slots=True)
class Verdict:
    """How many tests of a program passed. The program cannot reach where this comes from."""

    passed: int
    total: int
    failures: Sequence[str]  # the first failed tests, with their errors
    execution: Execution  # the last one

    @property
    def solved(self) -> bool:
        return 0 < self.total == self.passed
