"""The program that a user starts, before it starts anything itself."""

import os
import subprocess
import sys

POLL = "HYPERACTOR_MESH_SUPERVISION_POLL_FREQUENCY"


def test_importing_the_command_line_imports_neither_monarch_nor_torch() -> None:
    """Monarch reads its environment as it is imported, and `run` sets that from the config: fault.detect_seconds."""
    program = (
        "import sys, titan_rl.run; print(*sorted({'monarch', 'torch', 'torchtitan', 'vllm'} & sys.modules.keys()))"
    )
    found = subprocess.run([sys.executable, "-c", program], check=True, capture_output=True, text=True).stdout.split()
    assert found == []


def test_the_configs_detect_seconds_reaches_monarch() -> None:
    program = (
        "import os, sys, titan_rl.run as run; assert 'monarch' not in sys.modules; run.prepare_environment(0.5); "
        f"import monarch.actor; print(os.environ['{POLL}'])"
    )
    env = {name: value for name, value in os.environ.items() if name != POLL}  # conftest.py sets it for the tests
    out = subprocess.run([sys.executable, "-c", program], check=True, capture_output=True, text=True, env=env).stdout
    assert out.split() == ["250ms"]
