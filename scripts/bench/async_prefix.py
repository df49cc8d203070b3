"""One engine with the prefix cache and one without, in turn."""

import asyncio
import random
import tempfile
import time
from collections import defaultdict
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from monarch.actor import this_host

from bench.ranks import TIMEOUT
from bench.rows import Row, in_turn
from titan_rl.actors.vllm import vllm_cpu
from titan_rl.actors.vllm.engine import EngineSettings
from titan_rl.actors.vllm.launch_env import ENV
from titan_rl.config import sections as c
from titan_rl.meshes.generator_mesh import GeneratorMesh
from titan_rl.meshes.replica import GeneratorPolicy, Replica
from titan_rl.meshes.spawn import spawn
from titan_rl.preflight.plan import write_model_folder
from titan_rl.preflight.shapes import shape_of
from titan_rl.wire.types import Completion, Request, Sampling

PROMPT, GROUPS, SAMPLES, NEW, TOOL = 512, 2, 16, 32, 32  # tokens, except GROUPS and SAMPLES


async def prefix(repeats: int) -> list[Row]:
    seconds, hits = (defaultdict[tuple[str, bool], list[float]](list) for _ in range(2))  # by turn and if cached
    shape = shape_of(c.ModelSection())
    with tempfile.TemporaryDirectory() as folder:
        write_model_folder(Path(folder), shape)
        engines = {cached: await start_engine(folder, cached) for cached in (True, False)}
        try:
            for i, cached in in_turn(engines, 1 + repeats):
                for turn, took, hit in await two_turns(engines[cached], i, shape.vocab_size):
                    if i:  # the first round warms up
                        seconds[turn, cached].append(took)
                        hits[turn, cached].append(hit)
        finally:
            for mesh in engines.values():
                await mesh.close()
                await mesh.stop()
    rows = []
    note = f"{GROUPS} groups of {SAMPLES}, {NEW} new tokens a sample, {shape.parameters / 1e6:.1f}M parameters"
    for turn in dict.fromkeys(turn for turn, _ in seconds):
        row, on, off = partial(Row, "prefix", turn, note=note), seconds[turn, True], seconds[turn, False]
        rows += [
            row("with the cache, s", on),
            row("without, s", off),
            row("without / with", [b / a for a, b in zip(on, off, strict=True)]),
            row("hit rate", hits[turn, True]),
        ]
        if any(hits[turn, False]):
            raise RuntimeError(f"expected no hits without a cache, found {hits[turn, False]}")
    return rows


async def start_engine(folder: str, cached: bool) -> GeneratorMesh:
    """Start one engine. A pull of no weights makes it serve its random ones."""
    name = "cached" if cached else "plain"
    settings = EngineSettings(
        model_dir=folder, max_model_len=1024, kv_cache_memory_mb=512, enable_prefix_caching=cached
    )
    env = {**ENV, **vllm_cpu.ENV, "CUDA_VISIBLE_DEVICES": ""}
    procs = await spawn(this_host(), name=name, shape={"tp": 1}, env=env)
    policy = GeneratorPolicy(init_seconds=TIMEOUT, seconds=TIMEOUT)
    mesh = GeneratorMesh([Replica(0, name, procs, settings, policy)], policy)
    await mesh.start()
    await mesh.connect([[]])
    await mesh.pull(0)
    return mesh


async def two_turns(mesh: GeneratorMesh, repeat: int, vocab_size: int) -> list[tuple[str, float, float]]:
    """Generate groups of one prompt each, then a second turn whose prompts append the answer of a tool to each
    sample. Return (turn, seconds, hit rate) of both. Both engines get the same prompts; no repeat shares any."""
    draws = random.Random(repeat)

    def tokens(n: int) -> list[int]:
        return draws.choices(range(vocab_size), k=n)

    async def timed(requests: Sequence[Request]) -> tuple[list[list[Completion]], float, float]:
        (before,) = await mesh.stats()
        began = time.perf_counter()
        answers = await asyncio.gather(*map(mesh.generate, requests))
        took = time.perf_counter() - began
        (after,) = await mesh.stats()
        return answers, took, after.since(before).hit_rate

    first = [Request(f"first{g}", tokens(PROMPT), list(range(SAMPLES)), Sampling(NEW)) for g in range(GROUPS)]
    answers, took, hit = await timed(first)
    found = [(f"first turn: prompts of {PROMPT}", took, hit)]
    second = [
        Request(f"second{g}/{k}", [*request.tokens, *sample.tokens, *tokens(TOOL)], [k], Sampling(NEW))
        for g, (request, samples) in enumerate(zip(first, answers, strict=True))
        for k, sample in enumerate(samples)
    ]
    _, took, hit = await timed(second)
    return [*found, (f"second turn: prompts of {PROMPT} + {NEW} + {TOOL}", took, hit)]
