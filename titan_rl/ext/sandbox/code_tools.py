"""Tools that run the policy's code in the sandbox of its environment process.

class MyEnvironment:
    tools = [python, shell]

[environment]
name = "titan_rl.ext.sandbox.code_tools:CodeTools"      # both, and task.reward judges the last turn
"""

from titan_rl.ext.sandbox.execution import Execution
from titan_rl.ext.sandbox.local import shared
from titan_rl.wire.errors import SandboxRefused

SAYS = {
    "error": "exit code {0.exit_code}",
    "timeout": "out of time: {0.detail}",
    "memory": "out of memory: {0.detail}",
    "output": "too much output: {0.detail}; this is the beginning",
    "killed": "killed: {0.detail}",
}
SHOWN_CHARACTERS = 4000


async def python(code: str) -> str:
    """Run a Python program, and return its output. Every call starts from scratch.

    Args:
        code: The program. It has no network, and its files are gone afterwards.
    """
    return shown(await shared().run(code))


async def shell(script: str) -> str:
    """Run a shell script, and return its output. Every call starts from scratch.

    Args:
        script: The script, for /bin/sh. It has no network, and its files are gone afterwards.
    """
    return shown(await shared().run(script, language="shell"))


class CodeTools:
    """An environment of both tools, for environment.name. The rollout ends with a turn that calls none."""

    tools = (python, shell)

    def reset(self) -> None:
        """Show nothing but the prompt."""


def shown(found: Execution) -> str:
    """Return an execution as the policy reads it. Raise SandboxRefused if it was not run: that is no observation."""
    if found.status == "sandbox_failed":
        raise SandboxRefused(f"the sandbox failed: {found.detail}")
    text = f"{found.stdout}{found.stderr}"
    if len(text) > SHOWN_CHARACTERS:
        half = SHOWN_CHARACTERS // 2
        text = f"{text[:half]}\n[{len(text) - 2 * half} characters are left out]\n{text[-half:]}"
    return text + f"[{SAYS[found.status].format(found)}]" if found.status in SAYS else text
