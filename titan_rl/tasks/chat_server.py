"""Asks a model behind an OpenAI-compatible URL: POST URL/chat/completions.

The key goes to that URL alone: redirections are not followed, and no error shows it.
"""

import re
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from typing import Any

MOST_SHOWN = 200  # characters of a reply
MOST_REQUESTS = 100  # at the same time
CONNECT_SECONDS = 10.0
PASSING = (0, 408, 409, 425, 429)
"""Statuses that may be others a moment later, as those from 500 on. 0: no answer."""
BUSY = (429, 503)
"""Statuses whose Retry-After is when to ask again."""
WHOLE_SECONDS = re.compile(r"[0-9]+")


class Unanswered(ConnectionError):
    """A server did not answer, or with another status than 200."""

    def __init__(self, problem: str, status: int = 0, retry_after: str = "") -> None:
        super().__init__(problem)
        self.passing = status in PASSING or status >= 500
        self.wait_s = seconds_until(retry_after) if status in BUSY else None
        """Seconds after which the server wants to be asked again; None: it does not tell."""


def seconds_until(retry_after: str) -> float | None:
    """Return the seconds that a Retry-After asks for, as a number or until a date; None if it is neither."""
    text = retry_after.strip()
    if WHOLE_SECONDS.fullmatch(text):
        return float(text)
    try:
        date = parsedate_to_datetime(text)
        date = date if date.tzinfo else date.replace(tzinfo=UTC)
        return max(0.0, (date - datetime.now(UTC)).total_seconds())
    except (ValueError, TypeError, OverflowError):
        return None


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
                retry_after = reply.headers.get("Retry-After", "")
        except aiohttp.ClientError as error:
            raise Unanswered(f"{self.name} did not answer: {type(error).__name__}") from None
        if status != 200:
            raise Unanswered(f"{self.name} answered {status}: {self.shown(text)}", status, retry_after)
        return text

    def shown(self, text: str) -> str:
        """Return the beginning of a text that may hold the key, without the key."""
        return (text.replace(self._key, "***") if self._key else text)[:MOST_SHOWN]

    async def close(self) -> None:
        if self._session is not None:
            await self._session.close()
