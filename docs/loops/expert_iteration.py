"""Expert iteration: sample n answers to a prompt, keep the best one if it is right, and learn it by heart.

python docs/loops/expert_iteration.py [CONFIG] [STEPS]
"""

import asyncio
import math
import sys

import numpy as np
import torch

import titan_rl


def imitate(logprob: torch.Tensor) -> torch.Tensor:
    """Cross-entropy: the log-prob of each token is to rise."""
    return -logprob


def best_only(group: titan_rl.Group) -> titan_rl.Group:
    """Return the group with a reward for its shortest right answer only: nothing is learned from the others."""
    right = [k for k, rollout in enumerate(group.rollouts) if rollout.reward >= 1]
    best = min(right, key=lambda k: len(group.rollouts[k].text), default=-1)
    return group.with_rewards([1.0 if k == best else math.nan for k in range(len(group.rollouts))])


async def main(config: str, steps: int) -> None:
    async with titan_rl.start(config, {"training.steps": steps}) as run:
        for step in range(1, steps + 1):
            kept: list[titan_rl.Group] = []
            while not kept:
                groups = await run.judge(await run.sample(run.prompts(8), n=8))
                kept = [best for best in map(best_only, groups) if not all(map(math.isnan, best.rewards))]
            stats = await run.train(kept, advantage=np.ones_like, loss=imitate)
            await run.sync()
            print(step, f"{len(kept)} of 8 prompts solved,", stats)
        print(await run.evaluate())


if __name__ == "__main__":
    config, steps = (*sys.argv[1:], *["grpo_smollm2", "40"][len(sys.argv) - 1 :])
    asyncio.run(main(config, int(steps)))
