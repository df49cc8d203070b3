"""A thousand sessions at once on a real engine: how much of the time it has work, and whether memory grows.

Each session plays turns of set length with a tool that takes a while; when its rollout ends, another begins. The parts
are the same as in a run: player, ledger, environment processes, generator mesh, and a model of grpo_llama's size with
random weights. Only the trainers are missing.
"""

import argparse
import asyncio
import cProfile
import os
import pstats
import random
import time
from collections.abc import Callable, Sequence
from itertools import count
from pathlib import Path
from typing import Any

import psutil

from bench.rows import Row
from bench.step_shapes import SHAPES
from titan_rl.wire.reports import EngineStats

PROMPT_TOKENS = 14
WARM_UP, WINDOWS = 3.0, 3  # seconds until all sessions have begun; equal parts of the measured time


def build_model(folder: Path) -> None:
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    s = SHAPES["grpo_llama"]
    config = LlamaConfig(
        vocab_size=s.vocab_size,
        hidden_size=s.dim,
        intermediate_size=s.hidden_dim,
        num_hidden_layers=s.n_layers,
        num_attention_heads=s.n_heads,
        num_key_value_heads=s.n_kv_heads,
        initializer_range=0.09,
    )
    LlamaForCausalLM(config).save_pretrained(folder)


async def started_engine(folder: Path, options: argparse.Namespace) -> Any:
    """Return a generator mesh of one replica that serves version 0."""
    from monarch.actor import this_host

    from titan_rl.actors.vllm import vllm_cpu
    from titan_rl.actors.vllm.engine import EngineSettings
    from titan_rl.meshes.generator_mesh import GeneratorMesh

    settings = EngineSettings(
        model_dir=str(folder),
        max_model_len=1024,
        max_num_seqs=options.sequences,
        kv_cache_memory_mb=512,
        load_format="auto",
    )
    mesh = await GeneratorMesh.spawn(this_host(), settings, replicas=1, env=vllm_cpu.ENV | {"OMP_NUM_THREADS": "1"})
    await mesh.start()
    await mesh.connect([[]])
    await mesh.pull(0)
    return mesh


async def busy_seconds(mesh: Any, begin: int, end: int) -> float:
    """Return the seconds between two times in which the engine had something to sample."""
    (asked,) = mesh.spans().values()
    spans = [s for s in (await asked).spans if s.name == "sampling"]
    return sum(max(0, min(s.end, end) - max(s.begin, begin)) for s in spans) / 1e9


async def keep_busy(driver: Any, mesh: Any, folder: Path, options: argparse.Namespace) -> list[dict[str, float]]:
    """Keep `options.rollouts` sessions open, and return the measurements of each window."""
    from titan_rl.record.ledger import Ledger
    from titan_rl.rollout.player import Play, Player
    from titan_rl.rollout.session import SessionLimits
    from titan_rl.wire.spans import span
    from titan_rl.wire.types import Prompt, Sampling

    numbers, draw, ended = count(), random.Random(0), 0
    limits = SessionLimits(context=1000, seconds=600)
    player = Player(driver, mesh, lambda tokens: "", limits=limits, ledger=Ledger(folder))

    async def session() -> None:
        nonlocal ended
        while True:
            number = next(numbers)
            row = {"turns": options.turns, "seconds": options.tool_seconds, "block": False}
            prompt = Prompt(number, "7=", draw.choices(range(4, 60), k=PROMPT_TOKENS), "", row)
            play = Play(id=f"prompt-{number}.0", prompt=prompt, sampling=Sampling(options.tokens), group=str(number))
            rollout = await player.play(play)
            if rollout.status != "completed":
                raise RuntimeError(f"expected a completed rollout, found {rollout.status}: {rollout.error}")
            ended += 1

    async def window(seconds: float) -> dict[str, float]:
        before, done, began = await totals(mesh), ended, span.now()
        cpu, clock = time.process_time(), time.perf_counter()
        await asyncio.sleep(seconds)
        wall, cpu = time.perf_counter() - clock, time.process_time() - cpu
        busy, after = await busy_seconds(mesh, began, span.now()), await totals(mesh)
        turns = (after.tokens - before.tokens) / options.tokens
        megabytes = {pid_name: rss / 2**20 for pid_name, rss in memory().items()}
        return {
            "engine has work, share of the time": busy / wall,
            "controller share of a core": cpu / wall,
            "controller CPU per turn, ms": 1000 * cpu / turns,
            "turns / s": turns / wall,
            "rollouts / s": (ended - done) / wall,
            "sequences in an engine step": turns * options.tokens / max(1, after.steps - before.steps),
            **megabytes,
        }

    async with asyncio.TaskGroup() as tasks:
        running = [tasks.create_task(session()) for _ in range(options.rollouts)]
        await asyncio.sleep(WARM_UP)
        found = [await window(options.seconds / WINDOWS) for _ in range(WINDOWS)]
        for task in running:
            task.cancel()
    return found


async def totals(mesh: Any) -> EngineStats:
    (stats,) = await mesh.stats()
    return stats


def memory() -> dict[str, float]:
    """Return resident bytes of the controller, and of all processes that it has started."""
    own = psutil.Process()
    started = sum(child.memory_info().rss for child in own.children(recursive=True))
    return {"controller's memory, MiB": own.memory_info().rss, "other processes' memory, MiB": started}


async def measure_sessions(
    options: argparse.Namespace, folder: Path, spawn_environments: Callable[[], Any]
) -> Sequence[Row]:
    build_model(folder / "model")
    engine, environments = await asyncio.gather(started_engine(folder / "model", options), spawn_environments())
    profile = cProfile.Profile(time.thread_time)
    if options.profile:
        profile.enable()
    windows = await keep_busy(environments, engine, folder, options)
    if options.profile:
        profile.disable()
        pstats.Stats(profile).sort_stats("tottime").print_stats(60)
    await environments.close()
    await engine.close()
    await engine.stop()
    case = (
        f"{options.rollouts} sessions of {options.turns} turns of {options.tokens} tokens, "
        f"{1000 * options.tool_seconds:g} ms tools, 0.8M parameters, {os.cpu_count()} cores"
    )
    rows = [Row("sessions", case, name, [each[name] for each in windows], way=case) for name in windows[0]]
    for name in memory():
        grown = windows[-1][name] - windows[0][name]
        rows.append(
            Row("sessions", case, name.replace("MiB", f"grown in {options.seconds:g} s, MiB"), [grown], way=case)
        )
    return rows
