"""An engine records the experts that transformers and the trainer choose for the same tokens, in float32.

As in test_engine.py, one test runs this file's check_* functions in a separate pytest process.
"""

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from support.engine_runs import finish, overwrite, run, run_checks, withdraw_all
from support.forked_programs import results_of
from support.running import Runs
from support.slow_cases import slow_except
from support.tiny import perturbed, tiny_model
from titan_rl.actors.vllm.engine import Engine, EngineSettings
from titan_rl.ext.replay.kept_batches import KeptBatches
from titan_rl.ext.routing_replay.routes import Routes, known, rows_of
from titan_rl.wire.types import Branch, Completion, Request, Sampling, Turn

CONTEXT = list(range(40))  # one full block of 32 tokens, and a part of one
GROUP = Request("group", CONTEXT, list(range(8)), Sampling(24))
EXPERTS: dict[str, Any] = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32}


ENGINE = """
import json, sys
from titan_rl.actors.vllm.engine import Engine, EngineSettings
from titan_rl.wire.types import Request, Sampling
settings = {"max_model_len": 128, "kv_cache_memory_mb": 1, "load_format": "auto", "records": ("routes",)}
engine = Engine(EngineSettings(model_dir=sys.argv[1], dtype=sys.argv[2], **settings))
engine.set_version(0)
prompts = [[*range(3, 43), i, 5, 6] for i in range(3)]
engine.add([Request(str(i), prompt, list(range(6)), Sampling(24)) for i, prompt in enumerate(prompts)])
found = []
while engine.busy:
    found += engine.step()
of = lambda completion: completion.extras["routes"]
print("FOUND", json.dumps([
    [prompts[int(done.id)], [[c.tokens, c.logprobs, of(c).cached, of(c).ids.tolist()] for c in done.completions]]
    for done in sorted(found, key=lambda done: done.id)
]))
"""

TRAINER = """
import json, os, socket, sys
from dataclasses import replace
with socket.socket() as s:
    s.bind(("127.0.0.1", 0)); port = s.getsockname()[1]
os.environ.update(RANK="0", LOCAL_RANK="0", WORLD_SIZE="1", MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
import numpy as np
from titan_rl.actors.titan.experts import Router
from titan_rl.actors.titan.role_model import RoleModel
from titan_rl.batch.experience import samples_of
from titan_rl.batch.packing import pack
from titan_rl.config import sections as c
from titan_rl.wire.model_shape import shape_of_folder
from titan_rl.ext.routing_replay.routes import Routes
from titan_rl.wire.types import Branch, Completion, Group, Prompt, Rollout, Turn
folder, dump, dtype = sys.argv[1:4]
groups = []
for id, (prompt, completions) in enumerate(json.load(sys.stdin)):
    rollouts = []
    for tokens, logprobs, cached, ids in completions:
        routes = Routes(cached, np.array(ids, np.uint8))
        turn = Turn(prompt, Completion(tokens, logprobs, [0] * len(tokens), "length", extras={"routes": routes}))
        rollouts.append(Rollout([Branch([turn])], "", 1.0))
    groups.append(Group(Prompt(id, "", prompt, ""), rollouts))
config = c.Config(
    job=c.JobSection(dump_folder=dump),
    model=c.ModelSection(hf_assets_path=folder),
    training=c.TrainingSection(seq_len=96, local_batch_size=2, mixed_precision_param=dtype),
)
trainer = RoleModel("trainer", config, shape_of_folder(folder, "model.hf_assets_path"), config.parallelism)
chosen, forward = [], Router.forward
def recorded(*arguments, **named):
    answer = forward(*arguments, **named)
    chosen.append(answer[1].detach().cpu().numpy())
    return answer
Router.forward = recorded
answers = {"tokens": 0, "unknown": 0, "differ": 0, "shifted": 0, "of another": 0, "prefixes": 0}
(batch,) = pack(samples_of(groups, config.algorithm), shards=1, seq_len=96, rows_per_microbatch=2, pad_id=0, share=True)
unreplayed = [replace(rows, extras={}) for rows in batch.microbatches]  # else the trainer would choose the engine's
trainer.scores(replace(batch, microbatches=unreplayed), 1.0)
layers = len(chosen) // len(batch.microbatches)
for number, rows in enumerate(batch.microbatches):
    own = np.sort(np.stack(chosen[number * layers : (number + 1) * layers], 2), -1)
    given = np.sort(rows.extras["routes"], -1)
    reads = np.zeros(rows.tokens.shape, bool)
    reads.reshape(-1)[rows.places[rows.sequences >= 0]] = True
    for begin, length, _, prefix in rows.segments:
        answers["prefixes"] += int(prefix > 0)
    for begin, length in {(int(b), int(n)) for _, _, b, n in rows.segments}:
        reads.reshape(-1)[begin : begin + length] = True
    answers["tokens"] += int(reads.sum())
    answers["unknown"] += int((given[reads] < 0).any((1, 2)).sum())
    assert (given[~reads] == -1).all()
    answers["differ"] += int((own[reads] != given[reads]).any(-1).sum())
    answers["shifted"] += int((own[reads] != np.roll(given, 1, 1)[reads]).any(-1).sum())
    answers["of another"] += int((own[reads] != given[::-1][reads]).any(-1).sum())
print("FOUND", json.dumps(answers))
"""


def tiny_mixture() -> Any:
    return tiny_model("qwen3_moe", max_position_embeddings=128, norm_topk_prob=True, **EXPERTS)


def test_routes_of_an_engine_in_a_process_of_its_own() -> None:
    run_checks(__file__)


@pytest.mark.parametrize("dtype", slow_except(["float32", "bfloat16"], 1))
def test_packed_routes_are_those_that_the_trainer_chooses(tmp_path: Path, dtype: str) -> None:
    """Of 18 samples that share a prompt in threes, which the engine read in full once, and a beginning of 32 tokens."""
    tiny_mixture().save_pretrained(tmp_path / "model")
    (sampled,) = results_of("generator", ENGINE, tmp_path / "model", dtype)
    assert sorted(cached for _, completions in sampled for _, _, cached, _ in completions) == [0, *[32] * 17]
    dump = tmp_path / "dump"
    (found,) = results_of("model", TRAINER, tmp_path / "model", dump, dtype, given=json.dumps(sampled))
    assert found["prefixes"] >= 16
    assert found["unknown"] == 0
    decisions = 2 * found["tokens"]  # two layers decide for each token
    assert found["differ"] == 0 if dtype == "float32" else 0 < found["differ"] < 0.1 * decisions
    assert min(found["shifted"], found["of another"]) > 0.5 * decisions, "a planted bug"


MIXTURE: dict[str, Any] = {"model__name": "qwen3_moe", "model__experts": 8, "model__experts_per_token": 2}


def test_a_run_of_several_turns_carries_the_routes_of_every_token(runs: Runs, tmp_path: Path) -> None:
    """Tensor-parallel engines, whose samples continue over weight updates."""
    run = runs.finish(
        tmp_path / "run",
        "hunt_llama",
        **MIXTURE,
        algorithm__routing_replay=True,
        generator__tensor_parallel_degree=2,
        environment__lockstep=False,
        rollout__max_staleness_steps=1,
        record__batches=4,
    )
    lines, steps = run.lines("rollouts.jsonl"), KeptBatches(run.folder, 4)
    assert any(len(line["turns"]) > 1 for line in lines)
    assert any(len(set(line["versions"])) > 1 for line in lines)
    for line in lines:
        assert len(line["routes"]) == len(line["turns"])
        for recorded, turn in zip(line["routes"], line["turns"], strict=True):
            assert recorded >= turn["sampled"], "the token before, and all that were sampled but the last"
    assert len(steps.steps) == 4
    for sample in (sample for step in steps.steps for update in steps.read(step) for sample in update):
        routes = sample.extras["routes"]
        assert routes.shape == (len(sample.tokens), 2, 2)
        there = known(routes)
        assert (there.sum(), there[-1]) == (len(sample.tokens) - 1, False)
        assert routes[:-1].max() < 8


@pytest.fixture(scope="module")
def model() -> Any:
    return tiny_mixture()


@pytest.fixture(scope="module")
def changed(model: Any) -> Any:
    return perturbed(model)


@pytest.fixture(scope="module")
def loaded(model: Any, tmp_path_factory: pytest.TempPathFactory) -> Engine:
    """A KV cache of 64 blocks."""
    folder: Path = tmp_path_factory.mktemp("model")
    model.save_pretrained(folder)
    room: dict[str, Any] = {"max_model_len": 128, "max_num_seqs": 64, "kv_cache_memory_mb": 1}
    return Engine(EngineSettings(model_dir=str(folder), load_format="auto", records=("routes",), **room))


@pytest.fixture
def engine(loaded: Engine, model: Any) -> Iterator[Engine]:
    """An idle engine with an empty prefix cache."""
    overwrite(loaded, model)
    loaded.set_version(0)
    yield loaded
    withdraw_all(loaded)
    assert not loaded._recorders[0]._recorded, "no routes of ended samples are left"  # pyright: ignore


def chosen(model: Any, tokens: list[int]) -> np.ndarray:
    """Return the experts that transformers' model chooses, ascending.  # [N, layers, K]"""
    import torch

    with torch.no_grad():
        logits = model(torch.tensor([tokens]), output_router_logits=True).router_logits
    return np.stack([layer.topk(EXPERTS["num_experts_per_tok"]).indices.sort(-1).values.numpy() for layer in logits], 1)


def routes_of(completion: Completion) -> Routes:
    return completion.extras["routes"]


def assert_chosen(model: Any, context: list[int], completion: Completion, begin: int = 0) -> None:
    routes, tokens = routes_of(completion), [*context, *completion.tokens]
    assert len(routes) == len(tokens) - 1, "the last token was not read"
    begin = max(begin, routes.cached)
    assert begin < len(context)
    assert np.array_equal(np.sort(routes.rows(begin), -1), chosen(model, tokens[:-1])[begin:])


def check_cached_tokens_of_a_group_have_routes_once(engine: Engine, model: Any) -> None:
    completions = run(engine, GROUP)["group"]
    assert sorted(routes_of(c).cached for c in completions) == [0, *[32] * 7]
    for completion in completions:
        assert_chosen(model, CONTEXT, completion)


def check_preempted_samples_have_each_token_once(engine: Engine, model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    scheduler, preempted = engine._llm.engine_core.engine_core.scheduler, list[str]()
    preempt = scheduler._preempt_request

    def counted(request: Any, *arguments: Any, **named: Any) -> None:
        preempted.append(request.request_id)
        preempt(request, *arguments, **named)

    monkeypatch.setattr(scheduler, "_preempt_request", counted)
    groups = [Request(f"{i}", [i, *CONTEXT], list(range(8)), Sampling(60)) for i in range(7)]
    done = run(engine, *groups)
    assert len(preempted) >= 4
    for group in groups:
        for completion in done[group.id]:
            assert_chosen(model, group.tokens, completion)


def check_dropped_keys_and_values_are_routed_by_the_new_weights(engine: Engine, model: Any, changed: Any) -> None:
    engine.add([GROUP])
    for _ in range(10):
        engine.step()
    overwrite(engine, changed)
    engine.set_version(1)
    differ = 0
    for completion in finish(engine)["group"]:
        assert_chosen(changed, CONTEXT, completion, begin=32)
        differ += int(
            (
                np.sort(routes_of(completion).rows(32), -1) != chosen(model, [*CONTEXT, *completion.tokens[:-1]])[32:]
            ).sum()
        )
    assert differ > 20


def check_kept_keys_and_values_keep_their_routes(engine: Engine, model: Any, changed: Any) -> None:
    engine.add([GROUP])
    for _ in range(10):
        engine.step()
    overwrite(engine, changed)
    engine.set_version(1, keep=True)
    for completion in finish(engine)["group"]:
        routes, tokens = routes_of(completion), [*CONTEXT, *completion.tokens]
        assert len(routes) == len(tokens) - 1
        old = np.sort(routes.rows(routes.cached), -1)[: 49 - routes.cached]
        assert np.array_equal(old, chosen(model, tokens[:49])[routes.cached :])


@pytest.mark.parametrize("others", [0, 1])
def check_a_sample_that_moves_takes_its_routes_along(engine: Engine, model: Any, others: int) -> None:
    """`others` leave its prompt in the prefix cache of the engine that it moves to."""
    engine.add([GROUP])
    for _ in range(10):
        engine.step()
    (withdrawn,) = engine.withdraw(["group"])
    assert [len(routes_of(c)) for c in withdrawn.completions] == [49] * 8
    engine.add([Request("waits", CONTEXT, [0], Sampling(24), withdrawn.completions[:1])])
    (waited,) = engine.withdraw(["waits"])
    assert waited.completions == withdrawn.completions[:1], "before it was resumed"
    engine.set_version(0)
    if others:
        run(engine, Request("others", CONTEXT, [99], Sampling(1)))
    done = run(engine, replace(GROUP, id="moved", begun=withdrawn.completions))["moved"]
    for completion in done:
        assert_chosen(model, CONTEXT, completion)


def check_turns_join_to_the_routes_of_their_branch(engine: Engine, model: Any) -> None:
    turns, tokens = list[Turn](), list[int]()
    for number, context in enumerate([CONTEXT, [3, 4, 5], [6]]):
        tokens += context
        (completion,) = run(engine, Request(f"turn {number}", tokens, [number], Sampling(20)))[f"turn {number}"]
        turns.append(Turn(context, completion, index=number))
        tokens = [*tokens, *completion.tokens]
    assert [routes_of(turn.completion).cached for turn in turns] == [0, 32, 64]
    routes = rows_of(Branch(turns))
    assert routes is not None
    assert np.array_equal(np.sort(routes[:-1], -1), chosen(model, tokens[:-1]))
    assert (routes[-1] == 255).all()


@pytest.mark.parametrize("bug", ["lost", "twice", "shifted"])
def check_a_wrong_number_of_rows_ends_the_engine(engine: Engine, bug: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from titan_rl.ext.routing_replay.ranks import routed_tokens

    cut = routed_tokens.cut

    def cut_wrongly(*arguments: Any) -> list[tuple[str, int, np.ndarray]]:
        found = cut(*arguments)
        id, first, rows = found[0]
        if first < 45:
            return found
        wrong = {"lost": [], "twice": [(id, first, np.repeat(rows, 40, 0))], "shifted": [(id, first + 1, rows)]}[bug]
        return [*wrong, *found[1:]]

    monkeypatch.setattr(routed_tokens, "cut", cut_wrongly)
    engine.add([GROUP])
    with pytest.raises(RuntimeError, match=r"sample \d+: expected the experts of "):
        finish(engine)
    withdraw_all_without_routes(engine)


def withdraw_all_without_routes(engine: Engine) -> None:
    engine._recorders[0]._recorded.clear()  # pyright: ignore
    withdraw_all(engine)
