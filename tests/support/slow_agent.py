"""An agent that thinks between its turns, so that any fault hits its process in mid-rollout."""

import asyncio
from typing import Any

from openai import AsyncOpenAI

THINKS = 0.3  # seconds


async def run(row: dict[str, Any], base_url: str, api_key: str) -> float:
    """Ask twice. The reward is the share of digits in the last answer."""
    messages: list[Any] = [{"role": "user", "content": f"{row['a']}*{row['b']}="}]
    said = ""
    async with AsyncOpenAI(base_url=base_url, api_key=api_key, timeout=600.0) as client:
        for _ in range(2):
            await asyncio.sleep(THINKS)
            answer = await client.chat.completions.create(model="policy", messages=messages)
            said = answer.choices[0].message.content or ""
            messages += [{"role": "assistant", "content": said}, {"role": "user", "content": "?"}]
    return sum(letter.isdigit() for letter in said) / max(1, len(said))
