"""The JSON that OpenAI's API and vLLM's token route answer with."""

import time
from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import Any

from titan_rl.agents.agent_session import Said
from titan_rl.text.tokenizer import TextTokenizer

Body = Mapping[str, Any]
Reply = tuple[dict[str, Any], list[dict[str, Any]]]
"""A reply as a whole, and as the chunks of a stream."""


class Replies:
    def __init__(self, model: str, context: int) -> None:
        """`context`: the most tokens of a prompt and its answer; 0: unknown."""
        self._model, self._context, self._since = model, context, int(time.time())

    def models(self) -> dict[str, Any]:
        model = {"id": self._model, "object": "model", "created": self._since, "owned_by": "titan_rl"}
        longest = {"max_model_len": self._context} if self._context else {}
        return {"object": "list", "data": [{**model, **longest}]}

    def chat(self, said: Said, tokenizer: TextTokenizer, body: Body) -> Reply:
        message = dict(said.message)
        calls = message.get("tool_calls") or []
        if calls:
            message["content"] = message["content"] or None
        finish = "tool_calls" if calls else said.sampled.finish
        more = {"logprobs": _logprobs(said, tokenizer, body) if body.get("logprobs") else None, **_ids(said, body)}
        whole = self._head(said, body, "chat.completion")
        choice = {"index": 0, "message": message, "finish_reason": finish, **more}
        delta = {**message, "tool_calls": [{"index": i, **call} for i, call in enumerate(calls)]} if calls else message
        chunk = self._head(said, body, "chat.completion.chunk")
        choices = [{"index": 0, "delta": delta, "finish_reason": None, **more}], [_last(finish) | {"delta": {}}]
        return {**whole, "choices": [choice], "usage": _usage(said)}, _chunks(chunk, choices, said, body)

    def text(self, said: Said, tokenizer: TextTokenizer, body: Body) -> Reply:
        text, finish = said.text, said.sampled.finish
        logprobs = body.get("logprobs")
        asked = logprobs is not None and logprobs is not False  # 0: of the sampled tokens only
        more = {"logprobs": _plain_logprobs(said, tokenizer, body) if asked else None, **_ids(said, body)}
        head = self._head(said, body, "text_completion")
        choice = {"index": 0, "text": text, "finish_reason": finish, **more}
        choices = [{**choice, "finish_reason": None}], [_last(finish) | {"text": ""}]
        return {**head, "choices": [choice], "usage": _usage(said)}, _chunks(head, choices, said, body)

    def tokens(self, said: Said, tokenizer: TextTokenizer, body: Body) -> Reply:
        asked = (body.get("sampling_params") or {}).get("logprobs") is not None
        sampled, request = said.sampled, str(body.get("request_id") or f"turn-{said.sampled.turn}")
        logprobs = _logprobs(said, tokenizer, {"return_tokens_as_token_ids": True}) if asked else None
        choice = {"index": 0, "token_ids": sampled.tokens, "finish_reason": sampled.finish, "logprobs": logprobs}
        head = {"request_id": request, "model": self._model, "created": int(time.time())}
        whole = {
            **head,
            "choices": [choice],
            "usage": _usage(said),
            "prompt_logprobs": None,
            "kv_transfer_params": None,
        }
        if body.get("return_token_ids"):
            whole["prompt_token_ids"] = said.context
        return whole, [{**head, "choices": [choice], "usage": _usage(said)}]

    def _head(self, said: Said, body: Body, kind: str) -> dict[str, Any]:
        """`prompt_token_ids` only when they are asked for: they grow with the conversation."""
        ids = {"prompt_token_ids": said.context} if body.get("return_token_ids") else {}
        name = f"{'cmpl' if kind == 'text_completion' else 'chatcmpl'}-{said.sampled.turn}"
        return {"id": name, "object": kind, "created": int(time.time()), "model": self._model, **ids}


def _chunks(
    head: dict[str, Any], choices: Sequence[list[dict[str, Any]]], said: Said, body: Body
) -> list[dict[str, Any]]:
    chunks = [{**head, "choices": each} for each in choices]
    if (body.get("stream_options") or {}).get("include_usage"):
        chunks.append({**head, "choices": [], "usage": _usage(said)})
    return chunks


def _last(finish: str) -> dict[str, Any]:
    return {"index": 0, "finish_reason": finish, "logprobs": None}


def _ids(said: Said, body: Body) -> dict[str, Any]:
    return {"token_ids": said.sampled.tokens} if body.get("return_token_ids") else {}


def _usage(said: Said) -> dict[str, int]:
    read, sampled = len(said.context), len(said.sampled.tokens)
    return {"prompt_tokens": read, "completion_tokens": sampled, "total_tokens": read + sampled}


def _names(said: Said, tokenizer: TextTokenizer, body: Body) -> list[str]:
    if body.get("return_tokens_as_token_ids"):
        return [f"token_id:{token}" for token in said.sampled.tokens]
    return [tokenizer.decode([token], skip_special=False) for token in said.sampled.tokens]


def _logprobs(said: Said, tokenizer: TextTokenizer, body: Body) -> dict[str, Any]:
    named = zip(_names(said, tokenizer, body), said.sampled.logprobs, strict=True)
    content = [{"token": t, "logprob": p, "bytes": list(t.encode()), "top_logprobs": []} for t, p in named]
    return {"content": content, "refusal": None}


def _plain_logprobs(said: Said, tokenizer: TextTokenizer, body: Body) -> dict[str, Any]:
    names = _names(said, tokenizer, body)
    offsets = list(accumulate(map(len, names), initial=0))[:-1]
    return {"tokens": names, "token_logprobs": list(said.sampled.logprobs), "top_logprobs": [], "text_offset": offsets}
