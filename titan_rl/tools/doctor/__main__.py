"""`python -m titan_rl doctor`: one screen about this machine and its install; `--json` for a bug report.

Exit codes: 0 a run on the CPU would work, 1 something that a run needs is missing, 2 bad usage.
"""

import argparse
import sys


def main() -> int:
    if not 0x030B0000 <= sys.hexversion < 0x030E0000:  # the modules below cannot be imported in an older one
        found = f"{sys.version_info[0]}.{sys.version_info[1]}"
        print(f"titan_rl doctor: expected Python 3.11 to 3.13, found {found}. Call another one, like .venv/bin/python")
        return 1
    from titan_rl.wire.program import command_of, outlive_readers

    outlive_readers()
    parser = argparse.ArgumentParser(prog=command_of("doctor"), description="Check this machine and its install.")
    parser.add_argument("--json", action="store_true", help="print everything as JSON, for a bug report")
    options = parser.parse_args()

    from titan_rl.tools.doctor.machine_facts import gather_facts
    from titan_rl.tools.doctor.report_lines import as_json, print_screen
    from titan_rl.tools.doctor.verdicts import find_problems

    facts = gather_facts()
    problems = find_problems(facts)
    if options.json:
        print(as_json(facts, problems))
    else:
        print_screen(facts, problems)
    return int(any(problem.level == "error" for problem in problems))


if __name__ == "__main__":
    sys.exit(main())
