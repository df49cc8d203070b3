"""`python -m titan_rl audit RUN`: check that a run lost, repeated or reordered nothing, and that its files agree.

`--rewards RUN` reports rewards that may have been won without solving the task, with samples to read.

Exit codes: 0 no problem, or a report on rewards, 1 problems, which are printed, 2 bad usage, 130 stopped.
"""

import argparse
import sys
from collections.abc import Sequence

from titan_rl.record.run_names import LEDGER, ROLLOUTS
from titan_rl.tools.inspect.audit_rules import RULES, audit
from titan_rl.tools.inspect.live_copy import frozen
from titan_rl.tools.inspect.reward_audit import SUSPECT, reward_report
from titan_rl.tools.inspect.run_files import RunFiles
from titan_rl.wire.counted import counted
from titan_rl.wire.program import DONE, FAILED, USAGE, command_of, enter, path_argument

SHOWN = 20


def main(argv: Sequence[str]) -> int:
    options = parser().parse_args(argv)
    needed = ROLLOUTS if options.rewards else LEDGER
    run = RunFiles(options.run)
    if not (run / needed).exists():
        expected = f"expected the dump folder of an RL run, with its {needed}"
        print(f"titan_rl audit: RUN: {expected}, {run.absence}", file=sys.stderr)
        return USAGE
    return audit_rewards(run) if options.rewards else audit_ledger(run, options.all_bytes)


def parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog=command_of("audit"),
        description="Check that a run lost, repeated or reordered no prompt, and that its ledger, rollouts, metrics "
        "and checkpoints agree. Nothing is changed, and the run may be active.",
        epilog=f"Rules: {' '.join(str(rule.__doc__) for rule in RULES)} "
        "Exit codes: 0 no problem, or a report on rewards; 1 problems, which are printed; 2 bad usage. "
        "docs/operations.md lists the comparisons, docs/data.md explains --rewards.",
        allow_abbrev=False,
    )
    parser.add_argument("run", metavar="RUN", type=path_argument, help="dump folder of the run")
    rewards = "instead, report rewards that may have been won without solving the task, with samples to read"
    parser.add_argument("--rewards", action="store_true", help=rewards)
    parser.add_argument(
        "--all-bytes", action="store_true", help="read all checkpoints; by default the newest one, and sizes of others"
    )
    return parser


def audit_ledger(run: RunFiles, all_bytes: bool) -> int:
    """Print that the run's files agree, or their problems."""
    with frozen(run) as (files, note):
        problems, checked = audit(files.folder, active=bool(note), all_bytes=all_bytes)
    if note:
        print(note)
    for problem in problems[:SHOWN]:
        print(problem)
    if problems:
        print(counted(len(problems), "problem") + (f", the first {SHOWN} shown" if len(problems) > SHOWN else ""))
        return FAILED
    print(f"nothing lost, nothing twice, nothing stale: {checked}")
    return DONE


def audit_rewards(run: RunFiles) -> int:
    """Print the report on the run's rewards."""
    begin = run.reward_cut()
    with frozen(run) as (files, note):
        lines = reward_report(files, after=begin)
    if begin:
        print(f"only the steps after step {begin} are compared: the reward was another one up to there")
    print("\n".join([*filter(None, [note]), *lines]))
    suspicions = sum(line.startswith(SUSPECT) for line in lines)
    count = f"{suspicions or 'no'} suspicion{'s' * (suspicions != 1)}"
    print(f"{count}; a suspicion is a reason to read the samples, no proof")
    return DONE


if __name__ == "__main__":
    enter(lambda: main(sys.argv[1:]))
