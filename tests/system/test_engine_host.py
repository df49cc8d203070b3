"""What the engine does around vLLM's model, next to vLLM's own scheduler, sampler and output objects: the same bits.

As in test_engine.py, one test runs this file's check_* functions in a separate pytest process.
"""

from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from support.engine_runs import finish, run, run_checks, withdraw_all
from support.tiny import tiny_llama
from titan_rl.actors.vllm.engine import Engine, EngineSettings, SampleId
from titan_rl.actors.vllm.vllm_args import sampling_params
from titan_rl.wire.types import Request, Sampling

CONTEXT = list(range(40))  # a full block of 32 tokens, and a part of one
STOPS = (2, 3)


def test_host_time_in_a_process_of_its_own() -> None:
    run_checks(__file__)


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> Engine:
    folder: Path = tmp_path_factory.mktemp("model")
    tiny_llama(max_position_embeddings=128).save_pretrained(folder)
    room: dict[str, Any] = {"max_model_len": 128, "max_num_seqs": 24, "kv_cache_memory_mb": 1}
    return Engine(EngineSettings(model_dir=str(folder), load_format="auto", **room))


@pytest.fixture
def engine(loaded: Engine) -> Iterator[Engine]:
    """An idle engine with an empty prefix cache."""
    loaded.set_version(0)
    yield loaded
    withdraw_all(loaded)


def requests() -> list[Request]:
    """Samples that cross the ends of blocks, more than fit at once; greedy ones, truncated ones, and ones that stop."""
    return [
        Request("group", CONTEXT, list(range(20)), Sampling(85)),
        Request("stops", CONTEXT[:7], list(range(8)), Sampling(24, stop_token_ids=STOPS)),
        Request("greedy", CONTEXT[:31], [1], Sampling(40, 0.0)),
        Request("truncated", CONTEXT[:32], [5, 6], Sampling(40, 0.7, top_p=0.8)),
        *(Request(f"short {i}", [1, i], [i], Sampling(i)) for i in range(1, 30)),
    ]


def by_vllm(engine: Engine, monkeypatch: pytest.MonkeyPatch, asked: list[Request]) -> dict[str, list[Any]]:
    """Run requests on the same model with vLLM's own engine around it: its scheduler, sampler and RequestOutputs."""
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.sample.ops import topk_topp_sampler as ops

    runner = engine._llm.model_executor.driver_worker.worker.model_runner
    sampler, ours = runner.sampler.topk_topp_sampler, ops.TopKTopPSampler.forward_cpu
    (vllms,) = [c.cell_contents for c in ours.__closure__ or () if "TopKTopPSampler" in repr(c.cell_contents)]
    with monkeypatch.context() as patch:
        patch.setattr(engine._llm.engine_core.engine_core.scheduler, "__class__", Scheduler)
        patch.setattr(sampler, "forward", vllms.__get__(sampler))
        for request in asked:
            prompt = {"type": "token", "prompt_token_ids": request.tokens, "cache_salt": str(engine._salt)}
            for i, seed in enumerate(request.seeds):
                params = sampling_params(request.sampling, seed, begun=0)
                engine._llm.add_request(f"{request.id}#{i}", prompt, params)
        found: dict[str, Any] = {}
        while engine._llm.has_unfinished_requests():
            for output in engine._llm.step():
                tokens, logprobs, _, _ = found.get(output.request_id, ([], [], "", 0))
                (delta,) = output.outputs
                reported = [*logprobs, *delta.logprobs.logprobs]
                found[output.request_id] = (
                    [*tokens, *delta.token_ids],
                    reported,
                    delta.finish_reason,
                    output.num_cached_tokens,
                )
    return {r.id: [found[f"{r.id}#{i}"] for i in range(len(r.seeds))] for r in asked}


def check_every_bit_is_that_of_vllms_own_engine(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = by_vllm(engine, monkeypatch, requests())
    engine.set_version(0)
    scheduler, before = engine._core._scheduler, engine.stats()
    preempted, planned = Counter[str](), Counter[bool]()
    preempt, plan = scheduler._preempt_request, scheduler._next_tokens
    monkeypatch.setattr(scheduler, "_preempt_request", lambda r, *a, **k: (preempted.update("x"), preempt(r, *a, **k)))
    monkeypatch.setattr(scheduler, "_next_tokens", lambda r: (output := plan(r), planned.update([bool(output)]))[0])
    found = run(engine, *requests())
    assert preempted["x"] > 0, "the KV cache shall be too small for all samples that begin"
    assert planned[True] > 20
    for id, samples in expected.items():
        assert [(c.tokens, c.logprobs, c.finish) for c in found[id]] == [sample[:3] for sample in samples]
    assert {c.finish for c in found["stops"]} == {"stop", "length"}
    after = engine.stats()
    cached = sum(sample[3] for samples in expected.values() for sample in samples)
    assert after.cached_tokens - before.cached_tokens == cached > 0
    assert after.prompt_tokens - before.prompt_tokens == sum(len(r.tokens) * len(r.seeds) for r in requests())


def check_a_request_is_validated_once_and_its_prompt_hashed_once(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    from vllm.v1.core import kv_cache_utils

    calls, hash_block = Counter[str](), kv_cache_utils.hash_block_tokens
    process = engine._core._inputs.process_inputs

    def validated(*arguments: Any, **named: Any) -> Any:
        calls["validated"] += 1
        return process(*arguments, **named)

    def hashed(*arguments: Any) -> Any:
        calls["hashed"] += 1
        return hash_block(*arguments)

    monkeypatch.setattr(engine._core._inputs, "process_inputs", validated)
    monkeypatch.setattr(kv_cache_utils, "hash_block_tokens", hashed)
    asked = Request("a", [*CONTEXT, *CONTEXT], list(range(16)), Sampling(4))
    engine.add([asked])
    assert calls == {"validated": 1, "hashed": 2}
    engine.step()
    begun = [w.begun for w in engine.withdraw([SampleId("a", i) for i in range(16)])]
    assert len(engine.step()) == 1
    engine.add(
        [replace(asked, begun=[*begun[:3], *(replace(b, tokens=[], logprobs=[], versions=[]) for b in begun[3:])])]
    )
    assert calls["validated"] == 1 + 3 + 1, "a sample with tokens has a context of its own"
    assert [len(c.tokens) for c in finish(engine)["a"]] == [4] * 16


def check_a_generator_is_asked_once_for_many_tokens(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    sizes, randint = list[int](), torch.randint
    monkeypatch.setattr(torch, "randint", lambda *a, **k: (sizes.append(a[2][0]), randint(*a, **k))[1])
    run(engine, Request("a", CONTEXT, [1, 2, 3], Sampling(33)))
    assert sizes == [16] * 9


def check_engines_that_vllm_would_not_plan_like_this_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    from titan_rl.actors.vllm import step_scheduler

    monkeypatch.setattr(step_scheduler, "__version__", "0.33.1")
    with pytest.raises(RuntimeError, match=r"step_scheduler.py: expected vLLM 0.32.0, found 0.33.1"):
        step_scheduler.StepScheduler()
