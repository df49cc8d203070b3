"""What a new version does to the unfinished samples of a real vLLM: it drops their keys and values, or keeps them.

As in test_engine.py, one test runs this file's check_* functions in a separate pytest process.
"""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from support.engine_runs import (
    SCHEDULING,
    SCHEDULINGS,
    asynchronous,
    finish,
    gap,
    overwrite,
    run,
    run_checks,
    withdraw_all,
)
from support.tiny import perturbed, tiny_llama
from titan_rl.actors.vllm.engine import Engine, EngineSettings
from titan_rl.wire.types import Completion, Request, Sampling

CONTEXT = list(range(40))  # one full block of 32 tokens, and a part of one
GROUP = Request("group", CONTEXT, list(range(8)), Sampling(24))


@pytest.mark.parametrize("scheduling", SCHEDULINGS)
def test_updates_in_a_process_of_its_own(scheduling: str) -> None:
    run_checks(__file__, **{SCHEDULING: scheduling})


@pytest.fixture(scope="module")
def model() -> Any:
    return tiny_llama(max_position_embeddings=128)


@pytest.fixture(scope="module")
def changed(model: Any) -> Any:
    return perturbed(model)


@pytest.fixture(scope="module")
def loaded(model: Any, tmp_path_factory: pytest.TempPathFactory) -> Engine:
    folder: Path = tmp_path_factory.mktemp("model")
    model.save_pretrained(folder)
    room: dict[str, Any] = {"max_model_len": 128, "max_num_seqs": 8, "kv_cache_memory_mb": 32}
    room["async_scheduling"] = asynchronous()
    return Engine(EngineSettings(model_dir=str(folder), load_format="auto", **room))


@pytest.fixture
def engine(loaded: Engine, model: Any) -> Iterator[Engine]:
    """An idle engine with an empty prefix cache."""
    overwrite(loaded, model)
    loaded.set_version(0)
    yield loaded
    withdraw_all(loaded)


@pytest.fixture
def computed(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many tokens each step computes, as vLLM's scheduler decides."""
    scheduler, steps = engine._llm.engine_core.engine_core.scheduler, list[int]()
    schedule = scheduler.schedule

    def recorded(*arguments: Any, **named: Any) -> Any:
        output = schedule(*arguments, **named)
        if output.total_num_scheduled_tokens:
            steps.append(output.total_num_scheduled_tokens)
        return output

    monkeypatch.setattr(scheduler, "schedule", recorded)
    return steps


def mixed_gap(old: Any, new: Any, context: list[int], completion: Completion, kept: int) -> float:
    """Return the largest |log-prob - log-prob of Hugging Face's `new`|. `new` reads the keys and values of the first
    `kept` tokens from `old`."""
    import torch

    tokens = torch.tensor([[*context, *completion.tokens]])
    with torch.no_grad():
        past = old(tokens[:, :kept], use_cache=True).past_key_values
        logits = new(tokens[:, kept:-1], past_key_values=past).logits[0]
    sampled = tokens[0, kept + 1 :]
    expected = logits.log_softmax(-1).gather(1, sampled[:, None])[:, 0]
    return (expected - torch.tensor(completion.logprobs[-len(sampled) :])).abs().max().item()


@pytest.mark.parametrize("steps", [(1,), (2, 3), (9,), (23,), (1, 8, 16, 23)])
def check_kept_keys_and_values_change_no_bit_and_cost_nothing(
    engine: Engine, computed: list[int], steps: tuple[int, ...]
) -> None:
    """With equal weights, every version is the same; samples cross a block's end meanwhile."""
    undisturbed = run(engine, GROUP)["group"]
    expected, recomputed = [*computed], engine.stats().recomputed
    computed.clear()
    engine.set_version(0)
    engine.add([GROUP])
    for step in range(1, 24):
        engine.step()
        if step in steps:
            engine.set_version(step, keep=True)
    kept = finish(engine)["group"]
    assert [(c.tokens, c.logprobs, c.finish) for c in kept] == [(c.tokens, c.logprobs, c.finish) for c in undisturbed]
    assert computed == expected
    assert engine.stats().recomputed == recomputed
    serving = [max([0, *(at for at in steps if at <= step)]) for step in range(24)]
    assert all(c.versions == serving for c in kept)


def check_dropped_keys_and_values_are_counted(engine: Engine, computed: list[int]) -> None:
    six = replace(GROUP, seeds=list(range(6)))
    run(engine, six)
    undisturbed, before = sum(computed), engine.stats().recomputed
    computed.clear()
    engine.set_version(0)
    engine.add([six, Request("other", CONTEXT[:31], [0, 1], Sampling(24))])
    for _ in range(9):
        engine.step()
    engine.withdraw(["other"])
    engine.set_version(1)
    finish(engine)
    recomputed = engine.stats().recomputed - before
    assert recomputed == 40 + 5 * 8 + 6 * 8
    assert sum(computed) - undisturbed == recomputed + 2 * 31 + 2 * 8


def check_kept_samples_go_on_with_new_weights_on_old_keys_and_values(engine: Engine, model: Any, changed: Any) -> None:
    engine.add([GROUP])
    for _ in range(10):
        engine.step()
    overwrite(engine, changed)
    engine.set_version(1, keep=True)
    for completion in finish(engine)["group"]:
        assert completion.versions == [0] * 10 + [1] * 14
        assert max(gap(model, completion, context=CONTEXT)[:10]) < 1e-5
        # The first 9 sampled tokens were read by the old weights; the tenth is read by the new ones.
        assert mixed_gap(model, changed, CONTEXT, completion, kept=40 + 9) < 1e-5
        assert max(gap(changed, completion, context=CONTEXT)[10:]) > 1e-3


def check_no_new_request_reads_keys_and_values_of_older_weights(engine: Engine, model: Any, changed: Any) -> None:
    """Neither tokens that finished samples left behind, nor tokens that unfinished ones still add: not in another
    group of the same prompt, not in a second turn, not in a sample that is moved."""
    (turn,) = run(engine, Request("first turn", CONTEXT, [0], Sampling(40)))["first turn"]
    engine.add([GROUP])
    for _ in range(10):
        engine.step()
    overwrite(engine, changed)
    engine.set_version(1, keep=True)
    for _ in range(4):
        engine.step()  # unfinished samples fill and cache further blocks
    (withdrawn,) = engine.withdraw(["group"])
    moved = withdrawn.completions[:2]
    contexts = {"same prompt": CONTEXT, "second turn": [*CONTEXT, *turn.tokens, 5]}
    engine.add([Request(id, context, [3, 4], Sampling(24)) for id, context in contexts.items()])
    engine.add([Request("moved", CONTEXT, [0, 1], Sampling(24), moved)])
    done = finish(engine)
    for id, context in contexts.items():
        for completion in done[id]:
            assert completion.versions == [1] * 24
            assert max(gap(changed, completion, context=context)) < 1e-5
            assert max(gap(model, completion, context=context)) > 1e-2
    for completion in done["moved"]:
        assert completion.versions == [0] * 10 + [1] * 14
        assert max(gap(changed, completion, context=CONTEXT)[14:]) < 1e-5  # computed anew where it was moved to


def check_samples_that_wait_for_room_begin_with_the_new_weights_only(engine: Engine, changed: Any) -> None:
    engine.add([replace(GROUP, seeds=list(range(13)))])
    for _ in range(10):
        engine.step()
    overwrite(engine, changed)
    before = engine.stats()
    engine.set_version(1, keep=True)
    done = finish(engine)["group"]
    assert [c.versions for c in done] == [[0] * 10 + [1] * 14] * 8 + [[1] * 24] * 5
    assert max(max(gap(changed, c, context=CONTEXT)) for c in done[8:]) < 1e-5
    after = engine.stats()
    # 8 under the old weights, 5 under the new ones
    assert after.cached_tokens - before.cached_tokens == (7 + 4) * 32


def check_siblings_share_their_prompt_under_every_version(engine: Engine) -> None:
    for version in range(3):
        engine.set_version(version, keep=True)
        before = engine.stats()
        run(engine, GROUP)
        after = engine.stats()
        assert after.cached_tokens - before.cached_tokens == 7 * 32
        assert after.prompt_tokens - before.prompt_tokens == 8 * 40
        assert after.read_tokens - before.read_tokens == 8 * 40 - 7 * 32


@pytest.fixture
def offloading(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> Engine:
    """An engine that sleeps as one on a GPU does. vLLM's own part of it is real, apart from the worker's: on CPU that
    frees nothing."""
    monkeypatch.setattr(engine, "offloads", True)
    monkeypatch.setattr(engine, "_buffers", None)
    return engine


@pytest.mark.parametrize("keep", [False, True])
def check_a_sleep_without_weights_ends_with_those_of_the_next_version(
    offloading: Engine, model: Any, changed: Any, monkeypatch: pytest.MonkeyPatch, keep: bool
) -> None:
    engine, levels = offloading, list[int]()
    monkeypatch.setattr(engine._llm.model_executor.driver_worker.worker, "sleep", lambda level: levels.append(level))
    engine.add([GROUP])
    for _ in range(10):
        engine.step()
    engine.sleep()
    assert levels == [2]
    assert engine._llm.is_sleeping()
    for parameter in engine.params().values():
        parameter.fill_(float("nan"))  # as the memory that comes back
    engine.suspend()
    engine.wake()
    assert not engine._llm.is_sleeping()
    with pytest.raises(RuntimeError, match="sync weights before sampling"):
        engine.step()
    overwrite(engine, changed)
    engine.set_version(1, keep=keep)
    for completion in finish(engine)["group"]:
        assert completion.versions == [0] * 10 + [1] * 14
        assert max(gap(model, completion, context=CONTEXT)[:10]) < 1e-5
        assert max(gap(changed, completion, context=CONTEXT)[10:]) < 1e-5  # the KV cache was freed: all is recomputed


def check_buffers_must_survive_the_first_sleep(offloading: Engine) -> None:
    engine = offloading
    ((name, buffer), *_) = engine._llm.apply_model(lambda model: list(model.named_buffers()))[0]
    engine.sleep()
    buffer[0] += 1
    with pytest.raises(
        RuntimeError, match=f"expected buffers as before vLLM's level-2 sleep, found .*{name}.* changed"
    ):
        engine.wake()
    buffer[0] -= 1
    engine.wake()
    engine.sleep()
    engine.wake()
    assert not engine.asleep
