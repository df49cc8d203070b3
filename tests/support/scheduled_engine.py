"""Samples over switches of weights, with vLLM's asynchronous scheduling or without, in a process with one engine."""

import json
from collections.abc import Sequence
from dataclasses import asdict, replace
from typing import Any

from support.engine_runs import overwrite
from titan_rl.actors.vllm.engine import Engine, EngineSettings
from titan_rl.wire.types import Completion, Request, Sampling

CONTEXT = list(range(40))  # one full block of 32 tokens, and a part of one
GROUP = Request("group", CONTEXT, list(range(8)), Sampling(24))
SLEEPS, WITHDRAWN, RESUMED = 5, 6, 11  # after how many steps


def sample(
    first: str,
    second: str,
    *,
    asynchronous: bool,
    switches: Sequence[int],
    dtype: Any = "float32",
    disturbed: bool = False,
    drains: bool = True,
) -> None:
    """Print the samples of requests, by id. After each number of steps in `switches` the engine serves the other
    folder's weights. Unfinished samples keep their keys and values, and every other time not if `disturbed`.
    """
    from transformers import AutoModelForCausalLM

    room: dict[str, Any] = {"max_model_len": 128, "max_num_seqs": 32, "kv_cache_memory_mb": 32}
    engine = Engine(
        EngineSettings(model_dir=first, load_format="auto", dtype=dtype, async_scheduling=asynchronous, **room)
    )
    queue = engine._llm.engine_core.engine_core.batch_queue
    assert (queue is not None) == asynchronous
    if not drains:
        engine._drain = lambda: None
    models = [AutoModelForCausalLM.from_pretrained(folder) for folder in (first, second)]
    engine.set_version(0)
    stopped = Request("stopped", CONTEXT[:7], list(range(8)), Sampling(30, stop_token_ids=(2, 3)))
    engine.add([GROUP, stopped, replace(GROUP, id="moved", seeds=[8, 9])] if disturbed else [GROUP])
    done, begun, version = dict[str, list[Completion]](), list[Completion](), 0
    for step in range(1, 60):
        done |= {each.id: each.completions for each in engine.step()}
        if disturbed and step == SLEEPS:
            engine.sleep()
            engine.wake()
        if disturbed and step == WITHDRAWN:
            (withdrawn,) = engine.withdraw(["moved"])
            begun = withdrawn.completions
            assert [len(each.tokens) for each in begun] == [WITHDRAWN] * 2
        if disturbed and step == RESUMED:
            engine.add([replace(GROUP, id="moved", seeds=[8, 9], begun=begun)])
        if step in switches:
            assert bool(queue) == asynchronous, "a batch is in flight between two steps"
            engine.suspend()
            assert not queue or not drains
            version += 1
            overwrite(engine, models[version % 2])
            engine.set_version(version, keep=not disturbed or version % 2 == 0)
    assert not engine.busy
    print("FOUND", json.dumps({id: [asdict(each) for each in completions] for id, completions in done.items()}))
