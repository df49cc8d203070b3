"""Runs what the policy writes in the sandbox: in the environment's process, and in the reward's."""

import os
from collections.abc import Mapping
from typing import Any

from titan_rl.ext.sandbox.code_tests import examine
from titan_rl.ext.sandbox.code_tools import python
from titan_rl.ext.sandbox.local import shared

SPY = """
import os, socket
found = [path for path in ({folder!r}, {python!r}) if os.path.exists(path)]
found += [name for name in os.environ if name.startswith(("TITAN_RL", "HF", "REWARD", "MONARCH"))]
try: found.append(socket.socket(socket.AF_UNIX))
except OSError: pass
print(len(found))"""


class Coder:
    """Two turns: in the second, the policy reads the output of the code that it wrote in the first."""

    def reset(self) -> None:
        self._turns = 0

    async def step(self, reply: Any) -> tuple[str, float | None, bool, dict[str, float]]:
        self._turns += 1
        if self._turns == 1:
            digits = await python(f"print(sum(c.isdigit() for c in {reply.text!r}))")
            return digits.strip(), 0.0, False, {"digits": float(digits)}
        spied = await python(SPY.format(folder=os.getcwd(), python=__file__))
        limits = shared().limits
        return "", None, True, {"spied": float(spied), "wall_seconds": limits.wall_seconds}


def judged(completion: str, answer: str, row: Mapping[str, Any]) -> float:
    """Return the share of two tests that a program around the completion passes."""
    program = f"```python\ntext = {completion!r}\ndef digits(): return sum(c.isdigit() for c in text)\n```"
    found = examine(
        program, "", {"tests": [f"assert digits() == {sum(c.isdigit() for c in completion)}", "assert digits() > 2"]}
    )
    return found.passed / found.total
