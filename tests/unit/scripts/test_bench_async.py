"""scripts/bench_async.py: what its figures depend on. The measuring itself is run by hand."""

import asyncio

from bench.long_tailed import drawn_length, generate_long_tailed
from titan_rl.wire.types import Completion, Request, Sampling


def test_a_group_of_drawn_lengths_comes_back_whole_and_in_order() -> None:
    class Engine:
        """Answers the last sample first, with all tokens that are allowed; each token is the sample's seed."""

        def __init__(self) -> None:
            self.ids: set[str] = set()

        async def generate(self, request: Request) -> list[Completion]:
            self.ids.add(request.id)
            (seed,), n = request.seeds, request.sampling.max_new_tokens
            assert request.sampling.stop_token_ids == ()
            await asyncio.sleep(0.001 * (20 - seed))
            return [Completion([seed] * n, [0.0] * n, [0] * n, "length")]

    engine = Engine()
    request = Request("prompt-3", [1, 2], [11, 12, 13, 14], Sampling(160, stop_token_ids=(2,)))
    samples = asyncio.run(generate_long_tailed(engine.generate, request))
    assert [sample.tokens[0] for sample in samples] == request.seeds
    lengths = [len(sample.tokens) for sample in samples]
    assert lengths == [drawn_length("prompt-3", k, 160) for k in range(4)]
    assert len(set(lengths)) > 1
    assert len(engine.ids) == 4


def test_lengths_are_the_same_in_every_run_and_have_a_long_tail() -> None:
    lengths = sorted(drawn_length(f"prompt-{i}", k, 160) for i in range(100) for k in range(8))
    assert lengths == sorted(drawn_length(f"prompt-{i}", k, 160) for i in range(100) for k in range(8))
    assert 1 <= lengths[0] <= lengths[-1] <= 160
    assert 30 <= lengths[400] <= 45
    assert lengths[760] > 2.5 * lengths[400]
