"""Programs of a test that need a process of their own."""

import json
from typing import Any

from support.forked_programs import output_of
from titan_rl.meshes.fork_servers import Kind


def told(kind: Kind, program: str, *arguments: object, given: str = "") -> Any:
    """Run a program in a process that has the imports of this kind of rank, and return what it prints as JSON after
    FOUND."""
    out = output_of(kind, program, *arguments, given=given)
    (line,) = (line for line in out.splitlines() if line.startswith("FOUND "))
    return json.loads(line.removeprefix("FOUND "))
