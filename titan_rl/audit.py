"""`python -m titan_rl.audit RUN`: check that a run lost, repeated or reordered nothing, and that its files agree.

`--rewards RUN` looks for rewards that were won without the task instead: an audit with named samples, and no proof.

Exit codes: 0 no problem, or a report on rewards, 1 problems, which are printed, 2 bad usage.
"""

import sys
from collections.abc import Sequence
from pathlib import Path

from titan_rl.record.history import audit
from titan_rl.record.ledger import NAME
from titan_rl.record.live_copy import frozen
from titan_rl.record.reward_audit import ROLLOUTS, SUSPECT, reward_report

SHOWN = 20


def main(argv: Sequence[str]) -> int:
    if "--rewards" in argv:
        return audit_rewards([each for each in argv if each != "--rewards"])
    if len(argv) != 1 or not (Path(argv[0]) / NAME).exists():
        found = f'found "{argv[0]}"' if len(argv) == 1 else f"found {len(argv)} arguments"
        print(
            f"usage: python -m titan_rl.audit RUN: expected the folder of an RL run ({NAME} in it), {found}",
            file=sys.stderr,
        )
        return 2
    with frozen(Path(argv[0])) as (folder, note):
        problems, checked = audit(folder)
    if note:
        print(note)
    for problem in problems[:SHOWN]:
        print(problem)
    if problems:
        print(f"{len(problems)} problems" + (f", the first {SHOWN} shown" if len(problems) > SHOWN else ""))
        return 1
    print(f"nothing lost, nothing twice, nothing stale: {checked}")
    return 0


def audit_rewards(argv: Sequence[str]) -> int:
    """Print what the run's rewards were won by."""
    if len(argv) != 1 or not (Path(argv[0]) / ROLLOUTS).exists():
        found = f'found "{argv[0]}"' if len(argv) == 1 else f"found {len(argv)} arguments"
        expected = f"expected the folder of an RL run ({ROLLOUTS} in it)"
        print(f"usage: python -m titan_rl.audit --rewards RUN: {expected}, {found}", file=sys.stderr)
        return 2
    with frozen(Path(argv[0])) as (folder, note):
        lines = reward_report(folder)
    print("\n".join([*filter(None, [note]), *lines]))
    suspicions = sum(line.startswith(SUSPECT) for line in lines)
    count = f"{suspicions or 'no'} suspicion{'s' * (suspicions != 1)}"
    print(f"{count}; a suspicion is a reason to read the samples, no proof")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
