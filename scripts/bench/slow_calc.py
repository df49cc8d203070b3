"""The environment "calc" with a tool that takes a while."""

import asyncio

from titan_rl.ext.agents.calc import Calc
from titan_rl.ext.agents.episodes import Reply, Step


class SlowCalc(Calc):
    def __init__(self, seconds: float) -> None:
        super().__init__()
        self._seconds = seconds

    async def step(self, reply: Reply) -> Step:
        await asyncio.sleep(self._seconds)
        return await super().step(reply)
