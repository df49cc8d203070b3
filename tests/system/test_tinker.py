"""Clients of Tinker's SDK train on `titan_rl serve --tinker`."""

import json
import math
import os
import signal
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest
import tinker
import torch
from safetensors.torch import load_file
from tinker import types

from support.running import Run
from support.tinker_server import PROMPT, RANK, example, logprobs, new_service, policy_step, served, train

ANSWER = [8, 9, 10, 2]
Server = tuple[Run, str, str]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("tinker") / "run"


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[Server]:
    with pytest.MonkeyPatch.context() as patch, served(folder, folder.parent / "log") as server:
        patch.setenv("NO_PROXY", "127.0.0.1")
        patch.setenv("TINKER_TELEMETRY", "0")
        patch.setenv("TINKER_BASE_URL", server[1])
        patch.setenv("TINKER_API_KEY", server[2])
        yield server


@pytest.fixture(scope="module")
def base(server: Server) -> str:
    (model,) = tinker.RestClient().get_server_capabilities().result().supported_models
    assert model.trainable
    assert model.model_name is not None
    return model.model_name


def new_client(base: str, rank: int = RANK, **lora: int | bool) -> tinker.TrainingClient:
    return new_service().create_lora_training_client(base_model=base, rank=rank, **lora).result()  # type: ignore[arg-type]


def saved(folder: Path, path: str, file: str = "adapter_model.safetensors") -> dict[str, torch.Tensor]:
    return load_file(folder / "tinker" / path.removeprefix("tinker://") / file)


def test_supervised_steps_lower_the_loss(base: str) -> None:
    client = new_client(base)
    info = client.get_info()
    assert (info.lora_rank, info.is_lora, info.model_data.model_name) == (RANK, True, base)
    losses = train(client, [example(ANSWER), example(ANSWER[::-1], 0.5)], 6)
    assert losses[-1] < losses[0] / 3
    many = [example([1 + i % 50]) for i in range(1100)]  # more than the SDK sends at once
    outputs = client.forward(many, "cross_entropy").result().loss_fn_outputs
    assert len(outputs) == 1100
    assert outputs[1050]["logprobs"].tolist() == pytest.approx(logprobs(client, many[1050]), abs=1e-5)
    tokens = client.get_tokenizer().encode("12+34=")
    assert len(tokens) > 5


@pytest.mark.parametrize("rank", [RANK, 3])
def test_a_sampler_computes_what_the_trainer_does(base: str, rank: int) -> None:
    """vLLM reads the adapter, and a smaller rank has its own scale. The sampler stays as it was while training goes
    on, and one of the base never changes."""
    client = new_client(base, rank)
    plain = new_service().create_sampling_client(base_model=base).result()
    tokens = types.ModelInput.from_ints([*PROMPT, *ANSWER])
    untrained = plain.compute_logprobs(tokens).result()
    assert untrained[1:] == pytest.approx(logprobs(client, example(ANSWER)), abs=1e-5)
    train(client, [example(ANSWER)], 3)
    sampler = client.save_weights_and_get_sampling_client().result()
    expected = logprobs(client, example(ANSWER))
    assert expected[-1] != pytest.approx(untrained[-1], abs=0.1)
    assert sampler.compute_logprobs(tokens).result()[1:] == pytest.approx(expected, abs=1e-5)
    train(client, [example(ANSWER)], 1)
    newer = client.save_weights_and_get_sampling_client().result()
    assert sampler.compute_logprobs(tokens).result()[1:] == pytest.approx(expected, abs=1e-5)
    assert newer.compute_logprobs(tokens).result()[1:] == pytest.approx(logprobs(client, example(ANSWER)), abs=1e-5)
    assert plain.compute_logprobs(tokens).result() == untrained


def test_samples(base: str) -> None:
    sampler = new_service().create_sampling_client(base_model=base).result()
    prompt = types.ModelInput.from_ints(PROMPT)
    params = types.SamplingParams(max_tokens=8, seed=5, stop=[])
    first, again = (sampler.sample(prompt, 4, params, include_prompt_logprobs=True).result() for _ in range(2))
    assert [s.tokens for s in first.sequences] == [s.tokens for s in again.sequences]
    assert len({s.sequence_id for s in (*first.sequences, *again.sequences)}) == 8
    assert len({tuple(s.tokens) for s in first.sequences}) > 1
    assert {(len(s.tokens), s.stop_reason) for s in first.sequences} == {(8, "length")}
    assert first.prompt_logprobs is not None
    assert first.prompt_logprobs[0] is None
    whole = types.ModelInput.from_ints([*PROMPT, *first.sequences[0].tokens])
    scores = sampler.compute_logprobs(whole).result()[len(PROMPT) :]
    assert first.sequences[0].logprobs == pytest.approx(scores, abs=1e-4)
    stop = first.sequences[0].tokens[2]
    (ended,) = sampler.sample(prompt, 1, types.SamplingParams(max_tokens=8, seed=5, stop=[stop])).result().sequences
    assert ended.tokens == first.sequences[0].tokens[: first.sequences[0].tokens.index(stop) + 1]
    assert ended.stop_reason == "stop"


def test_a_stop_text_ends_a_sample(base: str) -> None:
    """Also one of two tokens, which no engine stops at: the tokens up to its end are returned."""
    client = new_client(base)
    train(client, [example([8, 9, 10, 11])], 12)
    sampler, tokenizer = client.save_weights_and_get_sampling_client().result(), client.get_tokenizer()
    params = types.SamplingParams(max_tokens=4, temperature=0, stop=tokenizer.decode([9, 10]))
    (sequence,) = sampler.sample(types.ModelInput.from_ints(PROMPT), 1, params).result().sequences
    assert (sequence.tokens, sequence.stop_reason) == ([8, 9, 10], "stop")
    assert len(sequence.logprobs or ()) == 3


@pytest.mark.parametrize("loss", ["importance_sampling", "cispo"])
def test_the_cookbooks_loop_raises_the_reward(base: str, loss: str) -> None:
    client = new_client(base)
    rewards = [policy_step(client, loss, seed, lr=1e-2) for seed in range(10)]
    assert sum(rewards[-2:]) / 2 > rewards[0] + 0.2, rewards


@pytest.mark.parametrize(
    ("loss", "config"), [("ppo", {"clip_low_threshold": 0.9, "clip_high_threshold": 1.1}), ("gspo", {})]
)
def test_other_losses(base: str, loss: str, config: dict[str, float]) -> None:
    client = new_client(base)
    before = logprobs(client, example(ANSWER))
    policy_step(client, loss, 1, 4, **config)
    assert logprobs(client, example(ANSWER)) != before


def test_losses_are_their_formulas(base: str) -> None:
    """Loss and gradient equal the plain formula's: a step by its gradient, through a custom loss, gives the same
    adapters to rounding."""
    tokens, n = [*PROMPT, *ANSWER], len(PROMPT) + len(ANSWER) - 1
    advantages = torch.linspace(-1, 1.5, n)
    old = torch.linspace(-3, -9, n)

    def formula(lp: torch.Tensor, loss: str) -> torch.Tensor:
        ratio = (lp - old).exp()
        if loss == "ppo":
            return -torch.minimum(ratio * advantages, ratio.clamp(0.5, 1.3) * advantages).sum()
        if loss == "cispo":
            return -(ratio.clamp(0.5, 1.3).detach() * lp * advantages).sum()
        return -(ratio * advantages).sum()

    datum = types.Datum(
        model_input=types.ModelInput.from_ints(tokens[:-1]),
        loss_fn_inputs={
            "target_tokens": types.TensorData.from_torch(torch.tensor(tokens[1:])),
            "logprobs": types.TensorData.from_torch(old),
            "advantages": types.TensorData.from_torch(advantages),
        },
    )
    for loss in ("importance_sampling", "ppo", "cispo"):
        config = None if loss == "importance_sampling" else {"clip_low_threshold": 0.5, "clip_high_threshold": 1.3}
        ours, theirs = new_client(base), new_client(base)
        result = ours.forward_backward([datum], loss, config).result()  # type: ignore[arg-type]
        output = result.loss_fn_outputs[0]["logprobs"].to_torch()
        expected = float(formula(output, loss))
        assert result.metrics["loss:sum"] == pytest.approx(expected, rel=1e-4)
        plain = [example(tokens[len(PROMPT) :])]
        custom = theirs.forward_backward_custom(plain, lambda _, lps, loss=loss: (formula(lps[0], loss), {})).result()
        assert custom.metrics["loss:sum"] == pytest.approx(expected, rel=1e-4)
        norms = [c.optim_step(types.AdamParams(learning_rate=1e-3)).result().metrics or {} for c in (ours, theirs)]
        assert norms[0]["grad_norm:mean"] == pytest.approx(norms[1]["grad_norm:mean"], rel=1e-4)
        assert logprobs(ours, example(ANSWER)) == pytest.approx(logprobs(theirs, example(ANSWER)), abs=1e-3)


def test_a_saved_state_goes_on_to_the_last_bit(base: str, folder: Path) -> None:
    data = [example(ANSWER), example(ANSWER[::-1])]
    client = new_client(base, 5)
    train(client, data, 3)
    state = client.save_state("half", user_metadata={"note": "x"}).result().path
    losses = train(client, data, 3)
    end = client.save_state("end").result().path
    service = new_service()
    resumed = service.create_training_client_from_state_with_optimizer(state).result()
    assert resumed.get_info().lora_rank == 5
    assert train(resumed, data, 3) == losses
    again = resumed.save_state("end").result().path
    for file in ("adapter_model.safetensors", "optimizer.safetensors"):
        ours, theirs = saved(folder, end, file), saved(folder, again, file)
        assert ours.keys() == theirs.keys()
        assert all(torch.equal(ours[name], theirs[name]) for name in ours)
    weights = service.create_training_client_from_state(state).result()
    fresh = train(weights, data, 3)
    assert fresh[0] == losses[0]
    assert fresh[2] != losses[2]
    listed = tinker.RestClient().list_checkpoints(client.model_id).result().checkpoints
    assert [c.tinker_path for c in listed] == [end, state]
    assert listed[1].user_metadata == {"note": "x"}
    assert (
        json.loads((folder / "tinker" / state.removeprefix("tinker://") / "adapter_config.json").read_text())["r"] == 5
    )
    sampler = service.create_sampling_client(model_path=state).result()
    assert sampler.get_base_model() == base
    named = client.save_weights_for_sampler("published").result().path
    both = [service.create_sampling_client(model_path=path).result() for path in (named, end)]
    scores = [s.compute_logprobs(types.ModelInput.from_ints([*PROMPT, *ANSWER])).result()[1:] for s in both]
    assert scores[0] == scores[1]
    tinker.RestClient().delete_checkpoint(client.model_id, "weights/half").result()
    with pytest.raises(Exception, match="expected weights at tinker://"):
        service.create_training_client_from_state(state).result()


def test_a_path_is_sampled_as_it_was_saved_last(base: str) -> None:
    client, tokens = new_client(base), types.ModelInput.from_ints([*PROMPT, *ANSWER])
    for _ in range(2):
        train(client, [example(ANSWER)], 2)
        path = client.save_state("same", overwrite=True).result().path
        sampler = new_service().create_sampling_client(model_path=path).result()
        scores = sampler.compute_logprobs(tokens).result()[1:]
        assert scores == pytest.approx(logprobs(client, example(ANSWER)), abs=1e-5)


def test_clients_in_turn_compute_what_each_does_alone(base: str, folder: Path) -> None:
    """Losses and adapters, bit for bit, also after a client that vanished between a backward and its step."""
    data = {"one": [example(ANSWER)], "two": [example(ANSWER[::-1]), example([5, 6], -0.1)]}
    ranks = {"one": RANK, "two": 3}
    alone = {}
    for name, each in data.items():
        client = new_client(base, ranks[name], seed=7)
        losses = train(client, each, 4)
        alone[name] = losses, saved(folder, client.save_state("end").result().path)
    vanished = new_client(base)
    vanished.forward_backward([example([20, 21, 22], 1e3)], "cross_entropy").result()
    together = {name: new_client(base, ranks[name], seed=7) for name in data}
    found_losses: dict[str, list[float]] = {name: [] for name in data}
    for _ in range(4):
        pending = {name: c.forward_backward(data[name], "cross_entropy") for name, c in together.items()}
        steps = [c.optim_step(types.AdamParams(learning_rate=1e-2)) for c in together.values()]
        for name, future in pending.items():
            found_losses[name].append(future.result().metrics["loss:sum"])
        for step in steps:
            step.result()
    for name, client in together.items():
        expected, tensors = alone[name]
        assert found_losses[name] == expected
        found = saved(folder, client.save_state("end").result().path)
        assert all(torch.equal(tensors[key], found[key]) for key in tensors)


def test_layers_can_be_left_out(base: str, folder: Path) -> None:
    client = new_client(base, train_mlp=False)
    train(client, [example(ANSWER)], 2)
    path = client.save_state("end").result().path
    tensors = saved(folder, path)
    assert not any("mlp" in name for name in tensors)
    resumed = new_service().create_training_client_from_state_with_optimizer(path).result()
    assert train(resumed, [example(ANSWER)], 2) == train(client, [example(ANSWER)], 2)


def test_gradients_add_up_until_a_step(base: str) -> None:
    parts, whole = new_client(base), new_client(base)
    data = [example(ANSWER), example(ANSWER[::-1])]
    for each in data:
        parts.forward_backward([each], "cross_entropy").result()
    whole.forward_backward(data, "cross_entropy").result()
    norms = [c.optim_step(types.AdamParams(grad_clip_norm=0.5)).result().metrics or {} for c in (parts, whole)]
    assert norms[0]["grad_norm:mean"] == pytest.approx(norms[1]["grad_norm:mean"], rel=1e-4)
    assert logprobs(parts, data[0]) == pytest.approx(logprobs(whole, data[0]), abs=1e-5)


def with_inputs(**inputs: object) -> types.Datum:
    return types.Datum(model_input=types.ModelInput.from_ints([1, 2, 3]), loss_fn_inputs=inputs)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("datum", "loss", "expected"),
    [
        (with_inputs(target_tokens=[1, 2]), "cross_entropy", "data.0..*target_tokens.*: expected 3 numbers"),
        (with_inputs(target_tokens=[1, 2, 64]), "cross_entropy", "expected token ids from 0 to 63, found 1 to 64"),
        (with_inputs(weights=[1.0, 1.0, 1.0]), "cross_entropy", "expected target_tokens for cross_entropy"),
        (with_inputs(target_tokens=[1, 2, 3]), "ppo", "expected logprobs, advantages for ppo"),
        (with_inputs(target_tokens=[1, 2, 3], weights=[1.0, math.nan, 1.0]), "cross_entropy", "expected finite"),
        (with_inputs(target_tokens=[1, 2, 3]), "stable_reinforce", "loss_fn: expected one of cross_entropy, "),
        (example([3] * 200), "cross_entropy", r"expected 1 to 128 tokens .training.seq_len., found 206"),
    ],
)
def test_bad_data_is_refused_and_harms_nobody(base: str, datum: types.Datum, loss: str, expected: str) -> None:
    client = new_client(base)
    with pytest.raises(tinker.BadRequestError, match=expected):
        client.forward_backward([datum], loss).result()  # type: ignore[arg-type]
    losses = train(client, [example(ANSWER)], 2)  # its next calls have their turns
    assert losses[1] < losses[0]


def test_other_bad_input_is_refused(base: str) -> None:
    service = new_service()
    for call, expected in (
        (lambda: new_client("llama-of-another-server"), "base_model: expected /"),
        (lambda: new_client(base, RANK + 1), f"lora_config.rank: expected an integer from 1 to {RANK}"),
        (lambda: new_client(base, train_attn=False, train_mlp=False), "lora_config: expected train_attn or train_mlp"),
        (lambda: new_client(base).save_state("../up").result(), "path: expected a name of letters"),
        (lambda: new_client(base).optim_step(types.AdamParams(eps=0.0)).result(), "adam_params.eps: expected a number"),
    ):
        with pytest.raises(tinker.BadRequestError, match=expected):
            call()
    for path in ("tinker://none/weights/a", f"tinker://{'0' * 32}:train:0/weights/a", "tinker://../../x"):
        with pytest.raises(tinker.APIStatusError, match=r"expected (a path|weights at) tinker://"):
            service.create_training_client_from_state(path).result()
    sampler = service.create_sampling_client(base_model=base).result()
    for tokens, params, expected in (
        ([64], types.SamplingParams(max_tokens=1), "prompt: expected token ids from 0 to 63"),
        ([1] * 128, types.SamplingParams(max_tokens=1), "prompt: expected 1 to 127 tokens"),
        ([1], types.SamplingParams(max_tokens=1, temperature=3), "sampling_params.temperature: expected a number"),
        ([1], types.SamplingParams(max_tokens=0), "sampling_params.max_tokens: expected an integer from 1"),
    ):
        with pytest.raises(tinker.BadRequestError, match=expected):
            sampler.sample(types.ModelInput.from_ints(tokens), 1, params).result()
    client = new_client(base)
    client.save_state("a").result()
    with pytest.raises(tinker.BadRequestError, match="expected a new name, or overwrite"):
        client.save_state("a").result()
    client.save_state("a", overwrite=True).result()


def test_gradients_that_are_not_finite_are_dropped(base: str) -> None:
    client = new_client(base)
    before = logprobs(client, example(ANSWER))
    client.forward_backward([example(ANSWER, 3e38)], "cross_entropy").result()
    with pytest.raises(tinker.RequestFailedError, match="gradients are not finite"):
        client.optim_step(types.AdamParams()).result()
    assert logprobs(client, example(ANSWER)) == before
    train(client, [example(ANSWER)], 1)


def test_the_key_is_asked_for(server: Server) -> None:
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    url = f"{server[1]}/api/v1/get_server_capabilities"
    for headers in ({}, {"X-API-Key": "tml-other"}):
        with pytest.raises(urllib.error.HTTPError, match="401"):
            opener.open(urllib.request.Request(url, headers=headers), timeout=20)
    request = urllib.request.Request(url, headers={"Authorization": f"Bearer {server[2]}"})
    assert json.load(opener.open(request, timeout=20))["supported_models"]
    post = urllib.request.Request(f"{server[1]}/api/v1/forward_backward", b"\xff\xff", {"X-API-Key": server[2]})
    post.add_header("Content-Type", "application/x-protobuf")
    with pytest.raises(urllib.error.HTTPError, match="400"):
        opener.open(post, timeout=20)


def test_a_finished_session_loses_nothing(base: str, folder: Path) -> None:
    with tinker.ServiceClient() as service:
        client = service.create_lora_training_client(base_model=base, rank=RANK).result()
        train(client, [example(ANSWER)], 2)
        expected = logprobs(client, example(ANSWER))
    path = f"tinker://{client.model_id}/weights/unsaved-2"
    again = new_service().create_training_client_from_state_with_optimizer(path).result()
    assert logprobs(again, example(ANSWER)) == expected


def test_a_signal_saves_and_a_mesh_of_two_goes_on(base: str, server: Server, folder: Path) -> None:
    """Ctrl-C ends the server with code 0, and what a model has learnt is kept. The next server has two trainer ranks;
    then one of them dies, which ends it with code 1 and the rank's name."""
    client = new_client(base, 5)
    train(client, [example(ANSWER)], 2)
    state = client.save_state("before").result().path
    expected = train(client, [example(ANSWER)], 3)
    server[0].process.send_signal(signal.SIGINT)
    assert server[0].process.wait(60) == 0
    log = (folder.parent / "log").read_text()
    unsaved = f"tinker://{client.model_id}/weights/unsaved-5"
    assert f"saved {unsaved}" in log
    assert "Traceback" not in log
    second = folder.parent / "second"
    second.mkdir()
    with served(folder, second / "log", parallelism__data_parallel_shard_degree=2) as (run, url, key):
        service = new_service(base_url=url, api_key=key)
        resumed = service.create_training_client_from_state_with_optimizer(state).result()
        assert train(resumed, [example(ANSWER)], 3) == pytest.approx(expected, rel=1e-4)
        kept = service.create_training_client_from_state(unsaved).result()
        assert logprobs(kept, example(ANSWER)) == pytest.approx(logprobs(resumed, example(ANSWER)), abs=1e-4)
        os.kill(run.workers()["trainer[dp=1 tp=0]"], signal.SIGKILL)
        with pytest.raises((tinker.TinkerError, ValueError), match="trainer"):
            train(resumed, [example(ANSWER)], 1)
        assert run.process.wait(60) == 1
        deadline = time.monotonic() + 20
        while run.processes() and time.monotonic() < deadline:
            time.sleep(0.1)
        assert not run.processes()
    text = (second / "log").read_text()
    assert "trainer[dp=1 tp=0] died" in text
    assert "Traceback" not in text
