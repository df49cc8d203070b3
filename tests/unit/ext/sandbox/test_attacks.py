"""Hostile programs, each contained by the whole sandbox. What a single layer contains: test_layers.py."""

import os
import time
from collections.abc import Iterator

import pytest

from support.attacks import ATTACKS, BOMBS, Target, target
from titan_rl.ext.sandbox.execution import ExecutionLimits
from titan_rl.ext.sandbox.local import LocalSandbox

LIMITS = ExecutionLimits(
    cpu_seconds=1, wall_seconds=30, memory_mb=256, processes=14, file_mb=16, disk_mb=32, output_kb=64
)
HANGING = {"fork bomb", "busy loop", "sleep, with every signal ignored", "a loop in C", "close stdout, fork and hang"}
HANGING_SECONDS = 1.5
DEADLINE = 60.0  # for any attack, on a busy machine


@pytest.fixture(scope="module")
def aim(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Target]:
    with target(tmp_path_factory.mktemp("aim")) as found:
        yield found


@pytest.fixture(scope="module")
def sandbox(aim: Target) -> Iterator[LocalSandbox]:
    """A sandbox whose host has secrets in its environment and a descriptor that children inherit."""
    with pytest.MonkeyPatch.context() as patch, open(aim.secret) as inherited:
        patch.setenv("TITAN_RL_TEST_SECRET", "SECRET")
        os.set_inheritable(inherited.fileno(), True)
        sandbox = LocalSandbox(limits=LIMITS, workers=1)
        sandbox.run_here("")
        yield sandbox
        sandbox.close()


@pytest.mark.parametrize("name", ATTACKS)
def test_an_attack_gets_nothing(name: str, aim: Target, sandbox: LocalSandbox) -> None:
    found = sandbox.run_here(aim.fill(ATTACKS[name]), stdin="in")
    assert "ESCAPED" not in found.stdout, found
    assert found.status in ("ok", "error", "killed"), found
    assert not aim.harmed()


@pytest.mark.parametrize("name", BOMBS)
def test_a_bomb_ends_with_its_execution(name: str, aim: Target, sandbox: LocalSandbox) -> None:
    code, endings = BOMBS[name]
    limits = sandbox.limits
    if name in HANGING:
        limits = type(limits)(**{**{key: getattr(limits, key) for key in limits.__slots__}, "wall_seconds": 1.5})
    began = time.monotonic()
    found = sandbox.run_here(aim.fill(code), limits=limits)
    assert found.status in endings, found
    assert "ESCAPED" not in found.stdout
    assert time.monotonic() - began < DEADLINE
    assert len(found.stdout) + len(found.stderr) <= 4 * (64 << 10)
    after = sandbox.run_here("import os; print(sorted(os.listdir('..')), len(os.listdir('.')))")
    assert after.stdout == "['work'] 0\n", after  # nothing is left for the next one
    assert not aim.harmed()
