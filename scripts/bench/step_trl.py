"""TRL's GRPO step on the same prompts, lengths and weights. Runs in an environment with TRL, and without titan_rl.

TRL_PYTHON scripts/bench/step_trl.py SHAPE MODEL_FOLDER
"""

import json
import os
import random
import sys
import tempfile
import time
from collections.abc import Callable
from typing import Any

import torch
from datasets import Dataset  # pyright: ignore[reportMissingImports]
from transformers import AutoTokenizer, LlamaForCausalLM, LogitsProcessor, LogitsProcessorList, TrainerCallback
from trl import GRPOConfig, GRPOTrainer  # pyright: ignore[reportMissingImports]

from bench.step_shapes import PROMPTS, SHAPES, Shape, chats, share_of_digits


class Lengths(LogitsProcessor):
    """Samples EOS at the end of each answer, and never before it."""

    def __init__(self, prompt: int, lengths: list[int], eos: int) -> None:
        self._ends, self._eos = prompt + torch.tensor(lengths), eos

    def __call__(self, input_ids: Any, scores: Any) -> Any:
        ends = self._ends == input_ids.shape[1] + 1
        scores = scores.clone()
        scores[:, self._eos] = -torch.inf
        scores[ends] = -torch.inf
        scores[ends, self._eos] = 0.0
        return scores


class Clock(TrainerCallback):
    """Prints the seconds of each step and of its parts."""

    def __init__(self, warm_up: int) -> None:
        self._warm_up = warm_up
        self.parts: dict[str, float] = {}
        self._began = self._cpu = 0.0

    def timed(self, part: str, work: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **keywords: Any) -> Any:
            began = time.perf_counter()
            result = work(*args, **keywords)
            self.parts[part] = self.parts.get(part, 0.0) + time.perf_counter() - began
            return result

        return run

    def on_train_begin(self, *_: Any, **__: Any) -> None:
        self._began, self._cpu = time.perf_counter(), time.process_time()

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        now, cpu = time.perf_counter(), time.process_time()
        seconds = now - self._began
        training = seconds - self.parts["inputs"]  # the rest of the inputs: prompts, rewards, advantages
        line = {"step": seconds, "generation": self.parts["generation"], "training": training, "cpu": cpu - self._cpu}
        if state.global_step > self._warm_up:
            print(json.dumps(line), flush=True)
        self._began, self._cpu, self.parts = now, cpu, {}


def configuration(shape: Shape, folder: str) -> Any:
    return GRPOConfig(
        output_dir=folder,
        use_cpu=True,
        bf16=False,
        per_device_train_batch_size=shape.samples,
        gradient_accumulation_steps=1,
        num_generations=shape.group_size,
        max_completion_length=shape.longest,
        max_steps=shape.warm_up + shape.steps,
        learning_rate=shape.lr,
        lr_scheduler_type="constant",
        optim="adamw_torch_fused",
        adam_beta2=0.999,
        weight_decay=0.0,
        max_grad_norm=1.0,
        epsilon=0.2,
        epsilon_high=0.28,
        beta=0.0,
        temperature=1.0,
        gradient_checkpointing=False,
        save_strategy="no",
        logging_strategy="no",
        report_to="none",
        disable_tqdm=True,
        seed=0,
    )


def main() -> None:
    shape, folder = SHAPES[sys.argv[1]], sys.argv[2]
    torch.set_num_threads(len(os.sched_getaffinity(0)))
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model: Any = LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32)
    draw, clock = random.Random(0), Clock(shape.warm_up)
    texts = [f"{draw.randrange(100):02d}+{draw.randrange(100):02d}=" for _ in range(PROMPTS)]
    prompts = chats() if shape.pretrained else texts
    steps = iter(range(10**9))
    generate = clock.timed("generation", model.generate)

    def with_lengths(**inputs: Any) -> torch.Tensor:
        if (found := inputs["input_ids"].shape[1]) != shape.prompt:
            raise ValueError(f"expected prompts of {shape.prompt} tokens, found {found}")
        lengths = Lengths(shape.prompt, shape.lengths(next(steps)), tokenizer.eos_token_id)
        return generate(**inputs, logits_processor=LogitsProcessorList([lengths]))

    model.generate = with_lengths

    def rewards(completions: list[Any], **_: Any) -> list[float]:
        texts = [completion[0]["content"] for completion in completions] if shape.pretrained else completions
        return [share_of_digits(text) for text in texts]

    with tempfile.TemporaryDirectory() as output:
        trainer = GRPOTrainer(
            model=model,
            reward_funcs=[rewards],
            args=configuration(shape, output),
            train_dataset=Dataset.from_list([{"prompt": prompt} for prompt in prompts]),
            processing_class=tokenizer,
            callbacks=[clock],
        )
        trainer._prepare_inputs = clock.timed("inputs", trainer._prepare_inputs)
        trainer.train()


if __name__ == "__main__":
    main()
