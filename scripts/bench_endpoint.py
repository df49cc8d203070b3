#!/usr/bin/env python3
"""Measure what the endpoint adds to a turn: many agents at once over HTTP, against the same turns asked for directly.

    .venv/bin/python scripts/bench_endpoint.py                     # 64 rollouts of 4 turns, a policy that takes 0.8 s
    .venv/bin/python scripts/bench_endpoint.py --policy-seconds 0  # only the overhead

Both ways run in this process, in turns. The agents are aiohttp clients in the same process, so their CPU time counts
too: the measured figure is an upper bound.
"""

import argparse
import asyncio
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

import aiohttp

from bench.rows import BENCHMARKS, FIGURES, RAN_ON, Row, report
from titan_rl.ext.agents.agent_session import AgentSession
from titan_rl.ext.agents.conversation import ChatText, Delta
from titan_rl.ext.agents.episode_news import PROMPT, Contexts
from titan_rl.ext.agents.episodes import Limits
from titan_rl.ext.agents.openai_endpoint import OpenAIEndpoint
from titan_rl.ext.agents.play import Sampled
from titan_rl.text import tokenizer as characters
from titan_rl.text.tokenizer import TextTokenizer
from titan_rl.wire.types import Prompt

COLUMNS = ("variant", "measure", *FIGURES, *RAN_ON)
USER = {"role": "user", "content": "12+34="}


class Waiting:
    """A policy that answers `said` after a while."""

    def __init__(self, prompt: Prompt, seconds: float, said: list[int]) -> None:
        self._contexts, self._seconds, self._said, self._turns = Contexts(prompt.tokens), seconds, said, 0

    async def ask(self, delta: Delta, most: int | None, *, after: int | None = None, logprobs: bool = False) -> Sampled:
        line = self._contexts.open(PROMPT if after is None else after, *delta)
        await asyncio.sleep(self._seconds)
        self._contexts.close(line, turn := self._turns, self._said)
        self._turns += 1
        return Sampled(self._said, "stop", turn)


async def measure(options: argparse.Namespace, folder: Path) -> list[Row]:
    characters.build(folder)
    renderer = ChatText(TextTokenizer.load(folder))
    prompt = Prompt(0, USER["content"], renderer.chat.prompt([USER]) if renderer.chat else [], "")
    said = [*renderer.tokenizer.encode("answer " * (options.tokens // 7)), renderer.tokenizer.eos]
    endpoint = OpenAIEndpoint()
    await endpoint.listen()

    async def directly(_: aiohttp.ClientSession, number: int) -> None:
        policy, after, new = Waiting(prompt, options.policy_seconds, said), PROMPT, list[int]()
        length = len(prompt.tokens)
        for turn in range(options.turns):
            await policy.ask(Delta(length, new), None, after=after)
            length += len(new) + len(said)
            after, new = turn, renderer.tokenizer.encode("next")

    async def by_endpoint(http: aiohttp.ClientSession, number: int) -> None:
        limits = Limits(options.turns, 0, turn_seconds=60, rollout_seconds=600)
        session = AgentSession(prompt, renderer, limits, Waiting(prompt, options.policy_seconds, said).ask)
        messages: list[dict[str, Any]] = [USER]
        with endpoint.opened(str(number), {"": session}) as (url, key):
            for _ in range(options.turns):
                body, headers = {"model": "policy", "messages": messages}, {"Authorization": f"Bearer {key}"}
                async with http.post(f"{url}/chat/completions", json=body, headers=headers) as response:
                    answer = await response.json()
                messages += [answer["choices"][0]["message"], {"role": "user", "content": "next"}]
        assert session.metrics()["requests/continued"] == options.turns - 1

    walls: dict[str, list[float]] = {"direct": [], "endpoint": []}
    spent: dict[str, list[float]] = {"direct": [], "endpoint": []}
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as http:
        for _ in range(options.repeats):
            for name, way in (("direct", directly), ("endpoint", by_endpoint)):
                wall, cpu = time.perf_counter(), time.process_time()
                await asyncio.gather(*(way(http, number) for number in range(options.rollouts)))
                walls[name].append(time.perf_counter() - wall)
                spent[name].append(time.process_time() - cpu)
    await endpoint.close()
    turns = options.rollouts * options.turns
    variant = f"{options.rollouts} x {options.turns} turns of {len(said)} tokens, policy {options.policy_seconds:g} s"
    figures = {
        "direct, s": walls["direct"],
        "endpoint, s": walls["endpoint"],
        "endpoint / direct": [b / a for a, b in zip(walls["direct"], walls["endpoint"], strict=True)],
        "CPU per turn with client, ms": [1000 * seconds / turns for seconds in spent["endpoint"]],
    }
    print({name: round(median(values), 4) for name, values in figures.items()})
    return [Row("endpoint", variant, measure, values, way=variant) for measure, values in figures.items()]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rollouts", type=int, default=64)
    parser.add_argument("--turns", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--policy-seconds", type=float, default=0.8)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--csv", type=Path, default=BENCHMARKS / "endpoint.csv")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        report(options.csv, COLUMNS, asyncio.run(measure(options, Path(folder))))


if __name__ == "__main__":
    main()
