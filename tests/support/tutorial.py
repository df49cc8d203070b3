"""docs/quickstart.md as a reader follows it: its files, and its commands in their order."""

import re
from pathlib import Path

PAGE = Path(__file__).parents[2] / "docs/quickstart.md"
FENCE = re.compile(r"(?:\*\*`([\w.]+)`\*\*\n\n)?```(\w*)\n(.*?)```", re.DOTALL)


def write_files(folder: Path) -> None:
    for name, _, text in FENCE.findall(PAGE.read_text(encoding="utf-8")):
        if name:
            (folder / name).write_text(text, encoding="utf-8")


def commands() -> list[str]:
    """Return the lines of the tutorial's shell blocks. Those of the install section are marked `sh`, not `bash`."""
    fences = FENCE.findall(PAGE.read_text(encoding="utf-8"))
    return [line for _, language, text in fences if language == "bash" for line in text.splitlines()]
