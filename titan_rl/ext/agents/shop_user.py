"""Plays the customer and the judge of shop.py by rules, as a server that speaks OpenAI's API. A language model takes
its place by another URL.

    .venv/bin/python -m titan_rl.ext.agents.shop_user --port 8000
"""

import argparse
import re
from collections.abc import Sequence
from typing import Any

from aiohttp import web

from titan_rl.ext.agents.shop import BYE, JUDGE


def answer(messages: Sequence[dict[str, Any]]) -> str:
    """Return the customer's or the judge's answer to a conversation. It depends on nothing else."""
    first, last = str(messages[0]["content"]), str(messages[-1]["content"]).lower()
    if first.startswith(JUDGE):
        return "yes." if "agent: " in first and "done" in first else "no."
    if (known := re.search(r"you want to (.+?)\. facts.*?(order \d+)\. address (.+?)\.", first)) is None:
        return BYE
    wish, order, address = known.groups()
    if "done" in last:
        return BYE
    facts = [fact for asked, fact in (("order", order), ("address", address)) if asked in last]
    return f"{', '.join(facts) or f'i want to {wish}'}."


async def completions(request: web.Request) -> web.Response:
    message = {"role": "assistant", "content": answer((await request.json())["messages"])}
    return web.json_response({"choices": [{"index": 0, "message": message, "finish_reason": "stop"}]})


def served() -> web.Application:
    app = web.Application()
    app.router.add_post("/v1/chat/completions", completions)
    return app


def main() -> None:
    parser = argparse.ArgumentParser(description="Play shop.py's customer and judge by rules, as a server.")
    parser.add_argument("--port", type=int, default=8000)
    web.run_app(served(), host="127.0.0.1", port=parser.parse_args().port)


if __name__ == "__main__":
    main()
