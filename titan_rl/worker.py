"""`python -m titan_rl worker`: offer this machine as a host, on which runs start ranks (titan_rl/ext/hosts)."""

import sys

from titan_rl.wire.parts import PartMissing, needed_part
from titan_rl.wire.program import USAGE, command_of, enter


def main() -> int:
    try:
        worker = needed_part("worker", command_of("worker"))
    except PartMissing as error:
        print(error, file=sys.stderr)
        return USAGE
    return worker(sys.argv[1:])


if __name__ == "__main__":
    enter(main)
