"""Environments that misbehave on order: the row selects how."""

import asyncio
import os
import re
import time
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from titan_rl.ext.agents.calc import MALFORMED, Calc
from titan_rl.ext.agents.episodes import Reply, Step
from titan_rl.ext.agents.hunt import Hunt

TURNS = 3


class Odd:
    """Three turns, then a reward of 1. row["do"] at row["turn"]: raise, leave, block, regex, exit, sleep, swallow."""

    async def reset(self, row: Mapping[str, Any]) -> str:
        self._row, self._turn = row, 0
        return "0"

    async def step(self, reply: Reply) -> Step:
        self._turn += 1
        if self._turn == self._row.get("turn", 1):
            await self._misbehave(str(self._row.get("do", "")), float(self._row.get("seconds", 0.0)))
        await asyncio.sleep(float(self._row.get("tool_seconds", 0.0)))
        done = self._turn == TURNS
        return Step(str(self._turn), float(done), done, {"steps": 1})

    async def _misbehave(self, do: str, seconds: float) -> None:
        if do == "raise":
            raise ValueError("bad action")
        if do == "leave":
            raise SystemExit(3)
        if do == "block":
            time.sleep(seconds)
        if do == "regex":
            re.match(r"(a+)+$", "a" * 64 + "b")  # holds the interpreter's lock for years
        if do == "exit":
            os._exit(7)
        if do == "sleep":
            await asyncio.sleep(seconds)
        if do == "swallow":
            until = time.monotonic() + seconds
            while time.monotonic() < until:
                try:
                    await asyncio.sleep(0.05)
                except asyncio.CancelledError:
                    continue


class Plain:
    """The same with plain functions, and the tuple."""

    def reset(self, row: Mapping[str, Any], prompt: str, seed: int) -> str:
        self._row, self._turn = row, 0
        return "0"

    def step(self, reply: Reply) -> tuple[str, float, bool, dict[str, Any]]:
        self._turn += 1
        if self._row.get("do") == "block" and self._turn == self._row.get("turn", 1):
            time.sleep(float(self._row["seconds"]))
        return str(self._turn), float(self._turn == TURNS), self._turn == TURNS, {"steps": 1}


class FallingHunt(Hunt):
    """Hunt, of which one board in four raises."""

    async def step(self, reply: Reply) -> Step:
        if self._board.hint() == "ul":
            raise RuntimeError("the board fell over")
        return await super().step(reply)


class Zeros(Calc):
    """Calc with a calculator that is broken."""

    async def step(self, reply: Reply) -> Step:
        found = await super().step(reply)
        return found if found.done or found.observation == MALFORMED else replace(found, observation="000000=")


falling_hunt, zeros = FallingHunt, Zeros  # names that survive a command line of Runs, which has no capitals
