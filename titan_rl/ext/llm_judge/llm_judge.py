"""A model as judge, behind any OpenAI-compatible URL.

    "judge"         prompt, reference, answer ──> judge_prompt ──> POST judge_url/chat/completions ──> the last number
    "judge_group"   prompt, reference, all answers of a group ──> the same, once ──> the last JSON list of numbers

The key is read from the environment and sent to that URL; no file and no message has it. If the judge does not
answer, refuses, or replies without a number in 0..judge_scale, the answer has no reward, and the error is named.

Comparing answers is easier than grading one, and a group's advantages need no more. Equal answers are shown once, so
that they have one reward.
"""

import json
import os
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from titan_rl.tasks.chat_server import ChatServer
from titan_rl.tasks.rewards import Answered, last_number_of
from titan_rl.wire.types import Prompt

PROMPT = """You grade answers. Compare the answer with the reference.

Question:
{prompt}

Reference:
{reference}

Answer:
{answer}

Reply with one number from 0 (wrong) to {scale} (right), and nothing else."""
GROUP_PROMPT = """You compare answers to one question. Judge how well each reaches the goal, relative to the others.

Question:
{prompt}

Reference:
{reference}

Answers, as a JSON list of {count} strings:
{answers}

Give each answer a number from 0 (worst) to {scale} (best). Better answers get higher numbers, and answers of the same
worth the same number. Explain briefly, then end with a JSON list of {count} numbers, in the order of the answers."""
JSON_LIST = re.compile(r"\[[^\[\]]*\]")


class Client:
    """Asks the judge. `shows` is the field of judge_prompt with the answer or answers."""

    def __init__(self, arguments: Mapping[str, Any], argument: Callable[..., Any], prompt: str, shows: str) -> None:
        self._url = argument(arguments, "judge_url", str).rstrip("/")
        self._model = argument(arguments, "judge_model", str)
        self._variable = argument(arguments, "judge_key", str, "OPENAI_API_KEY")
        self._prompt = argument(arguments, "judge_prompt", str, prompt)
        self.scale = argument(arguments, "judge_scale", int, 10)
        self._tokens = argument(arguments, "judge_tokens", int, 512)
        if not self._url.startswith(("http://", "https://")):
            raise ValueError(
                f"task.reward_args: expected judge_url to be a URL such as http://HOST/v1, found {self._url!r}"
            )
        if "judge_key" in arguments and not os.environ.get(self._variable):
            raise ValueError(
                f"task.reward_args: expected the environment to have judge_key = {self._variable!r}, found none"
            )
        if min(self.scale, self._tokens) < 1:
            raise ValueError("task.reward_args: expected judge_scale and judge_tokens of at least 1")
        if f"{{{shows}}}" not in self._prompt:
            raise ValueError(f"task.reward_args: expected {{{shows}}} in judge_prompt, found none")
        self._server = ChatServer("judge", self._url, self._model, os.environ.get(self._variable, ""))

    async def ask(self, prompt: Prompt, read: Callable[[str], Any], expected: str, **fields: str) -> Any:
        """Return the value that `read` finds in the reply. None is an error, which names the value `expected`."""
        asked = self._prompt
        fields = {"prompt": prompt.text, "reference": prompt.answer, "scale": str(self.scale), **fields}
        for name, text in fields.items():
            asked = asked.replace(f"{{{name}}}", text.replace("{", "{\0"))  # no text can name a later field
        messages = [{"role": "user", "content": asked.replace("{\0", "{")}]
        body_text = await self._server.ask(messages, temperature=0, max_tokens=self._tokens)
        try:
            text = json.loads(body_text)["choices"][0]["message"]["content"]
            value = read(text)
        except (ValueError, LookupError, TypeError, AttributeError):
            value, text = None, body_text
        if value is None:
            raise ValueError(f"expected the judge to reply with {expected}, found {self._server.shown(str(text))!r}")
        return value


class LlmJudge:
    """Judges one answer. Its reward is the number in the reply, divided by judge_scale."""

    def __init__(self, arguments: Mapping[str, Any], argument: Callable[..., Any]) -> None:
        self._client = Client(arguments, argument, PROMPT, "answer")

    async def __call__(self, prompt: Prompt, answer: Answered) -> float:
        scale = self._client.scale

        def read(reply: str) -> float | None:
            value = last_number_of(reply)
            return None if value is None or not 0 <= value <= scale else float(value / scale)

        return await self._client.ask(prompt, read, f"a number from 0 to {scale}", answer=answer.text)


class GroupJudge:
    """Judges all answers of a group in one call. Their rewards are the numbers in the reply, divided by judge_scale."""

    def __init__(self, arguments: Mapping[str, Any], argument: Callable[..., Any]) -> None:
        self._client = Client(arguments, argument, GROUP_PROMPT, "answers")

    async def __call__(self, prompt: Prompt, answers: Sequence[Answered]) -> list[float]:
        scale, texts = self._client.scale, list(dict.fromkeys(answer.text for answer in answers))

        def read(reply: str) -> list[float] | None:
            try:
                values = json.loads(JSON_LIST.findall(reply)[-1])
            except (LookupError, ValueError):
                return None
            sound = len(values) == len(texts) and all(type(v) in (int, float) and 0 <= v <= scale for v in values)
            return [value / scale for value in values] if sound else None

        expected = f"a JSON list of {len(texts)} numbers from 0 to {scale}"
        shown = json.dumps(texts, ensure_ascii=False, indent=0)
        values = await self._client.ask(prompt, read, expected, count=str(len(texts)), answers=shown)
        by_text = dict(zip(texts, values, strict=True))
        return [by_text[answer.text] for answer in answers]
