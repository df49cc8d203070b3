#!/usr/bin/env python3
"""Print the seconds of an engine's steps by the number of sequences, or the seconds of a wake by the size of its cache.

    python scripts/gpu_visit/profile_sampling.py FOLDER --seqs 64 256 --tokens 96       # titan_rl's engine
    python scripts/gpu_visit/profile_sampling.py FOLDER --seqs 64 256 --bare            # vLLM's, with its own defaults
    python scripts/gpu_visit/profile_sampling.py FOLDER --kv-mb 32768 --sleeps 3

FOLDER has config.json; weights are random. Prints a JSON line for the start and for each number of sequences. A step
at which all sequences sample one token is a decode step; the first one reads the prompts.
"""

import argparse
import json
import os
import random
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from titan_rl.wire.gpus import PLANNED
from titan_rl.wire.types import Request, Sampling

if TYPE_CHECKING:
    from titan_rl.actors.vllm.engine import Engine

ON_CPU = os.environ.get(PLANNED) == "cpu"
PROMPT, GROUP = 40, 8  # tokens; samples of a prompt
ROUNDS = 3  # the first one warms up


def requests(seqs: int, tokens: int, tag: str) -> list[Request]:
    """Return groups of samples of random prompts; every sample has all its tokens."""
    draw = random.Random(7)
    sampling = Sampling(max_new_tokens=tokens, temperature=1.0, stop_token_ids=())
    size = min(GROUP, seqs)
    return [
        Request(
            f"{tag}-{i}",
            [draw.randrange(3, 250) for _ in range(PROMPT)],
            list(range(i * size, (i + 1) * size)),
            sampling,
        )
        for i in range(seqs // size)
    ]


def timed(busy: Callable[[], bool], step: Callable[[], Any]) -> list[float]:
    seconds = list[float]()
    while busy():
        began = time.perf_counter()
        step()
        seconds.append(time.perf_counter() - began)
    return seconds


def set_environment() -> None:
    """Set what vLLM and torch read when they are imported, as a generator's process has it."""
    from titan_rl.actors.vllm.launch_env import ENV

    os.environ.update(ENV)
    if ON_CPU:
        from titan_rl.actors.vllm import vllm_cpu

        os.environ.update(vllm_cpu.ENV)


def titan_engine(a: argparse.Namespace) -> "Engine":
    from titan_rl.actors.vllm.engine import Engine, EngineSettings

    engine = Engine(
        EngineSettings(
            model_dir=str(a.folder),
            dtype="float32" if ON_CPU else "bfloat16",
            enforce_eager=ON_CPU or a.sleeps > 0,  # graphs take most of a start, and a wake does not depend on them
            max_num_seqs=max(a.seqs),
            kv_cache_memory_mb=a.kv_mb,
            max_model_len=PROMPT + a.tokens + 8,
            max_num_batched_tokens=8192,
            block_size=32 if ON_CPU else 16,
            sleeps=a.sleeps > 0,
        )
    )
    engine.set_version(0)
    return engine


def bare_engine(a: argparse.Namespace) -> Any:
    """Return vLLM's own engine with its defaults, but for the sizes, random weights and log-probs."""
    from vllm import EngineArgs, LLMEngine

    return LLMEngine.from_engine_args(
        EngineArgs(
            model=str(a.folder),
            skip_tokenizer_init=True,
            load_format="dummy",
            dtype="float32" if ON_CPU else "bfloat16",
            enforce_eager=ON_CPU,
            max_num_seqs=max(a.seqs),
            kv_cache_memory_bytes=a.kv_mb << 20,
            max_model_len=PROMPT + a.tokens + 8,
            generation_config="vllm",
        )
    )


def round_of(engine: Any, a: argparse.Namespace, seqs: int, tag: str) -> list[float]:
    made = requests(seqs, a.tokens, tag)
    if not a.bare:
        engine.add(made)
        return timed(lambda: engine.busy, engine.step)
    from vllm import SamplingParams

    for request in made:
        for seed in request.seeds:
            params = SamplingParams(max_tokens=a.tokens, ignore_eos=True, seed=seed, logprobs=0, detokenize=False)
            prompt = {"prompt_token_ids": [*request.tokens]}
            engine.add_request(f"{request.id}-{seed}", prompt, params)
    return timed(engine.has_unfinished_requests, engine.step)


def sampling(engine: Any, a: argparse.Namespace) -> None:
    for seqs in a.seqs:
        rounds = [round_of(engine, a, seqs, f"{seqs}.{i}") for i in range(ROUNDS)]
        decode = sorted(seconds for steps in rounds[1:] for seconds in steps[2:-2] or steps)
        line = {
            "seqs": seqs,
            "steps": len(rounds[-1]),
            "first_step_ms": 1e3 * rounds[-1][0],
            "decode_step_ms": 1e3 * statistics.median(decode),
            "least_ms": 1e3 * decode[0],
            "round_s": min(map(sum, rounds[1:])),
        }
        print(json.dumps(line), flush=True)


def waking(engine: "Engine", a: argparse.Namespace) -> None:
    import torch

    for _ in range(a.sleeps):
        seconds = list[float]()
        free = 0
        for change in (engine.sleep, engine.wake):
            began = time.perf_counter()
            change()
            if not ON_CPU:
                torch.accelerator.synchronize()
                free = free or torch.cuda.mem_get_info()[0]
            seconds.append(time.perf_counter() - began)
        engine.suspend()
        engine.set_version(1)
        line = {"kv_mb": a.kv_mb, "sleep_s": seconds[0], "wake_s": seconds[1], "free_asleep_gib": free / 2**30}
        print(json.dumps(line), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--seqs", type=int, nargs="+", default=[16, 64, 256])
    parser.add_argument("--tokens", type=int, default=64, help="of each answer")
    parser.add_argument("--kv-mb", type=int, default=2048, help="KV cache, MiB")
    parser.add_argument("--bare", action="store_true")
    parser.add_argument(
        "--sleeps", type=int, default=0, help="measure this number of sleeps and wakes instead of steps"
    )
    a = parser.parse_args()
    set_environment()
    began = time.perf_counter()
    engine: Any = bare_engine(a) if a.bare else titan_engine(a)
    vllm: Any = engine if a.bare else engine._llm
    facts = {
        "engine": "vLLM" if a.bare else "titan_rl",
        "start_s": time.perf_counter() - began,
        "async_scheduling": vllm.vllm_config.scheduler_config.async_scheduling,
    }
    print(json.dumps(facts), flush=True)
    waking(engine, a) if a.sleeps else sampling(engine, a)
    sys.stdout.flush()
    os._exit(0)  # vLLM's process group may keep an interpreter from its end


if __name__ == "__main__":
    main()
