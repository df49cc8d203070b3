"""Products of two three-digit numbers, with a calculator: a direct answer is hardly ever right, so the tool is needed.

347*862=   ->  ?347*862   ->   299114=   ->   299114
prompt         call            its result     answer
"""

from collections.abc import Mapping
from typing import Any

import numpy as np

from titan_rl.ext.agents.episodes import Reply, Step
from titan_rl.ext.agents.tools import Toolbox, ToolCall, ToolFailed

SMALLEST, BEYOND = 100, 1000  # factors
COUNT = (BEYOND - SMALLEST) ** 2
LONGEST = 24  # "?347*862", "299114=", "299114" and two ends of turns
CALL, MALFORMED = "?", "x="
TOOL_SHARE = 0.3  # share of demonstrations that call the calculator


def multiply(a: int, b: int) -> str:
    """Multiply two numbers below 1000.

    Args:
        a: The first factor.
        b: The second factor.
    """
    if not (0 <= a < BEYOND and 0 <= b < BEYOND):
        raise ValueError(f"expected factors from 0 to {BEYOND - 1}, found {a} and {b}")
    return product(a, b)


def product(a: int, b: int) -> str:
    return f"{a * b:06d}"


def row(number: int) -> dict[str, Any]:
    a, b = divmod(number, BEYOND - SMALLEST)
    return {"a": SMALLEST + a, "b": SMALLEST + b}


def prompt(row: Mapping[str, Any]) -> str:
    return f"{row['a']}*{row['b']}="


def answer(row: Mapping[str, Any]) -> str:
    return product(row["a"], row["b"])


def demonstration(row: Mapping[str, Any], seed: int) -> list[tuple[str, str]]:
    """Return (the policy's text, the text that it reads next) by turn. A share calls the calculator, the others only
    give the answer. So a policy that imitates them knows both formats, and has to find out which one is rewarded."""
    calls = np.random.PCG64(seed).random_raw() / 2**64 < TOOL_SHARE
    result = answer(row)
    return [*([(f"{CALL}{row['a']}*{row['b']}", f"{result}=")] if calls else []), (result, "")]


class Calc:
    tools = ()  # a call is written as "?a*b", which step reads

    def __init__(self) -> None:
        self._calculator = Toolbox([multiply])

    async def reset(self, row: Mapping[str, Any]) -> str:
        self._answer = answer(row)
        return ""

    async def step(self, reply: Reply) -> Step:
        if reply.finish == "stop" and reply.text.startswith(CALL):
            counts = {"calls": 1}
            a, star, b = reply.text[1:].partition("*")
            if not (star and a.isdecimal() and b.isdecimal()):
                return Step(MALFORMED, info=counts | {"malformed": 1})
            try:
                result = await self._calculator.result(ToolCall("multiply", {"a": int(a), "b": int(b)}))
            except ToolFailed:
                return Step(MALFORMED, info=counts | {"malformed": 1})
            return Step(f"{result}=", info=counts)
        return Step(reward=float(reply.finish == "stop" and reply.text == self._answer), done=True)
