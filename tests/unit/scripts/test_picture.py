"""Pictures of what a command printed."""

import subprocess
import sys
from pathlib import Path

from picture import without_middle
from rich.text import Text

SCRIPT = Path(__file__).parents[3] / "scripts/picture.py"


def test_steps_in_the_middle_and_progress_are_cut_out() -> None:
    steps = [f"   {n}/20  0.5" for n in range(1, 21)]
    lines = [Text(line) for line in ["plan", "  … cold start  1/2", "  ✓ cold start", *steps, "finished"]]
    shown = [line.plain for line in without_middle(lines)]
    assert shown == ["plan", "  ✓ cold start", *steps[:3], "    ...", *steps[-3:], "finished"]
    assert [line.plain for line in without_middle(lines[:5])] == ["plan", "  ✓ cold start", *steps[:2]]


def test_a_picture_shows_what_was_printed_and_a_failure_makes_none(tmp_path: Path) -> None:
    """The code is the command's."""
    picture = tmp_path / "a.svg"
    for code in (0, 3):
        picture.unlink(missing_ok=True)
        command = [sys.executable, "-c", f"print('\\x1b[31mhello'); raise SystemExit({code})"]
        done = subprocess.run([sys.executable, SCRIPT, picture, "--", *command], capture_output=True, text=True)
        assert (done.returncode, "hello" in done.stdout, picture.exists()) == (code, True, code == 0)
    done = subprocess.run([sys.executable, SCRIPT, picture, "--", *command[:2], "print('hello')"], check=True)
    assert "hello" in picture.read_text()
