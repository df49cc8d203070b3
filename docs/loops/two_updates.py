"""Two updates on one batch: the policy gradient, then an auxiliary loss that keeps right answers likely.

The second update is one step after the weights that sampled its tokens: rollout.max_staleness_steps allows it.

    python docs/loops/two_updates.py [CONFIG] [STEPS]
"""

import asyncio
import sys

import torch

import titan_rl


def likely(logprob: torch.Tensor, behaviour: torch.Tensor, advantage: torch.Tensor) -> torch.Tensor:
    """Hold right answers at least as likely as they were when they were sampled."""
    return (advantage > 0) * (behaviour - logprob).clamp(min=0)


async def main(config: str, steps: int) -> None:
    keys = {"training.steps": 2 * steps, "rollout.max_staleness_steps": 1}
    async with titan_rl.start(config, keys) as run:
        for step in range(1, steps + 1):
            groups = await run.judge(await run.sample(run.prompts(8)))
            policy = await run.train(groups)
            await run.train(groups, loss=likely)
            await run.sync()
            print(step, policy)
        print(await run.evaluate())


if __name__ == "__main__":
    config, steps = (*sys.argv[1:], *["grpo_smollm2", "40"][len(sys.argv) - 1 :])
    asyncio.run(main(config, int(steps)))
