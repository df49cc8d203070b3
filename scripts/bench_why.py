#!/usr/bin/env python
"""Scores `python -m titan_rl why` on runs that a seed draws: sick ones of 23 causes, and healthy ones.

    scripts/bench_why.py --seeds 10000 10400 --healthy 20000 20400

The runs are drawn by tests/support/sick_runs.py: cause, magnitude, scale of the rewards, length and noise are random.
"""

import argparse
import sys
from collections import Counter
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from support.sick_runs import score


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs=2, default=(0, 300), metavar=("FIRST", "END"), help="of sick runs")
    parser.add_argument(
        "--healthy", type=int, nargs=2, default=(0, 300), metavar=("FIRST", "END"), help="of healthy ones"
    )
    parser.add_argument("--missed", action="store_true", help="print the findings of each run that is not named")
    options = parser.parse_args()
    result = score(range(*options.seeds), range(*options.healthy))
    print(result.text)
    causes = Counter(each.rpartition(":")[0].split(": ")[0].rsplit(" ", 1)[0] for each in result.missed)
    if causes:
        print("not named, or suspected:", ", ".join(f"{cause} {count}" for cause, count in causes.most_common()))
    if options.missed:
        print(*result.missed, sep="\n")


if __name__ == "__main__":
    main()
