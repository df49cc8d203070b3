"""A request that an engine has not finished: what its samples have got so far."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from titan_rl.wire.types import Completion, Request

if TYPE_CHECKING:
    from titan_rl.actors.vllm.step_scheduler import Prefill


@dataclass(slots=True)
class OpenRequest:
    """An unfinished request. Its samples' lists grow with what the engine core reports."""

    request: Request
    samples: list[Completion]
    unfinished: dict[int, str]  # their ids in the engine core
    fresh: set[int]  # samples without a token from this engine
    prefills: "dict[int, Prefill]"  # of the other unfinished samples

    @classmethod
    def of(cls, request: Request) -> "OpenRequest":
        """Return a request none of whose samples is in the engine core yet."""
        if request.begun:
            samples = [
                Completion([*s.tokens], [*s.logprobs], [*s.versions], s.finish, "", [*s.kept], [*s.context])
                for s in request.begun
            ]
        else:
            samples = [Completion([], [], [], "abort") for _ in request.seeds]
        fresh = {i for i, sample in enumerate(samples) if sample.finish == "abort"}
        return cls(request, samples, {}, fresh, {})

    def lengths(self, unreported: Mapping[str, int]) -> dict[int, int]:
        """Return the lengths of unfinished samples, given how many tokens the engine core has not reported."""
        return {i: len(self.samples[i].tokens) + unreported.get(id, 0) for i, id in self.unfinished.items()}

    def cached(self, block: int) -> int:
        """Return how many tokens' keys and values the unfinished samples have; they share the context's full blocks.
        Those of a sample's last token are computed by the next step."""
        begun, context = self.unfinished.keys() - self.fresh, len(self.request.tokens)
        own = sum(context % block + len(self.samples[i].tokens) - 1 for i in begun)
        return own + context // block * block if begun else 0
