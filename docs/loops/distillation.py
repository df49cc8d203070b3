"""On-policy distillation: the policy samples, and a teacher that reads a hint scores every token.

The config names the teacher, and the hint that it reads besides the prompt (algorithm.teacher_context).

    python docs/loops/distillation.py [CONFIG] [STEPS]
"""

import asyncio
import sys

import titan_rl


async def main(config: str, steps: int) -> None:
    async with titan_rl.start(config, {"training.steps": steps}) as run:
        for step in range(1, steps + 1):
            groups = await run.judge(await run.sample(run.prompts(8)))  # rewards are only watched
            stats = await run.train(groups)  # the teacher's log-probs are the advantages
            await run.sync()
            print(step, stats, f"teacher's gain {stats.metrics.get('distill/gain', 0):.3f}")
        print(await run.evaluate())


if __name__ == "__main__":
    config, steps = (*sys.argv[1:], *["opsd_calc_llama", "40"][len(sys.argv) - 1 :])
    asyncio.run(main(config, int(steps)))
