"""Without Monarch, a rank's own work can be imported: its trainer, its side of a weight sync, and the kernels."""

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[3]
PROGRAM = """
import sys
from importlib import import_module
sys.modules["monarch"] = None  # as if it were not installed
for name in sys.argv[1:]:
    import_module(name)
print(*sorted(name for name in sys.modules if name.startswith("monarch.")))
"""


def test_a_ranks_own_work_is_imported_without_monarch() -> None:
    folders = ("kernels", "actors/sync", "actors/titan")
    paths = [
        path.relative_to(ROOT).with_suffix("") for folder in folders for path in sorted((ROOT / folder).glob("*.py"))
    ]
    names = [f"titan_rl.{'.'.join(path.parts)}" for path in paths if path.name != "__init__"]
    done = subprocess.run([sys.executable, "-c", PROGRAM, *names], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout.strip()) == (0, ""), done.stderr
    assert {"titan_rl.actors.sync.landing", "titan_rl.actors.titan.role_model"} <= set(names)
