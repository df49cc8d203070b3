"""GRPO as a loop of your own: the steps, losses and weights of `python -m titan_rl.run --config CONFIG`.

python docs/loops/grpo.py [CONFIG] [STEPS]
"""

import asyncio
import sys

import titan_rl


async def main(config: str, steps: int) -> None:
    async with titan_rl.start(config, {"training.steps": steps}, resume=True) as run:
        for step in range(run.step + 1, steps + 1):
            prompts = run.prompts(run.config.rollout.groups_per_step)
            groups = await run.sample(prompts)  # generators
            groups = await run.judge(groups)  # the task's rewards
            stats = await run.train(groups)  # reference, teacher and critic as the config has them; trainers
            await run.sync()  # trainers to generators
            print(step, stats)
            if step % 10 == 0 or step == steps:
                print(step, await run.evaluate())
                await run.save()
        await run.export()


if __name__ == "__main__":
    config, steps = (*sys.argv[1:], *["grpo_smollm2", "40"][len(sys.argv) - 1 :])
    asyncio.run(main(config, int(steps)))
