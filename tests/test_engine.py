"""The engine on a real vLLM, against Hugging Face's forward of the same tiny Llama.

vLLM leaves a process group, patches and settings behind, so one test runs this file's check_* functions in a pytest of
their own.
"""

import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from tiny import tiny_llama
from titan_rl.actors import vllm_cpu
from titan_rl.actors.engine import ENV, Engine, EngineSettings
from titan_rl.types import Completion, Request, Sampling

if TYPE_CHECKING:
    from torch import Tensor

EOS, STOP = 2, 3
CONTEXT = [1, 5, 6, 7, 8, 9]


def test_engine_in_a_process_of_its_own() -> None:
    command = [sys.executable, "-m", "pytest", "-q", "--import-mode=importlib", "-o", "python_functions=check_*"]
    env = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", **ENV, **vllm_cpu.ENV}
    checks = subprocess.run([*command, __file__], env=env, capture_output=True, text=True, timeout=300)
    assert checks.returncode == 0, checks.stdout + checks.stderr


@pytest.fixture(scope="module")
def model() -> Any:
    return tiny_llama(max_position_embeddings=128, eos_token_id=EOS)


@pytest.fixture(scope="module")
def loaded(model: Any, tmp_path_factory: pytest.TempPathFactory) -> Engine:
    folder: Path = tmp_path_factory.mktemp("model")
    model.save_pretrained(folder)
    return Engine(EngineSettings(model_dir=str(folder), max_model_len=128, kv_cache_memory_mb=32, load_format="auto"))


@pytest.fixture
def engine(loaded: Engine) -> Iterator[Engine]:
    """Idle, with an empty prefix cache."""
    loaded.set_version(0)
    yield loaded
    loaded.abort_all()


def run(engine: Engine, *requests: Request) -> dict[str, list[Completion]]:
    engine.add(requests)
    return finish(engine)


def finish(engine: Engine) -> dict[str, list[Completion]]:
    done = {}
    while engine.busy:
        done |= {d.id: d.completions for d in engine.step()}
    return done


def reference(model: Any, context: list[int], tokens: list[int], temperature: float) -> "Tensor":
    """Log-probs over the vocabulary at each sampled position.  # [T, V]"""
    import torch

    with torch.no_grad():
        logits = model(torch.tensor([context + tokens])).logits[0, len(context) - 1 : -1]
    return (logits / temperature).log_softmax(-1)


def gap(model: Any, completion: Completion, temperature: float = 1.0, context: list[int] = CONTEXT) -> list[float]:
    """Per token: |log-prob reported - log-prob by the reference|."""
    expected = reference(model, context, completion.tokens, temperature)
    pairs = zip(completion.tokens, completion.logprobs, strict=True)
    return [abs(expected[i, token].item() - logprob) for i, (token, logprob) in enumerate(pairs)]


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


def check_siblings_read_their_prompt_from_the_prefix_cache(engine: Engine) -> None:
    before = engine.stats()
    run(engine, Request("a", list(range(40)), list(range(8)), Sampling(4)))
    after = engine.stats()
    assert after.prompt_tokens - before.prompt_tokens == 8 * 40
    assert after.cached_tokens - before.cached_tokens == 7 * 32  # a block is 32 tokens
    assert after.tokens - before.tokens == 8 * 4
    assert after.steps - before.steps == 4


def check_tokens_carry_the_version_that_sampled_them(engine: Engine, model: Any) -> None:
    import copy

    import torch

    torch.manual_seed(1)
    changed = copy.deepcopy(model)
    with torch.no_grad():
        for parameter in changed.parameters():
            parameter.add_(0.05 * torch.randn_like(parameter))

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
        assert max(new[10:]) < 1e-5  # over keys and values that the new weights computed
        assert max(old[10:]) > 1e-2


def overwrite(engine: Engine, model: Any) -> None:
    """In place, fused as vLLM has them."""
    import torch

    state = model.state_dict()
    for name, parameter in engine.params().items():
        prefix = name.removesuffix("qkv_proj.weight").removesuffix("gate_up_proj.weight")
        parts = {"qkv_proj": "qkv", "gate_up_proj": ("gate_", "up_")}.get(name.split(".")[-2])
        if parts is None:
            parameter.copy_(state[name])
        else:
            parameter.copy_(torch.cat([state[f"{prefix}{p.rstrip('_')}_proj.weight"] for p in parts]))


def check_more_prompt_tokens_than_a_step_takes(engine: Engine, model: Any) -> None:
    """2048 to a step. Prefills, and the ones that a new version repeats, come in several steps, none in parts."""
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


def check_abort_forgets(engine: Engine) -> None:
    engine.add([Request(id, CONTEXT, [0, 1], Sampling(24)) for id in "ab"])
    engine.step()
    assert engine.abort_all() == ["a", "b"]
    assert not engine.busy
    assert len(run(engine, Request("a", CONTEXT, [0, 1], Sampling(4)))["a"]) == 2


def check_nothing_is_sampled_before_a_version(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine, "version", None)
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
        (Request("open", CONTEXT, [0], Sampling(4)), "open: its id is that of an unfinished request"),
        (Request("fine", CONTEXT, [1], Sampling(4)), "fine: its id is that of an unfinished request"),
    ],
)
def check_a_request_that_cannot_be_sampled_as_asked(engine: Engine, request_: Request, message: str) -> None:
    engine.add([Request("open", CONTEXT, [0], Sampling(4))])
    with pytest.raises(ValueError, match=message):
        engine.add([Request("fine", CONTEXT, [0], Sampling(4)), request_])
    assert list(finish(engine)) == ["open"]  # none of the refused call entered


def check_fingerprints_tell_which_parameter_changed(engine: Engine, model: Any) -> None:
    before = engine.fingerprint()
    engine.params()["model.norm.weight"][3] += 1
    after = engine.fingerprint()
    overwrite(engine, model)
    assert [name for name in before if before[name] != after[name]] == ["model.norm.weight"]
    assert engine.fingerprint() == before
    assert before.keys() == engine.info.shapes.keys()
