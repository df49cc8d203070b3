"""A request that an engine has not finished: what its samples have got so far."""

from dataclasses import dataclass
from typing import NamedTuple

from titan_rl.wire.types import Completion, Request


class Prefill(NamedTuple):
    tokens: int  # in a sample's context when it entered the engine
    cached: int  # among them, found in the prefix cache


@dataclass(slots=True)
class OpenRequest:
    """An unfinished request. Its samples' lists grow with each step."""

    request: Request
    samples: list[Completion]
    unfinished: dict[int, str]  # their ids in vLLM
    fresh: set[int]  # samples without a token from this engine
    prefills: dict[int, Prefill]  # every other unfinished sample's

    @classmethod
    def of(cls, request: Request) -> "OpenRequest":
        """Return a request none of whose samples is in vLLM yet."""
        if request.begun:
            samples = [
                Completion([*s.tokens], [*s.logprobs], [*s.versions], s.finish, "", [*s.kept], [*s.context])
                for s in request.begun
            ]
        else:
            samples = [Completion([], [], [], "abort") for _ in request.seeds]
        fresh = {i for i, sample in enumerate(samples) if sample.finish == "abort"}
        return cls(request, samples, {}, fresh, {})

    def cached(self, block: int) -> int:
        """Return how many tokens' keys and values the unfinished samples have; they share the context's full blocks.
        Those of a sample's last token are computed by the next step."""
        begun, context = self.unfinished.keys() - self.fresh, len(self.request.tokens)
        own = sum(context % block + len(self.samples[i].tokens) - 1 for i in begun)
        return own + context // block * block if begun else 0
