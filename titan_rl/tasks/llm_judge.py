"""A model as judge, behind any OpenAI-compatible URL.

    prompt, reference, answer ──> judge_prompt ──> POST judge_url/chat/completions ──> the last number in 0..judge_scale

The key is read from the environment and sent to that URL; no file and no message has it. If the judge does not
answer, refuses, or replies without a number, the answer has no reward, and the error is named.
"""

import json
import os
from collections.abc import Callable, Mapping
from typing import Any

from titan_rl.tasks.rewards import Answered, last_number_of
from titan_rl.wire.types import Prompt

ARGUMENTS = ("judge_url", "judge_model", "judge_key", "judge_prompt", "judge_scale", "judge_tokens")
PROMPT = """You grade answers. Compare the answer with the reference.

Question:
{prompt}

Reference:
{reference}

Answer:
{answer}

Reply with one number from 0 (wrong) to {scale} (right), and nothing else."""
FIELDS = ("prompt", "reference", "answer", "scale")
MOST_SHOWN = 200  # characters of a reply


class LlmJudge:
    """Asks the judge about one answer. Its reward is the number in the reply, divided by judge_scale."""

    def __init__(self, arguments: Mapping[str, Any], argument: Callable[..., Any]) -> None:
        self._url = argument(arguments, "judge_url", str).rstrip("/")
        self._model = argument(arguments, "judge_model", str)
        self._variable = argument(arguments, "judge_key", str, "OPENAI_API_KEY")
        self._prompt = argument(arguments, "judge_prompt", str, PROMPT)
        self._scale = argument(arguments, "judge_scale", int, 10)
        self._tokens = argument(arguments, "judge_tokens", int, 512)
        if not self._url.startswith(("http://", "https://")):
            raise ValueError(
                f"task.reward_args: expected judge_url to be a URL such as http://HOST/v1, found {self._url!r}"
            )
        if "judge_key" in arguments and not os.environ.get(self._variable):
            raise ValueError(
                f"task.reward_args: expected the environment to have judge_key = {self._variable!r}, found none"
            )
        if min(self._scale, self._tokens) < 1:
            raise ValueError("task.reward_args: expected judge_scale and judge_tokens of at least 1")
        if "{answer}" not in self._prompt:
            raise ValueError("task.reward_args: expected {answer} in judge_prompt, found none")
        self._session: Any = None

    async def __call__(self, prompt: Prompt, answer: Answered) -> float:
        import aiohttp

        key = os.environ.get(self._variable, "")
        if self._session is None:
            self._session = aiohttp.ClientSession()
        asked = self._prompt
        for name, text in zip(FIELDS, (prompt.text, prompt.answer, answer.text, str(self._scale)), strict=True):
            asked = asked.replace(f"{{{name}}}", text.replace("{", "{\0"))  # no text can name a later field
        body = {
            "model": self._model,
            "messages": [{"role": "user", "content": asked.replace("{\0", "{")}],
            "temperature": 0,
            "max_tokens": self._tokens,
        }
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        try:
            async with self._session.post(f"{self._url}/chat/completions", json=body, headers=headers) as reply:
                body_text = await reply.text()
                status = reply.status
        except aiohttp.ClientError as error:
            raise ConnectionError(f"the judge at {self._url} did not answer: {type(error).__name__}") from None
        if status != 200:
            raise ConnectionError(f"the judge at {self._url} answered {status}: {_without(key, body_text)}")
        return self._read(key, body_text)

    def _read(self, key: str, body: str) -> float:
        try:
            text = json.loads(body)["choices"][0]["message"]["content"]
            value = last_number_of(text)
        except (ValueError, LookupError, TypeError, AttributeError):
            value, text = None, body
        if value is None or not 0 <= value <= self._scale:
            expected = f"a number from 0 to {self._scale}"
            raise ValueError(f"expected the judge to reply with {expected}, found {_without(key, str(text))!r}")
        return float(value / self._scale)


def _without(key: str, text: str) -> str:
    """Return the beginning of a text that may hold the key, without the key."""
    return (text.replace(key, "***") if key else text)[:MOST_SHOWN]
