"""An engine without a model: its samples grow by a token per step of a fixed length, and end at a length that follows
from their seed. Time is given to it, so that it needs no clock."""

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace

from titan_rl.actors.vllm.engine import Done
from titan_rl.wire.reports import EngineStats
from titan_rl.wire.types import Completion, Request

LOGPROB = -0.5  # of every token
SHORTEST = 0.25  # of max_new_tokens: lengths are drawn evenly from there on
ROUNDING = 1e-6


def completion(draw: random.Random, length: int, vocabulary: int, version: int) -> Completion:
    """Return a finished sample of random tokens."""
    tokens = draw.choices(range(vocabulary), k=length)
    return Completion(tokens, [-draw.random() for _ in tokens], [version] * length, "length")


def length_of(seed: int, most: int) -> int:
    return random.Random(seed).randint(max(1, round(SHORTEST * most)), most)


@dataclass(slots=True)
class _Sample:
    seed: int
    length: int  # when it ends
    versions: list[int]  # of the tokens until `since`
    since: float

    def tokens(self, now: float, pace: float) -> int:
        return min(self.length, len(self.versions) + int(max(0.0, now - self.since) / pace + ROUNDING))

    def end(self, pace: float) -> float:
        return self.since + (self.length - len(self.versions)) * pace


@dataclass(slots=True)
class _Open:
    request: Request
    samples: dict[int, _Sample]  # by index; they end here
    others: dict[int, Completion]  # that ended elsewhere

    def end(self, pace: float) -> float:
        return max((sample.end(pace) for sample in self.samples.values()), default=0.0)


class SimulatedEngine:
    """Holds any number of samples; a step of it takes `pace` seconds."""

    def __init__(self, vocabulary: int, pace: float) -> None:
        self.version: int | None = None  # it samples nothing before the first
        self._vocabulary, self._pace = vocabulary, pace
        self._open: dict[str, _Open] = {}
        self._stats, self._seen = EngineStats(), 0.0

    @property
    def busy(self) -> bool:
        return bool(self._open) and self.version is not None

    def add(self, requests: Sequence[Request], now: float) -> None:
        self._pass(now)
        for request in requests:
            opened = self._open[request.id] = _Open(request, {}, {})
            for i, seed in enumerate(request.seeds):
                if request.begun and request.begun[i].finish != "abort":
                    opened.others[i] = request.begun[i]
                else:
                    versions = list(request.begun[i].versions) if request.begun else []
                    length = length_of(seed, request.sampling.max_new_tokens)
                    opened.samples[i] = _Sample(seed, length, versions, now)

    def end(self) -> float | None:
        """Return when the next request is done; None if nothing is being sampled."""
        return min(opened.end(self._pace) for opened in self._open.values()) if self.busy else None

    def step(self, now: float) -> list[Done]:
        """Return the requests that are done."""
        self._pass(now)
        ids = [id for id, each in self._open.items() if each.end(self._pace) <= now + ROUNDING] if self.busy else []
        return [self._done(id, now) for id in ids]

    def withdraw(self, ids: Sequence[str], now: float) -> list[Done]:
        """End these requests now. Return the unfinished ones."""
        self._pass(now)
        return [self._done(id, now) for id in ids if id in self._open]

    def set_version(self, version: int, now: float) -> None:
        """Let everything continue with new weights: tokens until now keep the version that sampled them."""
        self._pass(now)
        for opened in self._open.values():
            for sample in opened.samples.values():
                sample.versions, sample.since = self._versions(sample, sample.tokens(now, self._pace)), now
        self.version, self._seen = version, now

    def stats(self, now: float) -> EngineStats:
        self._pass(now)
        return replace(self._stats)

    def _pass(self, now: float) -> None:
        """Count the steps since the last call."""
        if not self.busy:
            self._seen = now
            return
        steps = int((now - self._seen) / self._pace)
        samples = sum(sample.end(self._pace) > now for each in self._open.values() for sample in each.samples.values())
        self._stats.steps += steps
        self._stats.tokens += steps * samples
        self._stats.seconds += steps * self._pace
        self._stats.max_batch = max(self._stats.max_batch, samples)
        self._seen += steps * self._pace

    def _done(self, id: str, now: float) -> Done:
        opened = self._open.pop(id)
        own = {i: self._completion(sample, sample.tokens(now, self._pace)) for i, sample in opened.samples.items()}
        self._stats.prompt_tokens += len(opened.request.tokens) * len(opened.samples)
        return Done(id, [(opened.others | own)[i] for i in range(len(opened.request.seeds))])

    def _versions(self, sample: _Sample, tokens: int) -> list[int]:
        return (
            sample.versions
            if self.version is None
            else sample.versions + [self.version] * (tokens - len(sample.versions))
        )

    def _completion(self, sample: _Sample, tokens: int) -> Completion:
        sampled = random.Random(sample.seed).choices(range(self._vocabulary), k=tokens)
        finish = "length" if tokens == sample.length else "abort"
        return Completion(sampled, [LOGPROB] * tokens, self._versions(sample, tokens), finish)
