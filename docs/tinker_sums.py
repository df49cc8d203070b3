"""Teaches SmolLM2 additions by a policy gradient, through Tinker's SDK.

python -m titan_rl serve --tinker --config tinker_smollm2    # prints the two variables
TINKER_BASE_URL=... TINKER_API_KEY=... python docs/tinker_sums.py --steps 16
"""

import argparse
import random
import re
import time
from typing import Any, NamedTuple

import tinker
import torch
from tinker import types

SYSTEM = {"role": "system", "content": "Answer with just the number."}
HELD_OUT = 64


class Problem(NamedTuple):
    text: str
    answer: int


class Answer(NamedTuple):
    prompt: types.ModelInput
    sequence: types.SampledSequence
    reward: float


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=16)
    parser.add_argument("--groups", type=int, default=8)
    parser.add_argument("--samples", type=int, default=8)
    parser.add_argument("--lr", type=float, default=3e-4)
    parser.add_argument("--seed", type=int, default=0)
    a = parser.parse_args()
    base = tinker.RestClient().get_server_capabilities().result().supported_models[0].model_name
    assert base
    client = tinker.ServiceClient().create_lora_training_client(base_model=base, rank=16, seed=a.seed).result()
    chance, began = random.Random(a.seed), time.time()
    tokenizer: Any = client.get_tokenizer()
    held_out = [problem(random.Random(-1 - i)) for i in range(HELD_OUT)]

    def answers(problems: list[Problem], n: int, temperature: float, seed: int) -> list[list[Answer]]:
        """Return n answers to each problem, by the weights of now."""
        sampler = client.save_weights_and_get_sampling_client().result()
        params = types.SamplingParams(max_tokens=16, temperature=temperature, seed=seed)
        prompts = [types.ModelInput.from_ints(prompt_of(tokenizer, each.text)) for each in problems]
        futures = [sampler.sample(prompt, n, params) for prompt in prompts]
        found: list[list[Answer]] = []
        for prompt, each, future in zip(prompts, problems, futures, strict=True):
            sequences = future.result().sequences
            found.append([Answer(prompt, s, reward(tokenizer.decode(s.tokens), each.answer)) for s in sequences])
        return found

    def score(name: str) -> None:
        solved = sum(group[0].reward for group in answers(held_out, 1, 0.0, 0))
        print(f"{name}: held-out score {solved / HELD_OUT:.3f}, {time.time() - began:.0f} s", flush=True)

    score("before")
    for step in range(1, a.steps + 1):
        groups = answers([problem(chance) for _ in range(a.groups)], a.samples, 0.7, a.seed + step)
        data = [each for group in groups for each in data_of(group)]
        if data:
            computed = client.forward_backward(data, "importance_sampling")
            client.optim_step(types.AdamParams(learning_rate=a.lr)).result()
            computed.result()
        rewards = [each.reward for group in groups for each in group]
        print(f"step {step}: reward {sum(rewards) / len(rewards):.3f}, {time.time() - began:.0f} s", flush=True)
        if step % 4 == 0:
            score(f"step {step}")


def problem(chance: random.Random) -> Problem:
    """Return an addition of numbers with one or two digits."""
    a, b = (chance.randrange(1, 10 ** chance.randint(1, 2)) for _ in range(2))
    return Problem(f"Calculate {a} + {b}.", a + b)


def prompt_of(tokenizer: Any, text: str) -> list[int]:
    chat = tokenizer.apply_chat_template(
        [SYSTEM, {"role": "user", "content": text}], add_generation_prompt=True, tokenize=False
    )
    return list(tokenizer.encode(chat, add_special_tokens=False))


def reward(text: str, expected: int) -> float:
    numbers = re.findall(r"\d+", text)
    return float(bool(numbers) and int(numbers[-1]) == expected)


def data_of(group: list[Answer]) -> list[types.Datum]:
    """Return a group's answers with their advantages; nothing if all have one reward."""
    mean = sum(each.reward for each in group) / len(group)
    if all(each.reward == mean for each in group):
        return []
    data: list[types.Datum] = []
    for prompt, sequence, reward in group:
        ahead, tokens = prompt.length - 1, sequence.tokens
        inputs = {
            "target_tokens": torch.tensor([0] * ahead + tokens),
            "logprobs": torch.tensor([0.0] * ahead + (sequence.logprobs or [])),
            "advantages": torch.tensor([0.0] * ahead + [reward - mean] * len(tokens)),
        }
        data.append(
            types.Datum(
                model_input=prompt.append(types.EncodedTextChunk(tokens=tokens[:-1])),
                loss_fn_inputs={name: types.TensorData.from_torch(value) for name, value in inputs.items()},
            )
        )
    return data


if __name__ == "__main__":
    main()
