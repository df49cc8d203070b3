"""Text from outside never becomes a control token.

A tool that prints the end token, or a user who types it, would end a turn and begin another in most chat templates.
So control tokens spelled in messages are replaced by marks before a template renders them:

    messages -> masked -> template -> text with marks -> encode -> tokens

Text with marks is encoded by a twin of the tokenizer that knows the control tokens by other names: the template's own
are renamed, and what the marks stand for is ordinary text. Any other text is encoded as it always was.
"""

import json
import re
import secrets
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from itertools import groupby
from typing import Any

from tokenizers import Tokenizer


class OutsideText:
    """Masks and encodes with one tokenizer."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._nonce = str(
            secrets.randbits(64)
        )  # unknown outside, so that no text has a mark; no template changes its case
        # as it is, or as repr() writes it in a message about a text
        self._mark = re.compile(f"(?:\ue000|\\\\ue000){self._nonce}:([0-9]+)(?:\ue001|\\\\ue001)")

    @cached_property
    def control(self) -> dict[str, int]:
        """The control tokens: text -> id."""
        added = self._tokenizer.get_added_tokens_decoder()
        return {token.content: id for id, token in added.items() if token.special and token.content}

    @cached_property
    def _spelled(self) -> re.Pattern[str]:
        longest_first = sorted(self.control, key=len, reverse=True)
        return re.compile("|".join(map(re.escape, longest_first)) or "(?!)")

    def masked(self, value: Any) -> Any:
        """Return a message, or any part of one, with marks in place of control tokens."""
        return _changed(
            value,
            lambda text: self._spelled.sub(lambda found: f"\ue000{self._nonce}:{self.control[found[0]]}\ue001", text),
        )

    def encode(self, text: str) -> list[int]:
        """Return the tokens of a text. Control tokens in it are control tokens, except where there are marks."""
        if self._nonce not in text:
            return self._tokenizer.encode(text, add_special_tokens=False).ids
        text = self._spelled.sub(lambda found: self._renamed(self.control[found[0]]), text)
        return self._twin.encode(self.unmasked(text), add_special_tokens=False).ids

    def lengths(self, texts: Sequence[str]) -> list[int]:
        """Return the tokens of each text, as `encode` counts them; on all cores, if no text has marks."""
        if any(self._nonce in text for text in texts):
            return [len(self.encode(text)) for text in texts]
        return list(map(len, self._tokenizer.encode_batch_fast(texts, add_special_tokens=False)))

    def unmasked(self, value: Any) -> Any:
        """Return a text, a message or any part of one, with the control tokens that the marks stand for."""
        spelled = {id: token for token, id in self.control.items()}
        return _changed(value, lambda text: self._mark.sub(lambda found: spelled[int(found[1])], text))

    def decode(self, tokens: Sequence[int], decode: Callable[[Sequence[int]], str]) -> str:
        """Return sampled tokens as text, with marks in place of control tokens that ordinary tokens spell."""
        text, ids = decode(tokens), frozenset(self.control.values())
        if len(self._spelled.findall(text)) == sum(token in ids for token in tokens):
            return text
        runs = [(sampled, decode(list(run))) for sampled, run in groupby(tokens, ids.__contains__)]
        return "".join(text if sampled else self.masked(text) for sampled, text in runs)

    def _renamed(self, id: int) -> str:
        return f"\ue002{self._nonce}:{id}\ue003"

    @cached_property
    def _twin(self) -> Tokenizer:
        """The tokenizer with its control tokens renamed, wherever they are listed."""
        whole = json.loads(self._tokenizer.to_str())
        names = {token: self._renamed(id) for token, id in self.control.items()}
        for token in whole["added_tokens"]:
            token["content"] = names.get(token["content"], token["content"]) if token["special"] else token["content"]
        model = whole["model"]
        if isinstance(model.get("vocab"), dict):
            model["vocab"] = {names.get(token, token): id for token, id in model["vocab"].items()}
        else:
            model["vocab"] = [[names.get(token, token), score] for token, score in model["vocab"]]
        if "unk_token" in model:
            model["unk_token"] = names.get(model["unk_token"], model["unk_token"])
        whole["post_processor"] = None  # it would add control tokens around a text
        twin = Tokenizer.from_str(json.dumps(whole))
        if odd := [token for token, id in self.control.items() if twin.token_to_id(names[token]) != id]:
            raise ValueError(f"expected a tokenizer whose control tokens can be renamed, found {odd[0]!r} that cannot")
        return twin


def _changed(value: Any, change: Callable[[str], str]) -> Any:
    """Return a value with all texts in it changed."""
    if isinstance(value, str):
        return change(value)
    if isinstance(value, Mapping):
        return {_changed(key, change): _changed(part, change) for key, part in value.items()}
    if isinstance(value, list | tuple):
        return [_changed(part, change) for part in value]
    return value
