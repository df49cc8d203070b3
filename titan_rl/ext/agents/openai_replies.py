"""The JSON that OpenAI's API and vLLM's token route answer with."""

import time
from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import Any

from titan_rl.ext.agents.agent_session import ServedTurn
from titan_rl.text.tokenizer import TextTokenizer

Body = Mapping[str, Any]
Reply = tuple[dict[str, Any], list[dict[str, Any]]]
"""A reply as a whole, and as the chunks of a stream."""


class Replies:
    def __init__(self, model: str, context: int) -> None:
        """`context`: the most tokens of a prompt and its answer; 0: unknown."""
        self._model, self._context, self._since = model, context, int(time.time())

    def models(self, seats: Sequence[str] = ()) -> dict[str, Any]:
        """Return the list of models: the policy, or a rollout's seats."""
        model = {"object": "model", "created": self._since, "owned_by": "titan_rl"}
        longest = {"max_model_len": self._context} if self._context else {}
        return {"object": "list", "data": [{"id": name, **model, **longest} for name in seats or [self._model]]}

    def chat(self, served: ServedTurn, tokenizer: TextTokenizer, body: Body) -> Reply:
        message = dict(served.message)
        calls = message.get("tool_calls") or []
        if calls:
            message["content"] = message["content"] or None
        finish = "tool_calls" if calls else served.sampled.finish
        more = {"logprobs": _logprobs(served, tokenizer, body) if body.get("logprobs") else None, **_ids(served, body)}
        whole = self._head(served, body, "chat.completion")
        choice = {"index": 0, "message": message, "finish_reason": finish, **more}
        delta = {**message, "tool_calls": [{"index": i, **call} for i, call in enumerate(calls)]} if calls else message
        chunk = self._head(served, body, "chat.completion.chunk")
        choices = [{"index": 0, "delta": delta, "finish_reason": None, **more}], [_last(finish) | {"delta": {}}]
        return {**whole, "choices": [choice], "usage": _usage(served)}, _chunks(chunk, choices, served, body)

    def text(self, served: ServedTurn, tokenizer: TextTokenizer, body: Body) -> Reply:
        text, finish = served.text, served.sampled.finish
        logprobs = body.get("logprobs")
        has_logprobs = logprobs is not None and logprobs is not False  # 0: of the sampled tokens only
        more = {"logprobs": _plain_logprobs(served, tokenizer, body) if has_logprobs else None, **_ids(served, body)}
        head = self._head(served, body, "text_completion")
        choice = {"index": 0, "text": text, "finish_reason": finish, **more}
        choices = [{**choice, "finish_reason": None}], [_last(finish) | {"text": ""}]
        return {**head, "choices": [choice], "usage": _usage(served)}, _chunks(head, choices, served, body)

    def tokens(self, served: ServedTurn, tokenizer: TextTokenizer, body: Body) -> Reply:
        has_logprobs = (body.get("sampling_params") or {}).get("logprobs") is not None
        sampled, request = served.sampled, str(body.get("request_id") or f"turn-{served.sampled.turn}")
        logprobs = _logprobs(served, tokenizer, {"return_tokens_as_token_ids": True}) if has_logprobs else None
        choice = {"index": 0, "token_ids": sampled.tokens, "finish_reason": sampled.finish, "logprobs": logprobs}
        head = {"request_id": request, "model": self._model, "created": int(time.time())}
        whole = {
            **head,
            "choices": [choice],
            "usage": _usage(served),
            "prompt_logprobs": None,
            "kv_transfer_params": None,
        }
        if body.get("return_token_ids"):
            whole["prompt_token_ids"] = served.context
        return whole, [{**head, "choices": [choice], "usage": _usage(served)}]

    def _head(self, served: ServedTurn, body: Body, kind: str) -> dict[str, Any]:
        """`prompt_token_ids` only when they are asked for: they grow with the conversation."""
        ids = {"prompt_token_ids": served.context} if body.get("return_token_ids") else {}
        name = f"{'cmpl' if kind == 'text_completion' else 'chatcmpl'}-{served.sampled.turn}"
        return {"id": name, "object": kind, "created": int(time.time()), "model": self._model, **ids}


def _chunks(
    head: dict[str, Any], choices: Sequence[list[dict[str, Any]]], served: ServedTurn, body: Body
) -> list[dict[str, Any]]:
    chunks = [{**head, "choices": each} for each in choices]
    if (body.get("stream_options") or {}).get("include_usage"):
        chunks.append({**head, "choices": [], "usage": _usage(served)})
    return chunks


def _last(finish: str) -> dict[str, Any]:
    return {"index": 0, "finish_reason": finish, "logprobs": None}


def _ids(served: ServedTurn, body: Body) -> dict[str, Any]:
    return {"token_ids": served.sampled.tokens} if body.get("return_token_ids") else {}


def _usage(served: ServedTurn) -> dict[str, int]:
    read, sampled = len(served.context), len(served.sampled.tokens)
    return {"prompt_tokens": read, "completion_tokens": sampled, "total_tokens": read + sampled}


def _names(served: ServedTurn, tokenizer: TextTokenizer, body: Body) -> list[str]:
    if body.get("return_tokens_as_token_ids"):
        return [f"token_id:{token}" for token in served.sampled.tokens]
    return [tokenizer.decode([token], skip_special=False) for token in served.sampled.tokens]


def _logprobs(served: ServedTurn, tokenizer: TextTokenizer, body: Body) -> dict[str, Any]:
    named = zip(_names(served, tokenizer, body), served.sampled.logprobs, strict=True)
    content = [{"token": t, "logprob": p, "bytes": list(t.encode()), "top_logprobs": []} for t, p in named]
    return {"content": content, "refusal": None}


def _plain_logprobs(served: ServedTurn, tokenizer: TextTokenizer, body: Body) -> dict[str, Any]:
    names = _names(served, tokenizer, body)
    offsets = list(accumulate(map(len, names), initial=0))[:-1]
    return {
        "tokens": names,
        "token_logprobs": list(served.sampled.logprobs),
        "top_logprobs": [],
        "text_offset": offsets,
    }
