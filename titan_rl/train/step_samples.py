"""A step's samples: what its groups become before the trainers get them.

    step n      update ............................................ sync
    step n + 1        its groups finish, become samples and batches       update

With a lag, the next step's groups often finish while the trainers step. What they become is made then, if it depends on
nothing that is still to come, so that the trainers do not wait for it.
"""

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import suppress

from titan_rl.batch.experience import samples_of, with_advantages
from titan_rl.config.sections import Config
from titan_rl.rollout.stream import RolloutStream
from titan_rl.train.learner import Learner, same
from titan_rl.wire.errors import RunError
from titan_rl.wire.reports import StepStats
from titan_rl.wire.types import Group, Sample

SENT_SECONDS = 0.02  # the update's own batches leave first


class StepSamples:
    def __init__(self, config: Config, learner: Learner, stream: RolloutStream) -> None:
        self._config, self._learner, self._stream = config, learner, stream
        self._made: tuple[list[Group], tuple[list[Group], list[Sample]]] | None = None  # for which groups, and what
        waits = config.training.stream_groups or learner.columns
        self._ahead = config.rollout.lag > 0 and not waits

    async def of(self, step: int, groups: list[Group], before: int = 0) -> tuple[list[Group], list[Sample]]:
        """Return the groups, and their samples with the columns of every role and with advantages. `before` counts the
        step's samples that were made already."""
        made, self._made = self._made, None
        if made is not None and same(made[0], groups):
            return made[1]
        samples = samples_of(groups, self._config.algorithm)
        return with_advantages(groups, await self._learner.judge(samples), self._config.algorithm)

    async def beside(self, update: Callable[[], Awaitable[StepStats]]) -> StepStats:
        """Make an update, and meanwhile the samples and batches of the step after it, if its groups finish in time."""
        if not self._ahead:
            return await update()
        ahead = asyncio.create_task(self._make_ahead())
        try:
            return await update()
        finally:
            ahead.cancel()
            await asyncio.wait({ahead})

    async def _make_ahead(self) -> None:
        await asyncio.sleep(SENT_SECONDS)
        if not (groups := await self._stream.coming(self._config.rollout.groups_per_step)):
            return
        with suppress(RunError):  # the step itself meets it again
            samples = samples_of(groups, self._config.algorithm)
            await asyncio.sleep(0)  # answers of generators and trainers wait at most for one of the three
            made = with_advantages(groups, samples, self._config.algorithm)
            await asyncio.sleep(0)
            self._learner.prepare(made[1])
            self._made = groups, made
