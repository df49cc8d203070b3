"""Off-policy: groups of earlier steps are trained on again, and generators sample while the trainers work.

python docs/loops/replay_buffer.py [CONFIG] [STEPS]
"""

import asyncio
import random
import sys

import titan_rl

AGE = 4  # steps after which a group is too old


async def main(config: str, steps: int) -> None:
    keys = {"training.steps": steps, "rollout.max_staleness_steps": AGE}
    async with titan_rl.start(config, keys) as run:
        order, buffer = random.Random(run.config.debug.seed), list[titan_rl.Group]()
        sampling = asyncio.create_task(run.sample(run.prompts(4)))
        for step in range(1, steps + 1):
            fresh = await run.judge(await sampling)
            sampling = asyncio.create_task(run.sample(run.prompts(4)))  # while the trainers make this step
            buffer = [group for group in buffer if group.version >= run.step - AGE]
            earlier = order.sample(buffer, min(4, len(buffer)))
            stats = await run.train([*fresh, *earlier])
            buffer += [group for group in fresh if not group.flat]
            await run.sync()
            run.log(buffer=len(buffer))
            print(step, f"{len(earlier)} groups again,", stats)
        await sampling
        print(await run.evaluate())


if __name__ == "__main__":
    config, steps = (*sys.argv[1:], *["grpo_smollm2", "40"][len(sys.argv) - 1 :])
    asyncio.run(main(config, int(steps)))
