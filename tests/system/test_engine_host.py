"""What the engine does around vLLM's model, next to vLLM's own scheduler, runner, sampler and output objects: the same
bits.

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
from titan_rl.actors.vllm.plain_batch import READERS
from titan_rl.actors.vllm.vllm_args import sampling_params
from titan_rl.kernels import cpu_matmul
from titan_rl.wire.types import Request, Sampling

CONTEXT = list(range(40))  # a full block of 32 tokens, and a part of one
STOPS = (2, 3)
MOVED = [SampleId("a", i) for i in (0, 2, 4)] + [SampleId("c", 1), SampleId("alike", 0)]
ALIKE = Request("alike", CONTEXT[3:12], list(range(6)), Sampling(60, 0.02))  # they sample the same for a while


def test_host_time_in_a_process_of_its_own() -> None:
    run_checks(__file__)


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> Engine:
    folder: Path = tmp_path_factory.mktemp("model")
    model = tiny_llama(max_position_embeddings=128)
    model.save_pretrained(folder)
    exact = not rows_are_alike(model)
    if exact:
        print("this CPU's products of a few rows add up in another order than those of many: compared in exact mode")
    room: dict[str, Any] = {"max_model_len": 128, "max_num_seqs": 24, "kv_cache_memory_mb": 1}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("titan_rl.actors.vllm.plain_batch.DRAWN", 16)  # so that samples draw noise more than once
        return Engine(EngineSettings(model_dir=str(folder), load_format="auto", exact=exact, **room))


def rows_are_alike(model: Any) -> bool:
    """Return whether a row's product has the same bits in a batch of READERS rows as in a larger one."""
    import torch

    cpu_matmul.use_fastest()  # as the engine will
    with torch.inference_mode():
        for weight in model.parameters():
            if weight.dim() == 2:
                rows = torch.randn(256, weight.shape[1])
                whole = torch.nn.functional.linear(rows, weight)
                for count in range(READERS, len(rows)):
                    if not torch.equal(torch.nn.functional.linear(rows[:count], weight), whole[:count]):
                        return False
    return True


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
    """Run requests on the same model by vLLM's own engine: scheduler, runner, sampler and RequestOutputs."""
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.worker.cpu_model_runner import CPUModelRunner

    runner = engine._llm.model_executor.driver_worker.worker.model_runner
    sampler = runner.sampler.topk_topp_sampler
    assert runner.plain
    with monkeypatch.context() as patch:
        patch.setattr(engine._llm.engine_core.engine_core.scheduler, "__class__", Scheduler)
        patch.setattr(runner, "__class__", CPUModelRunner)
        patch.setattr(sampler, "forward", sampler.forward_cpu)
        patch.delattr(runner.sampler, "gather_logprobs")
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
    preempted, planned = Counter[str](), Counter[str]()
    preempt, plan = scheduler._preempt_request, scheduler._plan

    def counted() -> Any:
        if (output := plan()) is not None:
            new, old = bool(output.scheduled_new_reqs), bool(output.scheduled_cached_reqs.req_ids)
            planned.update(["both" if new and old else "new" if new else "old"])
        return output

    monkeypatch.setattr(scheduler, "_preempt_request", lambda r, *a, **k: (preempted.update("x"), preempt(r, *a, **k)))
    monkeypatch.setattr(scheduler, "_plan", counted)
    found = run(engine, *requests())
    assert preempted["x"] > 0, "the KV cache shall be too small for all samples that begin"
    assert planned["old"] > 20, "steps without new samples shall be planned without vLLM"
    assert planned["both"] > 3, "samples shall enter among others without vLLM"
    assert planned["new"] > 0, "samples shall enter an empty batch without vLLM"
    for id, samples in expected.items():
        assert [(c.tokens, c.logprobs, c.finish) for c in found[id]] == [sample[:3] for sample in samples]
    assert {c.finish for c in found["stops"]} == {"stop", "length"}
    after = engine.stats()
    cached = sum(sample[3] for samples in expected.values() for sample in samples)
    assert after.cached_tokens - before.cached_tokens == cached > 0
    assert after.prompt_tokens - before.prompt_tokens == sum(len(r.tokens) * len(r.seeds) for r in requests())


@pytest.fixture
def ways(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """How many steps were those of the plain batch, how often vLLM took over from it, how many sampled tokens were not
    read because another sample did, and how many tokens of contexts: by all samples, and by those that end where they
    began."""
    plain, counts = engine._core._plain, Counter[str]()
    assert plain is not None
    step, leave, logits = plain.step, plain.leave, plain._logits

    def with_followers(reads: Any) -> Any:
        for row in plain._followers.among(plain._alive()):
            unread, fresh = int(plain._lengths[row] - plain._computed[row]), plain._lengths[row] == plain._starts[row]
            stays = SampleId(plain._entries[row].request.id, int(plain._nths[row])) not in MOVED
            if fresh:
                counts.update(shared=unread, reported=unread if stays else 0)
            else:
                counts.update(followed=unread)
        return logits(reads)

    monkeypatch.setattr(plain, "step", lambda: (counts.update(["plain"]), step())[1])
    monkeypatch.setattr(plain, "leave", lambda: (counts.update(["left"]), leave())[1])
    monkeypatch.setattr(plain, "_logits", with_followers)
    return counts


@pytest.mark.parametrize("fits", [True, False])
def check_every_bit_of_plain_samples_is_that_of_vllms_own_engine(
    engine: Engine, monkeypatch: pytest.MonkeyPatch, ways: Counter[str], fits: bool
) -> None:
    asked = [request for request in requests() if request.id != "truncated"]
    if fits:
        asked[0] = replace(asked[0], seeds=list(range(6)))
    expected = by_vllm(engine, monkeypatch, asked)
    engine.set_version(0)
    before = engine.stats()
    found = run(engine, *asked)
    assert (ways["plain"] > 20, ways["left"]) == (True, 0 if fits else 1)
    for id, samples in expected.items():
        assert [(c.tokens, c.logprobs, c.finish) for c in found[id]] == [sample[:3] for sample in samples]
    cached = sum(sample[3] for samples in expected.values() for sample in samples)
    assert ways["shared"] > 0
    assert engine.stats().cached_tokens - before.cached_tokens - ways["reported"] == cached > 0


def story(engine: Engine, event: str) -> list[Any]:
    """Return all that can be seen of samples that arrive, move, and end while others are sampled, and of an event."""
    before, read, seen, done = engine.stats(), engine.report().read, list[Any](), dict[str, Any]()

    def steps(count: int) -> None:
        for _ in range(count):
            done.update((each.id, each.completions) for each in engine.step())
            seen.append({id: dict(lengths) for id, lengths in engine.report().lengths.items()})

    engine.add([Request("a", CONTEXT, list(range(5)), Sampling(70)), Request("b", [5] * 7, [8, 9], Sampling(30))])
    engine.add([ALIKE])
    steps(6)
    engine.add([Request("c", CONTEXT[:33], [1, 2, 3], Sampling(60, stop_token_ids=STOPS)), *requests()[2:3]])
    steps(20)
    moved = engine.withdraw(MOVED)
    seen.append(moved)
    engine.set_version(1, keep=True)
    begun = [one.begun for one in moved if one.sample.request == "a"]
    engine.add([Request("d", CONTEXT, [0, 2, 4], Sampling(70), begun), Request("e", CONTEXT, [7], Sampling(80))])
    steps(10)
    if event in ("dropped keys and values", "both"):
        engine.set_version(2)
    if event in ("a truncated request", "both"):
        engine.add([replace(requests()[3], sampling=Sampling(12, 0.7, top_p=0.8))])
    if event == "a sleep":
        engine.sleep()
        engine.suspend()
        engine.wake()
        engine.set_version(2, keep=True)
    steps(10)
    engine.add([Request("f", [9], [3], Sampling(3)), Request("g", CONTEXT, [6], Sampling(20))])
    while engine.busy:
        steps(1)
    after = engine.stats()
    names = "tokens", "prompt_tokens", "recomputed", "cached_tokens"
    return [seen, done, *(getattr(after, one) - getattr(before, one) for one in names), engine.report().read - read]


@pytest.mark.parametrize("event", ["nothing", "a truncated request", "dropped keys and values", "both", "a sleep"])
def check_whatever_happens_between_plain_samples_it_is_as_in_vllms_way(
    engine: Engine, monkeypatch: pytest.MonkeyPatch, ways: Counter[str], event: str
) -> None:
    found = story(engine, event)
    assert ways["followed"] > 20
    assert (ways["plain"] > 30, ways["left"]) == (True, event not in ("nothing", "dropped keys and values"))
    engine.set_version(0)
    with monkeypatch.context() as patch:
        patch.setattr(engine._core, "_plain", None)
        *expected, cached, read = story(engine, event)
    assert found == [*expected, cached + ways["reported"], read - ways["shared"]]
    assert ways["shared"] > 0
    engine.set_version(0)
    ways.clear()
    run(engine, Request("again", CONTEXT, [0], Sampling(20)))
    assert ways["plain"] == 20, "once vLLM has no samples left, it gets no plain ones"


@pytest.mark.parametrize("temperature", [0.0, 0.01, 0.03, 0.1])
def check_samples_that_sample_alike_are_read_once(
    engine: Engine, monkeypatch: pytest.MonkeyPatch, ways: Counter[str], temperature: float
) -> None:
    """They part after any number of tokens, in blocks and at their ends, and end by themselves or at their limits."""
    asked = [
        Request("a", CONTEXT[:29], list(range(6)), Sampling(70, temperature, stop_token_ids=STOPS)),
        Request("b", CONTEXT[:29], list(range(6)), Sampling(37, temperature)),
        Request("c", CONTEXT[:7], list(range(4)), Sampling(26, temperature)),
    ]
    expected = by_vllm(engine, monkeypatch, asked)
    engine.set_version(0)
    found = run(engine, *asked)
    for id, samples in expected.items():
        assert [(c.tokens, c.logprobs, c.finish) for c in found[id]] == [sample[:3] for sample in samples]
    assert ways["followed"] > 20
    assert ways["left"] == 0


def check_samples_that_begin_together_read_a_context_once(engine: Engine) -> None:
    before, read = engine.stats(), engine.report().read
    same = [Request(name, CONTEXT[:7], list(range(count)), Sampling(1)) for name, count in (("a", 16), ("b", 4))]
    run(engine, *same, Request("c", CONTEXT[1:8], [1, 2], Sampling(1)))
    readers = READERS + 1  # of the first context, because there must be so many, and of the other
    assert engine.report().read - read == readers * 7
    after = engine.stats()
    assert after.cached_tokens - before.cached_tokens == (22 - readers) * 7
    assert after.prompt_tokens - before.prompt_tokens == 22 * 7


def turns(engine: Engine, contexts: dict[str, list[int]], turn: int, temperature: float = 1.0) -> dict[str, list[Any]]:
    """Run a turn of several rollouts at once."""
    sampling = Sampling(9, temperature)
    asked = [Request(f"{id}:{turn}", context, [turn], sampling, affinity=(id,)) for id, context in contexts.items()]
    return {id.partition(":")[0]: completions for id, completions in run(engine, *asked).items()}


@pytest.mark.parametrize("temperature", [1.0, 0.0])
@pytest.mark.parametrize(
    "between", ["nothing", "others", "new weights", "new weights, and the old ones' keys are kept"]
)
def check_a_turn_goes_on_where_the_one_before_it_ended(engine: Engine, temperature: float, between: str) -> None:
    contexts = {f"a{n}": CONTEXT[:n] for n in (7, 24, 31, 32, 33, 40)}  # the second one's answer ends with a block
    contexts |= {f"b{n}": CONTEXT[1:12] for n in range(6)}  # greedy samples of one context sample the same
    found = turns(engine, contexts, 0, temperature)
    later = {id: [*context, *found[id][0].tokens, 5, 6, 7] for id, context in contexts.items()}
    if between == "others":
        run(engine, *(Request(f"other {n}", [9, n], [n], Sampling(60)) for n in range(24)))
    elif between != "nothing":
        engine.set_version(1, keep=between != "new weights")
    before, read = engine.stats(), engine.report().read
    goes_on = turns(engine, later, 1, temperature)
    cached, read = engine.stats().cached_tokens - before.cached_tokens, engine.report().read - read - 8 * len(contexts)
    contexts_read = sum(map(len, later.values()))
    assert cached + read == contexts_read
    if between == "nothing":
        different = {tuple(context) for context in later.values()}
        assert read == 4 * len(different), "what the tool said, and the last token sampled before it"
    elif between != "others":
        assert cached < contexts_read / 2, "contexts of this turn that are alike are read once"
    engine.set_version(2)
    alone = run(engine, *(Request(id, context, [1], Sampling(9, temperature)) for id, context in later.items()))
    for id, (completion,) in alone.items():
        assert goes_on[id][0].tokens == completion.tokens
        assert goes_on[id][0].logprobs == pytest.approx(completion.logprobs, abs=1e-5), "other kernels have read it"


def check_a_single_answer_leaves_no_part_of_a_block(engine: Engine) -> None:
    (found,) = run(engine, Request("a", CONTEXT[:7], [0], Sampling(9)))["a"]
    before = engine.stats()
    run(engine, Request("b", [*CONTEXT[:7], *found.tokens, 5], [0], Sampling(9), affinity=("b",)))
    assert engine.stats().cached_tokens == before.cached_tokens


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
    run(engine, Request("plain", [*CONTEXT, *CONTEXT], list(range(16)), Sampling(4)))
    assert not calls, "a plain request makes no objects of vLLM"
    asked = Request("a", [*CONTEXT, *CONTEXT], list(range(16)), Sampling(4, top_p=0.9))
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
    run(engine, Request("a", CONTEXT, [1, 2, 3], Sampling(33, top_p=0.9)))
    assert sizes == [16] * 3 * (1 + 2), "a generator of its own draws the first block again, and two more"


def check_engines_that_vllm_would_not_plan_like_this_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    from titan_rl.actors.vllm import step_scheduler

    monkeypatch.setattr(step_scheduler, "__version__", "0.33.1")
    with pytest.raises(RuntimeError, match=r"step_scheduler.py: expected vLLM 0.32.0, found 0.33.1"):
        step_scheduler.StepScheduler()
