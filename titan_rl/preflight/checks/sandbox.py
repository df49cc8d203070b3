"""Checks of [sandbox]: that it holds, and that this machine has the layers that it requires."""

import sys
from collections.abc import Iterator
from pathlib import Path

from titan_rl.config.sections import Config
from titan_rl.preflight.checks.reward_keys import rewards_of, rewards_of_sets
from titan_rl.sandbox.cgroup import problems
from titan_rl.sandbox.local import missing
from titan_rl.sandbox.requirements import too_weak
from titan_rl.wire.cores import host_memory

ROOM = "titan_rl.sandbox"


def check_sandbox(config: Config) -> Iterator[str]:
    section = config.sandbox
    wrong = [*too_weak(section), *(problems(section.cgroup) if section.cgroup else ())]
    if section.memory_mb > (most := host_memory() >> 20):
        wrong.append(f"sandbox.memory_mb: expected at most {most}, this host's memory, found {section.memory_mb}")
    yield from wrong
    if not wrong and (key := used_by(config)):
        why = f"{key} runs code in the sandbox, which is refused here"
        yield from (f"sandbox.require: {why}: {each}" for each in missing(section))


def used_by(config: Config) -> str:
    """Return the key whose code uses the sandbox, as far as its module's text says. Empty: none."""
    named = [("environment.name", config.environment.name), ("task.agent", config.task.agent)]
    named += [(f"task.{key}", name) for key, name in rewards_of(config.task)]
    named += [("eval.sets", name) for name in rewards_of_sets(config)]
    return next((key for key, name in named if name == "code_tests" or _names_sandbox(name)), "")


def _names_sandbox(name: str) -> bool:
    module, colon, _ = name.partition(":")
    if not colon or module.startswith(ROOM):
        return bool(colon)
    for folder in sys.path:  # the file is read, not imported
        path = Path(folder, *module.split("."))
        for file in (path.with_suffix(".py"), path / "__init__.py"):
            if file.is_file():
                return ROOM in file.read_text(errors="replace")
    return False
