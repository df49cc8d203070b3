"""The whole controller drives 64 simulated generators, as scripts/bench_scale.py measures it."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).resolve().parents[2] / "scripts" / "bench_scale.py"
GENERATORS, TRAINERS, STEPS = 64, 8, 3
MOST = 16  # messages to a rank in a step: about 5, and more if the machine is so busy that timelines are asked for


@pytest.mark.parametrize("way", ["lag 1"])
def test_a_step_of_many_generators_takes_few_messages_to_each(way: str) -> None:
    command = [sys.executable, str(SCRIPT), "--one", "--ways", way, "--replicas", f"{GENERATORS}"]
    done = subprocess.run([*command, "--steps", f"{STEPS}"], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    *_, last = done.stdout.splitlines()
    found = json.loads(last)
    assert f"{STEPS}/{STEPS}" in done.stdout
    assert len(found["a step: CPU s"]) == STEPS - 1
    (messages,) = found["a step: messages"]
    assert GENERATORS + TRAINERS < messages < MOST * (GENERATORS + TRAINERS)
