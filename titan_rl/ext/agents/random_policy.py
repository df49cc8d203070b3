"""A policy without a model: it samples random tokens, words of its context, numbers, and calls of its tools."""

import json
import re
from typing import Any

import numpy as np

from titan_rl.text.chat import common_length
from titan_rl.text.tokenizer import TextTokenizer
from titan_rl.wire.types import Completion, Request

RECENT = 400  # last characters of the context, whose words it repeats
MOST_WORDS = 4
EXAMPLES: dict[str, Any] = {"string": "a", "integer": 1, "number": 0.5, "boolean": True, "array": [], "object": {}}


class RandomPolicy:
    """Answers requests as generators do. The same seed gives the same answer after the same context."""

    def __init__(self, tokenizer: TextTokenizer, *, chat: bool) -> None:
        self._tokenizer, self._chat = tokenizer, chat
        control = tokenizer.control_ids
        self._plain = np.array([id for id in range(tokenizer.size) if id not in control])

    async def generate(self, request: Request) -> list[Completion]:
        return [self._completion(request, seed) for seed in request.seeds]

    def _completion(self, request: Request, seed: int) -> Completion:
        draws, most = np.random.Generator(np.random.PCG64(seed)), request.sampling.max_new_tokens
        read = self._tokenizer.decode(request.tokens, skip_special=False)
        sampled = [*self._draw(read, draws), self._tokenizer.eos]
        tokens = sampled[:most]
        finish = "stop" if len(sampled) <= most else "length"
        return Completion(tokens, [-float(np.log(self._tokenizer.size))] * len(tokens), [0] * len(tokens), finish)

    def _draw(self, read: str, draws: np.random.Generator) -> list[int]:
        tools = tools_in(read) if self._chat else []
        match int(draws.integers(4 if tools else 3)):
            case 0:
                return draws.choice(self._plain, int(draws.integers(1, 16))).tolist()
            case 1:
                words = re.findall(r"\w+", read[-RECENT:]) or ["a"]
                return self._tokenizer.encode_outside(" ".join(draws.choice(words, int(draws.integers(1, MOST_WORDS)))))
            case 2:
                return self._tokenizer.encode_outside(str(draws.integers(10)))
        return self._call(tools[int(draws.integers(len(tools)))])

    def _call(self, tool: dict[str, Any]) -> list[int]:
        """Return a call as the chat template writes it, with an example of each argument."""
        kinds = (tool.get("parameters") or {}).get("properties") or {}
        arguments = {name: EXAMPLES.get(kind.get("type", ""), "a") for name, kind in kinds.items()}
        call = {"id": "call_0", "type": "function", "function": {"name": tool["name"], "arguments": arguments}}
        chat, question = self._tokenizer.chat, [{"role": "user", "content": "a"}]
        tokens = chat.outside.encode(
            chat.render([*question, {"role": "assistant", "content": "", "tool_calls": [call]}], opened=False)
        )
        before = chat.prompt(question)
        written = tokens[common_length(before, tokens) :]
        ends = [i for i, token in enumerate(written) if token in chat.eos_ids]
        return written[: ends[0]] if ends else written


def tools_in(text: str) -> list[dict[str, Any]]:
    """Return the functions whose schemas a prompt shows as JSON."""
    decoder, tools = json.JSONDecoder(), []
    for at in re.finditer(r'\{"type": ?"function"', text):
        try:
            tool = decoder.raw_decode(text, at.start())[0]["function"]
        except (ValueError, KeyError, TypeError):
            continue
        if isinstance(tool, dict) and isinstance(tool.get("name"), str):
            tools.append(tool)
    return tools
