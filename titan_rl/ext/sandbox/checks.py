"""Checks of [sandbox], and of rows with tests of code."""

import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import closing, suppress
from pathlib import Path

from titan_rl.config.sections import Config
from titan_rl.ext.sandbox import cgroup
from titan_rl.ext.sandbox.code_tests import check_row
from titan_rl.ext.sandbox.local import LocalSandbox, missing
from titan_rl.ext.sandbox.requirements import too_weak
from titan_rl.preflight.checks.task import rewards_of, rewards_of_sets
from titan_rl.tasks.examples import Example
from titan_rl.wire.cores import host_memory
from titan_rl.wire.errors import SandboxRefused

SANDBOX = ("titan_rl.ext.sandbox", "titan_rl.sandbox")  # the second: its earlier name
TESTED_ROWS = 16
"""Rows of "code_tests" on which an empty program is run."""


def problems(config: Config) -> Iterator[str]:
    section = config.sandbox
    wrong = [*too_weak(section), *(cgroup.problems(section.cgroup) if section.cgroup else ())]
    if section.memory_mb > (most := host_memory() >> 20):
        wrong.append(f"sandbox.memory_mb: expected at most {most}, this host's memory, found {section.memory_mb}")
    yield from wrong
    if not wrong and (key := used_by(config)):
        why = f"{key} runs code in the sandbox, which is refused here"
        yield from (f"sandbox.require: {why}: {each}" for each in missing(section))


def used_by(config: Config) -> str:
    """Return the key whose code uses the sandbox, judged by the text of its module. Empty: none."""
    named = [("environment.name", config.environment.name), ("task.agent", config.task.agent)]
    named += [(f"task.{key}", name) for key, name in rewards_of(config.task)]
    named += [("eval.sets", name) for name in rewards_of_sets(config)]
    return next((key for key, name in named if name == "code_tests" or _names_sandbox(name)), "")


def _names_sandbox(name: str) -> bool:
    module, colon, _ = name.partition(":")
    if not colon or module.startswith(SANDBOX):
        return bool(colon)
    for folder in sys.path:  # the file is read, not imported
        path = Path(folder, *module.split("."))
        for file in (path.with_suffix(".py"), path / "__init__.py"):
            if os.path.isfile(file):  # unlike Path.is_file, never raises
                return any(name in file.read_text(errors="replace") for name in SANDBOX)
    return False


def warnings(config: Config) -> Sequence[str]:
    return ()


def untested(config: Config, key: str, examples: Sequence[Example]) -> Iterator[str]:
    """Yield the first of some rows whose tests test nothing. `problems` refuses a machine without a sandbox."""
    with suppress(SandboxRefused), closing(LocalSandbox(config.sandbox)) as sandbox:
        for example in examples[:: max(1, len(examples) // TESTED_ROWS)]:
            try:
                check_row(example.answer, example.row, sandbox)
            except ValueError as error:
                yield f"task.{key}: {example.where}: {error}"
                return
