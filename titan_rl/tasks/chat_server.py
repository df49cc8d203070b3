"""Asks a model behind an OpenAI-compatible URL: POST URL/chat/completions.

The key goes to that URL alone: redirections are not followed, and no error shows it.
"""

from collections.abc import Mapping, Sequence
from typing import Any

MOST_SHOWN = 200  # characters of a reply
MOST_REQUESTS = 100  # at the same time
CONNECT_SECONDS = 10.0
PASSING = (0, 408, 409, 425, 429)
"""Statuses that may be others a moment later, as those from 500 on. 0: no answer."""


class Unanswered(ConnectionError):
    """A server did not answer, or with another status than 200."""

    def __init__(self, problem: str, status: int = 0) -> None:
        super().__init__(problem)
        self.passing = status in PASSING or status >= 500


class ChatServer:
    def __init__(self, who: str, url: str, model: str, key: str = "", requests: int = MOST_REQUESTS) -> None:
        """`who` names the model in errors. `requests` at the same time, at most; 0: any number. The caller has a
        deadline."""
        self.name = f"the {who} at {url}"
        self._url, self._model, self._key, self._requests = url, model, key, requests
        self._session: Any = None

    async def ask(self, messages: Sequence[Mapping[str, Any]], **settings: Any) -> str:
        """Return the body of the reply. Raise Unanswered if there is none."""
        import aiohttp  # 0.3 s

        if self._session is None:
            timeout = aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_SECONDS)
            self._session = aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=self._requests), timeout=timeout)
        body = {"model": self._model, "messages": list(messages), **settings}
        headers = {"Authorization": f"Bearer {self._key}"} if self._key else {}
        try:
            async with self._session.post(
                f"{self._url}/chat/completions", json=body, headers=headers, allow_redirects=False
            ) as reply:
                text, status = await reply.text(errors="replace"), reply.status
        except aiohttp.ClientError as error:
            raise Unanswered(f"{self.name} did not answer: {type(error).__name__}") from None
        if status != 200:
            raise Unanswered(f"{self.name} answered {status}: {self.shown(text)}", status)
        return text

    def shown(self, text: str) -> str:
        """Return the beginning of a text that may hold the key, without the key."""
        return (text.replace(self._key, "***") if self._key else text)[:MOST_SHOWN]

    async def close(self) -> None:
        if self._session is not None:
            await self._session.close()
