"""The engine on a real vLLM, compared with Hugging Face's forward of the same tiny Llama.

vLLM leaves a process group, patches and settings behind, so one test runs this file's check_* functions in a separate
pytest process.
"""

import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from support.engine_runs import (
    CONTEXT,
    SCHEDULING,
    SCHEDULINGS,
    asynchronous,
    finish,
    gap,
    overwrite,
    reference,
    run,
    run_checks,
    withdraw_all,
)
from support.tiny import perturbed, tiny_llama
from titan_rl.actors.vllm.engine import Engine, EngineSettings
from titan_rl.wire.types import Completion, Request, Sampling

EOS, STOP = 2, 3
BEGUN = Completion([4, 5], [0.0, 0.0], [0, 0], "abort")


@pytest.mark.parametrize("scheduling", SCHEDULINGS)
def test_engine_in_a_process_of_its_own(scheduling: str) -> None:
    run_checks(__file__, **{SCHEDULING: scheduling})


@pytest.fixture(scope="module")
def model() -> Any:
    return tiny_llama(max_position_embeddings=128, eos_token_id=EOS)


@pytest.fixture(scope="module")
def loaded(model: Any, tmp_path_factory: pytest.TempPathFactory) -> Engine:
    folder: Path = tmp_path_factory.mktemp("model")
    model.save_pretrained(folder)
    room: dict[str, Any] = {"max_model_len": 128, "kv_cache_memory_mb": 32}
    settings = EngineSettings(model_dir=str(folder), load_format="auto", async_scheduling=asynchronous(), **room)
    return Engine(settings)


@pytest.fixture
def engine(loaded: Engine) -> Iterator[Engine]:
    """An idle engine with an empty prefix cache."""
    loaded.set_version(0)
    yield loaded
    withdraw_all(loaded)


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def check_logprobs_are_those_of_the_sampling_distribution(engine: Engine, model: Any, temperature: float) -> None:
    completions = run(engine, Request("a", CONTEXT, list(range(16)), Sampling(24, temperature)))["a"]
    assert len({tuple(c.tokens) for c in completions}) == 16
    assert max(max(gap(model, c, temperature)) for c in completions) < 1e-5


def check_top_p_logprobs_are_those_of_the_truncated_distribution(engine: Engine, model: Any) -> None:
    (completion,) = run(engine, Request("a", CONTEXT, [0], Sampling(24, 1.0, top_p=0.5)))["a"]
    for row, token, logprob in zip(
        reference(model, CONTEXT, completion.tokens, 1.0), completion.tokens, completion.logprobs, strict=True
    ):
        probs, order = row.exp().sort(descending=True)
        kept = int((probs.cumsum(0) - probs < 0.5).sum())
        assert token in order[:kept]
        assert abs(row[token].item() - probs[:kept].sum().log().item() - logprob) < 1e-4


def check_a_context_is_scored_where_that_is_asked_for(engine: Engine, model: Any) -> None:
    wish, context = Sampling(2, 0.0, scores_context=True), list(range(3, 43))
    found = run(engine, Request("a", context, [0], wish), Request("b", context, [0], Sampling(2, 0.0)))
    (scored,), (plain,) = found["a"], found["b"]
    assert (plain.context, plain.tokens) == ([], scored.tokens)
    logprobs = reference(model, context[:1], context[1:], 1.0)
    assert len(scored.context) == len(context) - 1
    for row, token, score in zip(logprobs, context[1:], scored.context, strict=True):
        assert abs(row[token].item() - score.logprob) < 1e-5
        assert abs(row.max().item() - score.best_logprob) < 1e-5
        assert row[score.best] == row.max()


def check_greedy_is_the_argmax(engine: Engine, model: Any) -> None:
    (completion,) = run(engine, Request("a", CONTEXT, [0], Sampling(24, 0.0)))["a"]
    assert completion.tokens == reference(model, CONTEXT, completion.tokens, 1.0).argmax(-1).tolist()
    assert max(gap(model, completion)) < 1e-5


def check_only_the_requests_stop_tokens_end_a_sample(engine: Engine) -> None:
    sampling = Sampling(32, stop_token_ids=(EOS, STOP))
    done = run(engine, Request("a", CONTEXT, list(range(64)), sampling))["a"]
    for c in done:
        assert len(c.tokens) == len(c.logprobs) == len(c.versions)
        stops = [i for i, token in enumerate(c.tokens) if token in (EOS, STOP)]
        if c.finish == "stop":
            assert stops == [len(c.tokens) - 1]
        else:
            assert (c.finish, len(c.tokens), stops) == ("length", 32, [])
    assert {c.tokens[-1] for c in done if c.finish == "stop"} == {EOS, STOP}
    assert "length" in {c.finish for c in done}

    # The model folder's own EOS does not stop a request that does not ask for it.
    unstopped = run(engine, Request("a", CONTEXT, list(range(64)), Sampling(32)))["a"]
    assert {(c.finish, len(c.tokens)) for c in unstopped} == {("length", 32)}
    assert any(EOS in c.tokens for c in unstopped)

    # The last token that the limit allows may be the stop token.
    seed = next(i for i, c in enumerate(done) if c.finish == "stop")
    tight = Sampling(len(done[seed].tokens), stop_token_ids=(EOS, STOP))
    (again,) = run(engine, Request("a", CONTEXT, [seed], tight))["a"]
    assert (again.tokens, again.finish) == (done[seed].tokens, "stop")


def check_a_seed_decides_its_sample_in_any_batch(engine: Engine) -> None:
    asked = Request("a", CONTEXT, [11, 12, 13], Sampling(24))
    alone = run(engine, asked)["a"]
    assert run(engine, asked)["a"] == alone
    others = [Request(f"b{i}", CONTEXT[: 1 + i % 6], list(range(8)), Sampling(5 + i)) for i in range(8)]
    mixed = run(engine, *others, replace(asked, seeds=[13, 11, 12]))["a"]
    assert [c.tokens for c in mixed] == [alone[i].tokens for i in (2, 0, 1)]


def check_a_new_version_goes_on_with_a_samples_random_stream(engine: Engine) -> None:
    asked = Request("a", CONTEXT, list(range(8)), Sampling(24))
    undisturbed = run(engine, asked)["a"]
    engine.add([asked])
    for version in range(1, 5):
        engine.step()
        engine.set_version(version)
    assert [c.tokens for c in finish(engine)["a"]] == [c.tokens for c in undisturbed]


def check_unfinished_samples_outlast_sleep(engine: Engine) -> None:
    """As a new version in between does: the keys and values are computed again."""
    asked = Request("asleep", CONTEXT, list(range(4)), Sampling(12))
    engine.add([asked])
    for _ in range(4):
        engine.step()
    engine.set_version(7)
    undisturbed = [c.tokens for c in finish(engine)["asleep"]]
    engine.add([asked])
    for _ in range(4):
        engine.step()
    engine.sleep()
    assert engine.busy
    engine.wake()
    engine.set_version(7)
    assert [c.tokens for c in finish(engine)["asleep"]] == undisturbed


def check_siblings_read_their_prompt_from_the_prefix_cache(engine: Engine) -> None:
    before = engine.stats()
    run(engine, Request("a", list(range(40)), list(range(8)), Sampling(4)))
    after = engine.stats()
    assert after.prompt_tokens - before.prompt_tokens == 8 * 40
    assert after.cached_tokens - before.cached_tokens == 7 * 32  # one full block of 32 tokens
    assert after.tokens - before.tokens == 8 * 4
    assert after.steps - before.steps == 4 + asynchronous()  # the first one only launches


def check_tokens_carry_the_version_that_sampled_them(engine: Engine, model: Any) -> None:
    changed = perturbed(model)
    engine.add([Request("a", CONTEXT, list(range(16)), Sampling(24))])
    for _ in range(10):
        engine.step()
    overwrite(engine, changed)
    engine.set_version(1)
    completions = finish(engine)["a"]
    overwrite(engine, model)

    for c in completions:
        assert c.versions == [0] * 10 + [1] * 14
        old, new = gap(model, c), gap(changed, c)
        assert max(old[:10]) < 1e-5
        assert max(new[10:]) < 1e-5  # with keys and values computed by the new weights
        assert max(old[10:]) > 1e-2


def check_more_prompt_tokens_than_a_step_takes(engine: Engine, model: Any) -> None:
    """A step takes 2048. Prefills, also the ones that a new version repeats, take several steps; none is split."""
    contexts = [[1, 4 + i % 60, *range(60)] for i in range(60)]
    engine.add([Request(f"r{i}", context, [i], Sampling(12)) for i, context in enumerate(contexts)])
    for _ in range(6):
        engine.step()
    engine.set_version(1)
    for id, (completion,) in finish(engine).items():
        context = contexts[int(id[1:])]
        assert len(completion.tokens) == 12
        assert set(completion.versions) <= {0, 1}
        assert max(gap(model, completion, context=context)) < 1e-5


def begun_of(engine: Engine, asked: Request, steps: int) -> list[Completion]:
    """Return the samples of a request that is withdrawn after `steps` steps."""
    engine.add([asked])
    for _ in range(steps):
        engine.step()
    (withdrawn,) = engine.withdraw([asked.id])
    assert not engine.busy
    return withdrawn.completions


def check_a_sample_goes_on_where_it_was_taken_out(engine: Engine, model: Any) -> None:
    asked = Request("a", CONTEXT, [0, 1, 2], Sampling(24, 0.0))
    whole = run(engine, asked)["a"]
    begun = begun_of(engine, asked, 10)
    assert [(c.finish, len(c.tokens)) for c in begun] == [("abort", 10)] * 3
    engine.set_version(1)
    rest = run(engine, replace(asked, id="a~1", begun=[begun[0], whole[1], begun[2]]))["a~1"]
    assert rest[1] == whole[1], "it had finished"
    for completion, undisturbed in zip(rest, whole, strict=True):
        assert completion.tokens == undisturbed.tokens
        assert completion.finish == undisturbed.finish == "length"
        assert max(gap(model, completion)) < 1e-5
        assert completion.logprobs == pytest.approx(undisturbed.logprobs, abs=1e-5)
    for completion in (rest[0], rest[2]):
        assert completion.versions == [0] * 10 + [1] * 14
        assert completion.logprobs[:10] == begun[0].logprobs


def check_a_sample_that_goes_on_draws_from_a_stream_of_its_own(engine: Engine, model: Any) -> None:
    asked = Request("a", CONTEXT, list(range(32)), Sampling(24, stop_token_ids=(EOS, STOP)))
    whole, begun = run(engine, asked)["a"], begun_of(engine, asked, 1)
    assert [c.tokens for c in begun] == [c.tokens[:1] for c in whole]
    assert {c.finish for c in begun} == {"stop", "abort"}
    asked = replace(asked, begun=begun)
    again = run(engine, asked)["a"]
    assert again == run(engine, asked)["a"], "the seed and the length decide it"
    for sample, completion in zip(whole, again, strict=True):
        assert completion.tokens[0] == sample.tokens[0]
        assert (completion.finish == "stop") == (completion.tokens[-1] in (EOS, STOP))
        assert len(completion.tokens) <= 24
        assert max(gap(model, completion)) < 1e-5
    assert sum(c.tokens == s.tokens for c, s in zip(again, whole, strict=True)) < 16
    first = run(engine, replace(asked, begun=[], tokens=[*CONTEXT, whole[0].tokens[0]]))["a"][0]
    assert first.tokens[:8] != again[0].tokens[1:9], "not the noise that chose the first token"


def check_finished_samples_are_not_sampled_again(engine: Engine) -> None:
    asked = Request("a", CONTEXT, [0, 1, 2], Sampling(24))
    whole, before = run(engine, asked)["a"], engine.stats().tokens
    assert run(engine, replace(asked, begun=whole)) == {"a": whole}
    assert engine.stats().tokens == before
    third = Completion([], [], [], "abort")
    again = run(engine, replace(asked, begun=[whole[0], whole[1], third]))["a"]
    assert again[:2] == whole[:2]
    assert again[2].tokens == whole[2].tokens
    assert engine.stats().tokens == before + 24


def check_what_has_finished_cannot_be_withdrawn(engine: Engine) -> None:
    asked = Request("a", CONTEXT, [0, 1], Sampling(4))
    third = Completion([7], [0.0], [0], "length")
    fresh = Completion([], [], [], "abort")
    engine.add([replace(asked, seeds=[0, 1, 2], begun=[fresh, fresh, third])])
    engine.step()
    (withdrawn,) = engine.withdraw(["a", "b", "a"])
    assert [(c.finish, len(c.tokens)) for c in withdrawn.completions] == [("abort", 1), ("abort", 1), ("length", 1)]
    assert engine.withdraw(["a"]) == []
    assert not engine.busy
    run(engine, asked)
    assert engine.withdraw(["a"]) == []


def check_the_id_of_a_withdrawn_request_can_be_used_again(engine: Engine) -> None:
    engine.add([Request(id, CONTEXT, [0, 1], Sampling(24)) for id in "ab"])
    engine.step()
    assert withdraw_all(engine) == ["a", "b"]
    assert not engine.busy
    assert len(run(engine, Request("a", CONTEXT, [0, 1], Sampling(4)))["a"]) == 2


def check_nothing_is_sampled_before_a_version(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine, "versions", [None])
    with pytest.raises(RuntimeError, match="sync weights before sampling"):
        engine.add([Request("a", CONTEXT, [0], Sampling(4))])
    assert not engine.busy


@pytest.mark.parametrize(
    ("request_", "message"),
    [
        (Request("x", [], [0], Sampling(4)), "expected tokens and seeds"),
        (Request("x", CONTEXT, [], Sampling(4)), "expected tokens and seeds"),
        (Request("x", [64], [0], Sampling(4)), "expected token ids below 64, found 64"),
        (Request("x", CONTEXT, [-1], Sampling(4)), "expected seeds of at least 0, found -1"),
        (Request("x", CONTEXT, [0], Sampling(4, 0.001)), "expected rollout.temperature 0 or in"),
        (Request("x", CONTEXT, [0], Sampling(123)), "6 tokens and 123 new ones exceed 128"),
        (Request("x", CONTEXT, [0, 1], Sampling(4), [BEGUN]), "a begun sample for each of 2 seeds, found 1"),
        (Request("x", CONTEXT, [0], Sampling(2), [BEGUN]), "unfinished samples below 2 tokens, found one of 2"),
        (Request("x", CONTEXT, [0, 1], Sampling(4, stop_token_ids=(64,))), "stop token ids below 64, found 64"),
        (Request("x", CONTEXT, [0, 1], Sampling(4, top_p=1.5)), "top_p must be in"),  # vLLM's own words
    ],
)
def check_a_request_that_cannot_be_sampled_as_asked(engine: Engine, request_: Request, message: str) -> None:
    engine.add([Request("open", CONTEXT, [0], Sampling(4))])
    engine.add([request_, Request("fine", CONTEXT, [0], Sampling(4))])
    done = {each.id: each for each in engine.step()}
    while engine.busy:
        done |= {each.id: each for each in engine.step()}
    assert re.search(message, done["x"].refused)
    assert done["x"].completions == []
    assert [len(done[id].completions[0].tokens) for id in ("open", "fine")] == [4, 4]
    assert (done["open"].refused, done["fine"].refused) == ("", "")


@pytest.mark.parametrize(
    ("request_", "message"),
    [
        (Request("open", CONTEXT, [0], Sampling(4)), "open: an unfinished request has this id"),
        (Request("fine", CONTEXT, [1], Sampling(4)), "fine: an unfinished request has this id"),
    ],
)
def check_an_id_names_one_request(engine: Engine, request_: Request, message: str) -> None:
    engine.add([Request("open", CONTEXT, [0], Sampling(4))])
    with pytest.raises(ValueError, match=message):
        engine.add([Request("fine", CONTEXT, [0], Sampling(4)), request_])
    assert list(finish(engine)) == ["open"]  # no request of the refused call was added


def check_fingerprints_tell_which_parameter_changed(engine: Engine, model: Any) -> None:
    before = engine.fingerprint()
    engine.params()["model.norm.weight"][3] += 1
    after = engine.fingerprint()
    overwrite(engine, model)
    assert [name for name in before if before[name] != after[name]] == ["model.norm.weight"]
    assert engine.fingerprint() == before
    assert before.keys() == engine.info.shapes.keys()
