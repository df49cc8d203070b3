"""TRL's GRPO on the problems of grpo_smollm2. Runs in an environment with TRL and reasoning-gym, and without titan_rl.

TRL_PYTHON scripts/bench/smollm2_trl.py GIVEN.json      # prints {"step", "took"} and {"step", "seconds", "score"} lines
"""

import json
import os
import re
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset  # pyright: ignore[reportMissingImports]
from reasoning_gym.factory import get_score_answer_fn  # pyright: ignore[reportMissingImports]
from transformers import AutoTokenizer, LlamaForCausalLM, TrainerCallback
from trl import GRPOConfig, GRPOTrainer  # pyright: ignore[reportMissingImports]


class Scorer:
    """Scores answers as the verifier "reasoning_gym" does."""

    def __init__(self, given: dict[str, Any]) -> None:
        self._number, self._by_number = re.compile(given["number"]), given["extract"] == "number"

    def score(self, text: str, dataset: str, entry: dict[str, Any]) -> float:
        numbers = [found[0] for found in self._number.finditer(text)]
        read = (numbers or [""])[-1] if self._by_number else text.strip()
        score_of: Any = get_score_answer_fn(dataset)
        return float(score_of(read, entry))

    def rewards(
        self, completions: Sequence[Any], dataset: Sequence[str], entry: Sequence[str], **_: Any
    ) -> list[float]:
        texts = [completion[0]["content"] for completion in completions]
        return [self.score(*each) for each in zip(texts, dataset, map(json.loads, entry), strict=True)]


class Clock(TrainerCallback):
    """Prints the seconds of each step, and answers the held-out problems greedily as often as a run does."""

    def __init__(self, model: Any, tokenizer: Any, given: dict[str, Any], scorer: Scorer) -> None:
        self._model, self._tokenizer, self._given, self._scorer = model, tokenizer, given, scorer
        prompts = [problem["prompt"] for problem in given["heldout"]]
        texts = [tokenizer.apply_chat_template(each, add_generation_prompt=True, tokenize=False) for each in prompts]
        self._inputs = tokenizer(
            texts, return_tensors="pt", padding=True, padding_side="left", add_special_tokens=False
        )
        self._began = 0.0

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self._examine(0)
        self._began = time.time()

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        print(json.dumps({"step": state.global_step, "took": time.time() - self._began}), flush=True)
        if state.global_step % self._given["eval"]["interval"] == 0 or state.global_step == state.max_steps:
            self._examine(state.global_step)
        self._began = time.time()

    def _examine(self, step: int) -> None:
        training = self._model.training
        self._model.eval()
        with torch.inference_mode():
            longest = self._given["rollout"]["max_new_tokens"]
            tokens = self._model.generate(**self._inputs, do_sample=False, max_new_tokens=longest)
        self._model.train(training)
        said = self._tokenizer.batch_decode(tokens[:, self._inputs["input_ids"].shape[1] :], skip_special_tokens=True)
        problems = self._given["heldout"]
        scores = [
            self._scorer.score(text, problem["dataset"], problem["entry"])
            for text, problem in zip(said, problems, strict=True)
        ]
        line = {"step": step, "seconds": time.time() - self._given["began"], "score": sum(scores) / len(scores)}
        print(json.dumps(line), flush=True)


def configuration(given: dict[str, Any], folder: str) -> Any:
    rollout, optimizer, algorithm = given["rollout"], given["optimizer"], given["algorithm"]
    return GRPOConfig(
        output_dir=folder,
        use_cpu=True,
        bf16=False,
        per_device_train_batch_size=rollout["groups_per_step"] * rollout["group_size"],
        gradient_accumulation_steps=1,
        num_generations=rollout["group_size"],
        max_completion_length=rollout["max_new_tokens"],
        max_steps=given["training"]["steps"],
        learning_rate=optimizer["lr"],
        lr_scheduler_type="constant",
        optim="adamw_torch_fused",
        adam_beta1=optimizer["beta1"],
        adam_beta2=optimizer["beta2"],
        weight_decay=optimizer["weight_decay"],
        max_grad_norm=given["training"]["max_norm"],
        epsilon=algorithm["clip_low"],
        epsilon_high=algorithm["clip_high"],
        beta=0.0,
        temperature=rollout["temperature"],
        loss_type="bnpo",  # one mean over the tokens of a step
        gradient_checkpointing=False,
        shuffle_dataset=False,
        save_strategy="no",
        logging_strategy="no",
        report_to="none",
        disable_tqdm=True,
        seed=given["seed"],
    )


def main() -> None:
    given = json.loads(Path(sys.argv[1]).read_text())
    torch.set_num_threads(len(os.sched_getaffinity(0)))
    tokenizer = AutoTokenizer.from_pretrained(given["folder"])
    model: Any = LlamaForCausalLM.from_pretrained(given["folder"], dtype=torch.float32)
    scorer = Scorer(given)
    rows = [{**problem, "entry": json.dumps(problem["entry"])} for problem in given["train"]]
    with tempfile.TemporaryDirectory() as output:
        GRPOTrainer(
            model=model,
            reward_funcs=[scorer.rewards],
            args=configuration(given, output),
            train_dataset=Dataset.from_list(rows),
            processing_class=tokenizer,
            callbacks=[Clock(model, tokenizer, given, scorer)],
        ).train()


if __name__ == "__main__":
    main()
