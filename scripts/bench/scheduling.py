"""Milliseconds of an engine's decode steps on this CPU, with vLLM's asynchronous scheduling or without.

.venv/bin/python scripts/bench/scheduling.py MODEL_FOLDER synchronous
.venv/bin/python scripts/bench/scheduling.py MODEL_FOLDER asynchronous
"""

import os
import random
import sys
import time

from titan_rl.actors.vllm import vllm_cpu
from titan_rl.actors.vllm.engine import Engine, EngineSettings
from titan_rl.actors.vllm.launch_env import ENV
from titan_rl.wire.types import Request, Sampling

ROUNDS, TOKENS, GROUP = 6, 32, 8


def main() -> None:
    os.environ.update(ENV | vllm_cpu.ENV)
    folder, scheduling = sys.argv[1:]
    settings = EngineSettings(
        model_dir=folder, max_model_len=96, kv_cache_memory_mb=64, async_scheduling=scheduling == "asynchronous"
    )
    engine = Engine(settings)
    engine.set_version(0)
    draw = random.Random(1)
    contexts = [[draw.randrange(3, 60) for _ in range(40)] for _ in range(256 // GROUP)]
    for sequences in (64, 256):
        seconds = list[float]()
        for round in range(ROUNDS):
            for i, context in enumerate(contexts[: sequences // GROUP]):
                seeds = list(range(GROUP * i, GROUP * (i + 1)))
                engine.add([Request(f"{round}.{i}", context, seeds, Sampling(TOKENS))])
            steps = list[float]()
            while engine.busy:
                began = time.perf_counter()
                engine.step()
                steps.append(time.perf_counter() - began)
            seconds.append(sorted(steps)[len(steps) // 2])
        print(f"{scheduling}, {sequences} sequences: {1e3 * min(seconds[1:]):.2f} ms, the least median of a round")
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
