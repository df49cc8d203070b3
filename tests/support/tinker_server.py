"""A process of `titan_rl serve --tinker`, and clients of Tinker's SDK that talk to it."""

import os
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import tinker
import torch
from tinker import types

from support.running import SMALL, Run

RANK = 8
SMALL_MODEL = {key: value for key, value in SMALL.items() if key.startswith(("model.", "hosts."))}
PROMPT = [1, 4, 5, 13, 6, 7, 14]


_services: list[tinker.ServiceClient] = []
"""The open ones. Each sends its server a sign of life every ten seconds, until it is closed."""


def new_service(**keys: Any) -> tinker.ServiceClient:
    """Return a client of the SDK that ends with its server."""
    service = tinker.ServiceClient(**keys)
    _services.append(service)
    return service


@contextmanager
def served(folder: Path, log: Path, **overrides: Any) -> Iterator[tuple[Run, str, str]]:
    """Yield the server's process as a Run, its URL and its key."""
    keys = {**SMALL_MODEL, "job.dump_folder": folder, "lora.rank": RANK}
    keys |= {key.replace("__", "."): value for key, value in overrides.items()}
    flags = [f"--{key}={value}" for key, value in keys.items()]
    with log.open("w") as out:
        process = subprocess.Popen(
            [sys.executable, "-u", "-m", "titan_rl", "serve", "--tinker", "--config", "tinker_llama", *flags],
            stdout=out,
            stderr=subprocess.STDOUT,
            text=True,
            env={**os.environ, "TITAN_RL_TEST_RUN": str(log.parent)},
        )
    deadline = time.monotonic() + 200
    while "TINKER_API_KEY=" not in log.read_text() and process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.1)
    lines = dict(line.strip().split("=", 1) for line in log.read_text().splitlines() if line.startswith("  TINKER_"))
    try:
        assert lines, log.read_text()
        yield Run(log.parent, process), lines["TINKER_BASE_URL"], lines["TINKER_API_KEY"]
    finally:
        process.kill()
        process.wait()
        while _services:
            _services.pop().holder.close()


def example(answer: Sequence[int], weight: float = 1.0) -> types.Datum:
    """Return a datum whose loss is the answer's negative log-prob after PROMPT."""
    tokens = [*PROMPT, *answer]
    weights = [0.0] * (len(PROMPT) - 1) + [weight] * len(answer)
    return types.Datum(
        model_input=types.ModelInput.from_ints(tokens[:-1]),
        loss_fn_inputs={
            "target_tokens": types.TensorData.from_torch(torch.tensor(tokens[1:])),
            "weights": types.TensorData.from_torch(torch.tensor(weights)),
        },
    )


def train(client: tinker.TrainingClient, data: list[types.Datum], steps: int, lr: float = 1e-2) -> list[float]:
    """Take supervised steps; return the loss before each."""
    losses = []
    for _ in range(steps):
        computed = client.forward_backward(data, "cross_entropy")
        client.optim_step(types.AdamParams(learning_rate=lr)).result()
        losses.append(computed.result().metrics["loss:sum"])
    return losses


def logprobs(client: tinker.TrainingClient, datum: types.Datum) -> list[float]:
    return client.forward([datum], "cross_entropy").result().loss_fn_outputs[0]["logprobs"].tolist()


def policy_step(
    client: tinker.TrainingClient, loss: str, seed: int, samples: int = 16, lr: float = 2e-2, **config: float
) -> float:
    """Take a step of the cookbook's rl_loop on a toy task, whose reward is the share of small tokens. Return the mean
    reward of the policy before it."""
    sampler = client.save_weights_and_get_sampling_client().result()
    prompts = [types.ModelInput.from_ints([*PROMPT, 4 + i]) for i in range(2)]
    params = types.SamplingParams(max_tokens=6, stop=[], seed=seed)
    futures = [sampler.sample(prompt=prompt, num_samples=samples, sampling_params=params) for prompt in prompts]
    data, rewards = [], []
    for prompt, future in zip(prompts, futures, strict=True):
        sequences = future.result().sequences
        scores = [sum(token < 32 for token in each.tokens) / len(each.tokens) for each in sequences]
        mean = sum(scores) / len(scores)
        rewards.append(mean)
        for each, score in zip(sequences, scores, strict=True):
            ahead = prompt.length - 1
            model_input = prompt.append(types.EncodedTextChunk(tokens=each.tokens[:-1]))
            inputs: dict[str, Any] = {
                "target_tokens": torch.tensor([0] * ahead + each.tokens),
                "logprobs": torch.tensor([0.0] * ahead + (each.logprobs or [])),
                "advantages": torch.tensor([0.0] * ahead + [score - mean] * len(each.tokens)),
            }
            if loss == "gspo":
                inputs["sequence_ratio_mask"] = torch.tensor([0.0] * ahead + [1.0] * len(each.tokens))
            loss_fn_inputs = {name: types.TensorData.from_torch(value) for name, value in inputs.items()}
            data.append(types.Datum(model_input=model_input, loss_fn_inputs=loss_fn_inputs))
    computed = client.forward_backward(data, loss, config or None)  # type: ignore[arg-type]
    stepped = client.optim_step(types.AdamParams(learning_rate=lr, beta1=0.9, beta2=0.95, eps=1e-8))
    computed.result()
    stepped.result()
    return sum(rewards) / len(rewards)
