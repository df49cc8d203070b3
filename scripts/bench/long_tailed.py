"""titan_rl.run with generators whose sample lengths have a long tail. `bench_async.py overlap` runs this file.

.venv/bin/python scripts/bench/long_tailed.py --config grpo_llama
"""

import asyncio
import random
from collections.abc import Awaitable, Callable
from dataclasses import replace
from functools import partial

import numpy as np

from titan_rl import run
from titan_rl.meshes.generator_mesh import GeneratorMesh
from titan_rl.wire.seeds import derive
from titan_rl.wire.types import Completion, Request

Generate = Callable[[Request], Awaitable[list[Completion]]]
MEDIAN, SIGMA = 40, 0.8  # tokens, of a lognormal distribution truncated at rollout.max_new_tokens


async def generate_long_tailed(generate: Generate, request: Request) -> list[Completion]:
    """Answer a request with samples that end at a drawn length, not at a stop token. A request has one length, so a
    group becomes one request per sample; these enter the engine in one tick, as the group would."""
    parts = []
    for k, seed in enumerate(request.seeds):
        length = drawn_length(request.id, k, request.sampling.max_new_tokens)
        sampling = replace(request.sampling, max_new_tokens=length, stop_token_ids=())
        parts.append(replace(request, id=f"{request.id}/{k}", seeds=[seed], sampling=sampling))
    return [sample for (sample,) in await asyncio.gather(*map(generate, parts))]


def drawn_length(request: str, sample: int, most: int) -> int:
    """Return the same length for a sample in every run, at every lag."""
    draws = random.Random(derive(0, "length", request, sample))
    while True:
        if 1 <= (length := round(draws.lognormvariate(np.log(MEDIAN), SIGMA))) <= most:
            return length


def main() -> None:
    real = GeneratorMesh.generate

    async def generate(self: GeneratorMesh, request: Request) -> list[Completion]:
        return await generate_long_tailed(partial(real, self), request)

    GeneratorMesh.generate = generate
    run.entry()


if __name__ == "__main__":
    main()
