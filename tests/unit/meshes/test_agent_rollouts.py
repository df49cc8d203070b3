"""Agents on the environment mesh: overlapping turns, dying processes, vanishing clients; on loops of this process."""

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from support.environment_meshes import Scripted, scripted
from support.fake_environments import fake_environments
from support.played import LIMITS, encoded
from titan_rl.wire.types import Completion, ImagePlace

pytestmark = pytest.mark.usefixtures("no_ranks", "ended_loops")

TURNS = 3


async def post(http: aiohttp.ClientSession, base_url: str, api_key: str, prompt: str) -> str:
    headers = {"Authorization": f"Bearer {api_key}"}
    async with http.post(f"{base_url}/completions", json={"prompt": prompt}, headers=headers) as response:
        return (await response.json())["choices"][0]["text"]


async def talker(row: dict[str, Any], base_url: str, api_key: str, prompt: str) -> dict[str, float]:
    """Ask row["at_once"] times in each turn, and continue the first answer."""
    text = prompt
    async with aiohttp.ClientSession() as http:
        for _ in range(TURNS):
            asked = [post(http, base_url, api_key, text) for _ in range(row.get("at_once", 1))]
            said = await asyncio.gather(*asked)
            text += f"{said[0]}+"
    return {"reward": 1.0, "length": len(text)}


async def hasty(base_url: str, api_key: str) -> float:
    """Give the first request up, and ask again."""
    async with aiohttp.ClientSession() as http:
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(post(http, base_url, api_key, "7="), 0.3)
        return float(await post(http, base_url, api_key, "7=") == "8")


class Counting(Scripted):
    """A session whose first turns wait until `together` of them are sampled at the same time."""

    together = most = 1
    now = cancelled = 0

    async def sample(
        self,
        tokens: Sequence[int],
        *,
        max_new_tokens: int | None = None,
        seat: str = "",
        images: Sequence[ImagePlace] = (),
    ) -> Completion:
        self.now += 1
        self.most = max(self.most, self.now)
        try:
            while self.most < self.together:
                await asyncio.sleep(0.01)
            return await super().sample(tokens, max_new_tokens=max_new_tokens)
        except asyncio.CancelledError:
            self.cancelled += 1
            self.together = 1  # the next one need not wait
            raise
        finally:
            self.now -= 1


def sessions(rows: list[dict[str, Any]], together: int = 1) -> list[Counting]:
    found = [Counting(each.prompt) for each in scripted(rows)]
    for each in found:
        each.together = together
    return found


async def test_turns_of_one_rollout_are_sampled_at_the_same_time(tmp_path: Path) -> None:
    mesh, _, _ = await fake_environments(f"{__name__}:talker", tmp_path, LIMITS, agent=True)
    (session,) = sessions([{"at_once": 2}], together=2)
    outcome = await mesh.drive(session)
    assert (outcome.status, outcome.reward, outcome.metrics["length"]) == ("completed", 1.0, 8.0)
    assert session.most == 2
    assert len(session.asked) == 2 * TURNS
    longest = max(session.asked, key=len)
    assert longest[len(session.prompt.tokens) :] == 2 * [*encoded("8"), 2, *encoded("+")]
    await mesh.close()


async def test_a_process_that_dies_costs_no_turn_of_an_agent(tmp_path: Path) -> None:
    mesh, ranks, _ = await fake_environments(f"{__name__}:talker", tmp_path, LIMITS, agent=True)
    driven_sessions = sessions([{}] * 4)
    driven = [asyncio.create_task(mesh.drive(each)) for each in driven_sessions]
    while not all(each.asked for each in driven_sessions):
        await asyncio.sleep(0.005)
    ranks[0].die()
    assert [outcome.reward for outcome in await asyncio.gather(*driven)] == [1.0] * 4
    assert [len(each.asked) for each in driven_sessions] == [TURNS] * 4
    await mesh.close()


async def test_a_request_that_its_client_gives_up_is_cancelled(tmp_path: Path) -> None:
    mesh, _, _ = await fake_environments(f"{__name__}:hasty", tmp_path, LIMITS, agent=True)
    (session,) = sessions([{}], together=3)
    outcome = await mesh.drive(session)
    assert (outcome.status, outcome.reward, outcome.metrics["requests"]) == ("completed", 1.0, 2.0)
    assert (session.cancelled, len(session.asked)) == (1, 1)
    await mesh.close()
