"""Drives an Engine of this project on vLLM's CUDA build with CPU tensors, and compares it with Hugging Face's forward.

Runs by cuda_on_cpu.py, and prints a JSON line: the classes that ran, and the tags of memory that sleep backs up or
discards.
"""

import asyncio
import json
from dataclasses import replace
from typing import Any

from support.cuda_on_cpu import GARBAGE
from support.engine_runs import CONTEXT, finish, gap, overwrite, preempted, reference, run
from support.tiny import perturbed, tiny_llama
from titan_rl.actors.vllm.engine import Engine, EngineSettings
from titan_rl.actors.vllm.vllm_params import pieces
from titan_rl.config.sections import WeightSyncSection
from titan_rl.ext.kept_sets.kept_sets import size_of
from titan_rl.wire.model_shape import shape_of_folder
from titan_rl.wire.types import Completion, Request, Sampling
from titan_rl.wire.weight_plan import Shard, plan
from titan_rl.wire.weight_source import Source

CLOSE, APART = 1e-4, 1e-2  # |log-prob - reference|: with the same weights; with others


def steps(engine: Engine, count: int) -> None:
    for _ in range(count):
        assert engine.step() == []


def close(model: Any, completion: Completion, temperature: float = 1.0, context: list[int] = CONTEXT) -> bool:
    assert len(completion.tokens) == len(completion.logprobs) == len(completion.versions)
    return max(gap(model, completion, temperature, context)) < CLOSE


def check_samplings(engine: Engine, model: Any) -> None:
    """Each row of a batch has its own sampling, stop tokens and kept sets, and each token its own log-prob."""
    scored = Sampling(2, 0.0, scores_context=True)
    first = run(engine, Request("plain", CONTEXT, [0, 1], Sampling(4)))["plain"]
    stop = first[1].tokens[2]
    found = run(
        engine,
        Request("plain", CONTEXT, [0], Sampling(4)),
        Request("stop", CONTEXT, [1], Sampling(8, stop_token_ids=(stop,))),
        Request("warm", CONTEXT, [2], Sampling(4, 0.7)),
        Request("greedy", CONTEXT, [3], Sampling(4, 0.0)),
        Request("top", CONTEXT, [4], Sampling(4, top_p=0.5)),
        Request("scored", list(range(3, 43)), [5], scored),
    )
    one = {id: completion for id, (completion,) in found.items()}
    assert one["plain"].tokens == first[0].tokens, "a seed decides its sample in any batch"
    assert (one["plain"].finish, one["plain"].versions) == ("length", [0] * 4)
    assert one["stop"].finish == "stop"
    assert one["stop"].tokens == first[1].tokens[: first[1].tokens.index(stop) + 1]
    assert close(model, one["plain"])
    assert close(model, one["stop"])
    assert close(model, one["warm"], 0.7)
    assert one["greedy"].tokens == reference(model, CONTEXT, one["greedy"].tokens, 1.0).argmax(-1).tolist()
    rows = reference(model, CONTEXT, one["top"].tokens, 1.0)
    top = one["top"]
    records = "kept" in top.extras
    for i, (row, token, logprob) in enumerate(zip(rows, top.tokens, top.logprobs, strict=True)):
        probs, order = row.exp().sort(descending=True)
        count = int((probs.cumsum(0) - probs < 0.5).sum())
        assert abs(row[token].item() - probs[:count].sum().log().item() - logprob) < CLOSE
        assert not records or size_of(top.extras["kept"][i]) == count
        assert token in order[:count]
    assert not any(one["plain"].extras.get("kept", ()))
    expected = reference(model, [3], list(range(4, 43)), 1.0)
    for row, token, score in zip(expected, range(4, 43), one["scored"].context, strict=True):
        assert abs(row[token].item() - score.logprob) < CLOSE
        assert score.best == row.argmax().item()


def check_versions(engine: Engine, model: Any, *, keep: bool) -> None:
    """A new version swaps the weights between two steps of unfinished samples; another request joins."""
    changed = perturbed(model)
    engine.add([Request("a", CONTEXT, [0, 1], Sampling(6))])
    steps(engine, 3)
    engine.suspend()
    overwrite(engine, changed)
    engine.set_version(1, keep=keep)
    engine.add([Request("b", CONTEXT, [2], Sampling(3))])
    done = finish(engine)
    overwrite(engine, model)
    engine.set_version(0)
    for completion in done["a"]:
        assert completion.versions == [0, 0, 0, 1, 1, 1]
        old, new = gap(model, completion), gap(changed, completion)
        assert max(old[:3]) < CLOSE
        assert max(old[3:]) > APART
        assert (max(new[3:]) < CLOSE) != keep, "with keys and values of the old weights exactly if they are kept"
    assert close(changed, done["b"][0])
    assert done["b"][0].versions == [1, 1, 1], "no cached prefix of the old weights"


def check_withdrawn(engine: Engine, model: Any) -> None:
    """A withdrawn sample can be resumed."""
    asked = Request("a", CONTEXT, [0, 1], Sampling(5, 0.0))
    whole = run(engine, asked)["a"]
    engine.add([asked])
    steps(engine, 2)
    (withdrawn,) = engine.withdraw(["a"])
    assert not engine.busy
    assert [(c.finish, len(c.tokens)) for c in withdrawn.completions] == [("abort", 2)] * 2
    rest = run(engine, replace(asked, begun=withdrawn.completions))["a"]
    assert [c.tokens for c in rest] == [c.tokens for c in whole]
    assert all(close(model, c) for c in rest)


def synced(engine: Engine, model: Any, folder: str) -> tuple[Any, Any]:
    """Return a trainer's staging of the model, and the landing of the engine's parameters."""
    import torch

    from titan_rl.actors.sync.landing import Landing
    from titan_rl.actors.sync.staging import Staging

    weights = {name: weight.detach() for name, weight in model.state_dict().items()}
    shards = [Shard(name, 0, len(w), 0, w.shape[-1] if w.dim() > 1 else 1) for name, w in weights.items()]
    copies = plan([shards], [pieces(shape_of_folder(folder, "folder"), tp=1, rank=0)]).copies[0, 0]
    staging = Staging(weights, {0: copies}, torch.float32, slice_bytes=1 << 16, block_bytes=1 << 12)
    source = Source(0, staging.offer(remote=False)[0], copies, "float32", 1 << 12)
    return staging, Landing(engine.params(), [source], WeightSyncSection(verify="live"))


def check_sleep(engine: Engine, model: Any, folder: str) -> dict[str, list[str]]:
    """Level 2 discards weights and keys and values, restores buffers, and a sync lets samples continue."""
    staging, landing = synced(engine, model, folder)
    from vllm.device_allocator import get_mem_allocator_instance

    allocator: Any = get_mem_allocator_instance()
    data = allocator.pointer_to_data
    backed_up: set[str] = set()
    copy = allocator.sleep

    def sleep(*arguments: Any, **named: Any) -> None:
        copy(*arguments, **named)
        assert all(each.is_asleep for each in data.values())
        backed_up.update(each.tag for each in data.values() if each.cpu_backup_tensor is not None)

    allocator.sleep = sleep
    engine.add([Request("a", CONTEXT, [0, 1], Sampling(6))])
    steps(engine, 3)
    buffers = engine._buffer_sums()
    for version in range(1, 3):
        engine.sleep()
        landing.forget()
        assert engine.asleep
        assert engine.busy
        assert engine.step() == []
        parameters = engine.params().values()
        assert all((p.reshape(-1).view(p.new_empty(0).byte().dtype) == GARBAGE).all() for p in parameters)
        engine.wake()
        assert engine._buffer_sums() == buffers
        engine.suspend()
        manifests = [staging.pack(version, version % 2, version)[0]]
        asyncio.run(landing.fetch_weights(manifests, 30))
        asyncio.run(landing.write_weights(30))
        engine.set_version(version)
    for completion in finish(engine)["a"]:
        assert completion.finish == "length"
        assert close(model, completion)
    tags = {each.tag for each in data.values()}
    return {"backed_up": sorted(backed_up), "discarded": sorted(tags - backed_up)}


def main(folder: str, scheduling: str) -> None:
    asynchronous = scheduling == "asynchronous"
    model = tiny_llama(max_position_embeddings=1024)
    model.save_pretrained(folder)
    settings = EngineSettings(
        model_dir=folder, max_model_len=1024, kv_cache_memory_mb=1, load_format="auto", sleeps=True,
        max_num_batched_tokens=1024, records=() if asynchronous else ("kept",), async_scheduling=asynchronous,
    )  # fmt: skip
    engine = Engine(settings)
    engine.set_version(0)
    assert engine.offloads
    assert engine.info.runner == "V2"
    core = engine._llm.engine_core.engine_core
    assert core.vllm_config.cache_config.gpu_memory_utilization == 0.5, "half of the free memory"
    runner = core.model_executor.driver_worker.worker.model_runner
    check_samplings(engine, model)
    check_versions(engine, model, keep=False)
    check_versions(engine, model, keep=True)
    check_withdrawn(engine, model)
    for context, completion in preempted(engine):
        assert len(completion.tokens) == 6
        assert close(model, completion, context=context)
    sleep = check_sleep(engine, model, folder)
    engine.set_version(0)
    check_samplings(engine, model)
    worker, states = core.model_executor.driver_worker.worker, (runner.req_states, runner.sampler)
    made = [type(each) for each in (core.scheduler, core.model_executor, worker, runner, *states)]
    classes = [*made, runner.attn_groups[0][0].backend]
    print(json.dumps({"classes": [f"{kind.__module__}.{kind.__qualname__}" for kind in classes], **sleep}))
