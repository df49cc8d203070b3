"""Evaluation only: the scores of a config's model, and some of its answers.

python docs/loops/evaluate.py [CONFIG]
"""

import asyncio
import sys

import titan_rl


async def main(config: str) -> None:
    async with titan_rl.start(config) as run:
        for name, value in (await run.evaluate()).items():
            print(f"{name:24} {value:.3f}")
        for group in await run.judge(await run.sample(run.prompts(3), n=4)):
            print(group)


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:2] or ["grpo_smollm2"]))
