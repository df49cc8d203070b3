"""A server that speaks OpenAI's API, on a thread, and whose replies a test makes."""

import asyncio
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from aiohttp import web

Seen = list[dict[str, Any]]


@contextmanager
def answering(reply: Callable[[dict[str, Any]], Any]) -> Iterator[tuple[str, Seen]]:
    """Yield the server's URL, and the requests so far. `reply` makes a text, a message or a response of a request's
    body; None: there is no reply; False: the connection ends."""
    seen, over, loop = Seen(), asyncio.Event(), asyncio.new_event_loop()

    async def post(request: web.Request) -> web.StreamResponse:
        body = await request.json()
        seen.append({"body": body, "key": request.headers.get("Authorization")})
        found = reply(body)
        if isinstance(found, web.StreamResponse):
            return found
        if found is False and request.transport is not None:
            request.transport.close()
        if found is None:
            await over.wait()
        message = found if isinstance(found, dict) else {"role": "assistant", "content": found}
        return web.json_response({"choices": [{"message": message, "finish_reason": "stop"}]})

    async def listen() -> str:
        app = web.Application()
        app.router.add_post("/v1/chat/completions", post)
        runners.append(web.AppRunner(app, shutdown_timeout=0))
        await runners[0].setup()
        await web.TCPSite(runners[0], "127.0.0.1", 0).start()
        return f"http://127.0.0.1:{runners[0].addresses[0][1]}/v1"

    async def close() -> None:
        over.set()
        await runners[0].cleanup()

    runners: list[web.AppRunner] = []
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    try:
        yield asyncio.run_coroutine_threadsafe(listen(), loop).result(), seen
    finally:
        asyncio.run_coroutine_threadsafe(close(), loop).result()
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()
