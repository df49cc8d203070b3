#!/usr/bin/env python3
"""Count phrases that make English need a second reading, per 1,000 lines of source, tests and docs.

    python scripts/words.py [--show N] [PATH ...]

Exits with 1 above LIMIT_PER_1000: scripts/check holds the count there. Other projects of the field have 0.2 to 0.5.
"""

import argparse
import re
import subprocess
import sys
from pathlib import Path

LIMIT_PER_1000 = 2.0
PHRASES = {
    "comment that finishes a name's grammar": r"#\s+of\s",
    "clause used as a noun": r"\bwhat (it|they|is|was|has|each|that|others|of|came)\b",
    "those that, that of": r"\bthose (that|which|of)\b|\bthat of\b",
    "of its own": r"\bof (its|their|a|one.s) own\b",
    "processes that hear, say, tell": r"\b(told|heard|hears|says)\b",
    "whatever, whoever, nobody": r"\b(whatever|whoever|nobody|no one)\b",
    "so many, as many": r"\b(so|as) many\b",
    "goes on, comes to": r"\b(goes|go|went) on\b|\bcomes? to\b",
    "household and biology": r"(?i)\b(zygotes?|berths?|bury|buried|unborn|nursery|keepers?|guests?|goodbye)\b",
}


def tracked(paths: list[str]) -> list[Path]:
    """Return the Python and Markdown files that git tracks under paths, without this one."""
    names = subprocess.run(
        ["git", "ls-files", "--", *paths], capture_output=True, text=True, check=True, cwd=ROOT
    ).stdout.splitlines()
    files = [ROOT / name for name in names if name.endswith((".py", ".md"))]
    return [file for file in files if file.is_file() and file != Path(__file__).resolve()]


ROOT = Path(__file__).resolve().parent.parent

if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("paths", nargs="*", default=["."])
    parser.add_argument("--show", type=int, default=0, metavar="N", help="print N lines of each phrase")
    options = parser.parse_args()
    lines = [
        (file.relative_to(ROOT), number, text)
        for file in tracked(options.paths)
        for number, text in enumerate(file.read_text(errors="replace").splitlines(), 1)
    ]
    hits = {name: [line for line in lines if re.search(pattern, line[2])] for name, pattern in PHRASES.items()}
    total = sum(map(len, hits.values()))
    rate = 1000 * total / max(len(lines), 1)
    print(f"{total} phrases in {len(lines)} lines: {rate:.1f} per 1,000 (at most {LIMIT_PER_1000:g})")
    for name, found in sorted(hits.items(), key=lambda item: -len(item[1])):
        if found and (options.show or rate > LIMIT_PER_1000):
            print(f"  {len(found):5d}  {name}: {PHRASES[name]}")
            for file, number, text in found[: options.show]:
                print(f"         {file}:{number}: {text.strip()[:120]}")
    sys.exit(rate > LIMIT_PER_1000)
