"""An agent that knows nothing of this project: all it has is the openai package, a URL and a key."""

from typing import Any

from openai import AsyncOpenAI


async def run(row: dict[str, Any], base_url: str, api_key: str, prompt: str) -> dict[str, float]:
    """Ask for a product twice. The reward is the share of digits in the first answer."""
    async with AsyncOpenAI(base_url=base_url, api_key=api_key) as client:
        first = await client.chat.completions.create(model="policy", messages=[{"role": "user", "content": prompt}])
        said = first.choices[0].message.content or ""
        second = await client.chat.completions.create(
            model="policy",
            messages=[
                {"role": "user", "content": prompt},
                {"role": "assistant", "content": said},
                {"role": "user", "content": f"{row['a']}?"},
            ],
            max_tokens=4,
        )
    read = second.usage.prompt_tokens if second.usage else 0
    return {"reward": sum(letter.isdigit() for letter in said) / max(1, len(said)), "last_read": read}
