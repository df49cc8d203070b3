"""Draws the tokens of a step that verifies drafts: the same tokens as without any.

vLLM's rejection sampler consumes random numbers by draft, so a seed would give other tokens with other drafts. Here
each token is drawn from the model's distribution, as vLLM's sampler draws it, with the random numbers that come next
in the sample's own generator. A draft that equals the drawn token is accepted: the token after it is already drawn,
too. The random numbers after the first other token go back to the generator.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Generator, Tensor

NO_TOKEN = -1  # vLLM's placeholder for a token that is not returned


class MatchedDraws:
    """Takes the place of vLLM's rejection sampler in a model runner."""

    def __init__(self, sampler: Any) -> None:
        self._sampler = sampler
        self.drafted = 0

    def __call__(self, metadata: Any, draft_probs: None, logits: "Tensor", sampling: Any) -> Any:
        """Return a SamplerOutput with the tokens [requests, 1 + most drafts] of each request.

        `logits` [T, V] has the rows of the requests in their order: one per draft, and one more."""
        import torch

        drafts: list[int] = metadata.draft_token_ids.tolist()
        counts = [1 + drafted for drafted in metadata.num_draft_tokens]
        self.drafted += len(drafts)
        repeats = torch.tensor(counts)
        rows = RowGenerators(sampling.generators, counts)
        repeated = {
            name: None if value is None else value.repeat_interleave(repeats)
            for name in ("temperature", "top_p", "top_k")
            for value in [getattr(sampling, name)]
        }
        drawn = self._sampler(logits, replace(sampling, generators=rows, **repeated))
        if not drafts:
            return drawn
        own: list[int] = drawn.sampled_token_ids.flatten().tolist()
        most, row, draft = max(counts), 0, 0
        tokens, places = list[list[int]](), list[list[int]]()
        for count in counts:
            used = 1
            while used < count and drafts[draft + used - 1] == own[row + used - 1]:
                used += 1
            tokens.append(own[row : row + used] + [NO_TOKEN] * (most - used))
            places.append([row + min(i, used - 1) for i in range(most)])
            if used < count:
                rows.rewind(row + used - 1)
            row, draft = row + count, draft + count - 1
        logprobs, at = drawn.logprobs_tensors, torch.tensor(places).flatten()
        if logprobs is not None:
            logprobs = type(logprobs)(*(part[at] for part in logprobs[:3]))
        return replace(drawn, sampled_token_ids=torch.tensor(tokens, dtype=torch.int32), logprobs_tensors=logprobs)


class RowGenerators(dict[int, "Generator"]):
    """The random generators of a step's rows. A request's rows draw from its generator one after the other, and where
    it was after each of them is remembered."""

    def __init__(self, generators: Mapping[int, "Generator"], counts: Sequence[int]) -> None:
        requests = (request for request, count in enumerate(counts) for _ in range(count))
        super().__init__((row, generators[i]) for row, i in enumerate(requests) if i in generators)
        self._after = dict[int, "Tensor"]()

    def items(self) -> Iterator[tuple[int, "Generator"]]:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Yield each row's generator, which the sampler then draws from."""
        for row, generator in super().items():
            yield row, generator
            self._after[row] = generator.get_state()

    def rewind(self, row: int) -> None:
        """Give back the random numbers that the rows of this request after `row` have drawn. A greedy step has drawn
        none."""
        if row in self._after:
            self[row].set_state(self._after[row])
