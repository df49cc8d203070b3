"""An agent that solves calc's problems with its own calculator. It knows nothing of titan_rl: it has a URL and a
key of a server that speaks OpenAI's API, and the `openai` package. `task.agent` trains it as it is.

    user 347*862=    assistant ?347*862    user 299114=    assistant 299114
"""

from functools import cache
from typing import Any

from openai import AsyncOpenAI

TURNS = 3
SECONDS = 600.0  # also to connect: the package's 5 s are too few for 128 rollouts on a busy core


@cache
def connections() -> AsyncOpenAI:
    """Return the client that all rollouts of this process share: one for each would take 20 ms of CPU time."""
    return AsyncOpenAI(base_url="unused", api_key="unused", timeout=SECONDS, max_retries=0)


async def run(row: dict[str, Any], base_url: str, api_key: str) -> dict[str, float]:
    client = connections().with_options(base_url=base_url, api_key=api_key)
    product, calls = f"{row['a'] * row['b']:06d}", 0
    messages: list[Any] = [{"role": "user", "content": f"{row['a']}*{row['b']}="}]
    for _ in range(TURNS):
        response = await client.chat.completions.create(model="policy", messages=messages)
        choice = response.choices[0]
        text = choice.message.content or ""
        if choice.finish_reason != "stop" or not text.startswith("?"):
            right = choice.finish_reason == "stop" and text == product
            return {"reward": float(right), "calls": calls}
        calls += 1
        messages += [{"role": "assistant", "content": text}, {"role": "user", "content": multiply(text[1:])}]
    return {"reward": 0.0, "calls": calls}


def multiply(expression: str) -> str:
    """Return the product of "a*b" as "c="; "x=" for anything else."""
    a, _, b = expression.partition("*")
    readable = a.isdecimal() and b.isdecimal() and max(len(a), len(b)) <= 3
    return f"{int(a) * int(b):06d}=" if readable else "x="
