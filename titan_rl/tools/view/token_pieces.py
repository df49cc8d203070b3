"""Splits samples into read and sampled tokens."""

from collections.abc import Sequence
from itertools import groupby
from typing import Any

from titan_rl.text.tokenizer import TextTokenizer
from titan_rl.tools.inspect.samples import RunSample

MOST_TOKENS = 4000  # in one sample
INCOMPLETE = "\ufffd"  # what bytes decode to that are no whole character
MOST_BYTES = 4  # tokens of one character


class Pieces:
    """Decodes token by token with a run's tokenizer."""

    def __init__(self, tokenizer: TextTokenizer) -> None:
        self._tokenizer = tokenizer
        self._pieces: dict[int, str] = {}

    def segments(self, sample: RunSample, gaps: Sequence[float] = ()) -> list[dict[str, Any]]:
        """Return the runs of read and of sampled tokens, in order. A sampled run has a text, a log-prob and a policy
        version for each token, and its gap to the trainer's log-prob if `gaps` has one per token; a read run, such as
        the prompt, has one text."""
        found, versions, count, begin = [], iter(sample.versions), 0, 0
        marked = zip(sample.tokens, sample.mask, sample.logprobs, strict=False)
        for sampled, run in groupby(marked, key=lambda token: bool(token[1])):
            tokens = list(run)
            ids = [id for id, _, _ in tokens]
            begin += len(tokens)
            if not sampled:
                found.append({"read": self._tokenizer.decode(ids, skip_special=False), "count": len(ids)})
                continue
            ages = [next(versions, 0) for _ in tokens]
            count = count + len(tokens)
            if count > MOST_TOKENS:
                found.append({"read": f"… ({len(tokens):,} more tokens)", "count": 0})
                break
            logprobs = [None if logprob is None else round(logprob, 3) for _, _, logprob in tokens]
            found.append({"pieces": self.of(ids), "logprobs": logprobs, "versions": _runs(ages)})
            if gaps:
                found[-1]["gaps"] = list(gaps[begin - len(tokens) : begin])
        return found

    def of(self, ids: Sequence[int]) -> list[str]:
        """Return one text per token. Of a character that several tokens spell, the first token has it all."""
        texts: list[str] = []
        while (at := len(texts)) < len(ids):
            text, taken = self._piece(ids[at]), 1
            while INCOMPLETE in text and taken < MOST_BYTES and at + taken < len(ids):
                taken += 1
                text = self._tokenizer.decode(list(ids[at : at + taken]), skip_special=False)
            if INCOMPLETE in text:
                text, taken = self._piece(ids[at]), 1
            texts += [text, *[""] * (taken - 1)]
        return texts

    def _piece(self, id: int) -> str:
        if id not in self._pieces:
            self._pieces[id] = self._tokenizer.decode([id], skip_special=False)
        return self._pieces[id]


def _runs(values: Sequence[int]) -> list[list[int]]:
    """Return pairs of value and count."""
    return [[value, len(list(run))] for value, run in groupby(values)]
