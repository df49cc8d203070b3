"""An agent that shows pictures to the policy by OpenAI's client: its row's, and others that it draws."""

import random
from base64 import b64encode
from typing import Any

from titan_rl.ext.agents.calc_agent import connections
from titan_rl.ext.vision.find_square import drawn

TURNS = 3


async def run(row: dict[str, Any], base_url: str, api_key: str) -> float:
    client = connections().with_options(base_url=base_url, api_key=api_key)
    chance, messages = random.Random(row["seed"]), list[Any]()
    right = 0.0
    names = row["image"] or [None]  # the row has the names of its images
    shown = names[0]
    for turn in range(TURNS):
        picture = [{"type": "image_url", "image_url": {"url": shown}}] if shown else []
        messages.append({"role": "user", "content": [*picture, {"type": "text", "text": "where?"}]})
        answer = await client.chat.completions.create(model="policy", messages=messages)
        text = answer.choices[0].message.content or ""
        messages.append({"role": "assistant", "content": text})
        right += len(text) % 7 / 7
        url = f"data:image/png;base64,{b64encode(drawn(1 + turn, chance)).decode()}"
        shown = url if chance.random() < 0.7 else None
    return right / TURNS
