"""TRL's GRPO on addition, until a held-out score. Runs in an environment with TRL, and without titan_rl.

TRL_PYTHON scripts/bench/score_trl.py MODEL_FOLDER PROBLEMS.json        # prints [step, score] at every evaluation
"""

import json
import os
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset  # pyright: ignore[reportMissingImports]
from transformers import AutoTokenizer, LlamaForCausalLM, TrainerCallback
from trl import GRPOConfig, GRPOTrainer  # pyright: ignore[reportMissingImports]

LONGEST = 8  # tokens of an answer


def exact(completions: Sequence[str], answer: Sequence[str], **_: Any) -> list[float]:
    return [float(said == right) for said, right in zip(completions, answer, strict=True)]


class Examiner(TrainerCallback):
    """Answers the held-out problems greedily, and ends the training once enough are right."""

    def __init__(self, model: Any, tokenizer: Any, given: dict[str, Any]) -> None:
        self._model, self._tokenizer, self._given = model, tokenizer, given
        texts, self._answers = zip(*given["heldout"], strict=True)
        self._inputs = tokenizer(list(texts), return_tensors="pt")

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self._examine(0, control)

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if state.global_step % self._given["interval"] == 0:
            self._examine(state.global_step, control)

    def _examine(self, step: int, control: Any) -> None:
        with torch.inference_mode():
            tokens = self._model.generate(**self._inputs, do_sample=False, max_new_tokens=LONGEST)
        asked = self._inputs["input_ids"].shape[1]
        said = self._tokenizer.batch_decode(tokens[:, asked:], skip_special_tokens=True)
        score = sum(exact(said, self._answers)) / len(said)
        print(json.dumps([step, score]), flush=True)
        control.should_training_stop = score >= self._given["score"]


def configuration(given: dict[str, Any], folder: str) -> Any:
    """grpo_llama's batch, rate and clip. TRL has no entropy bonus, and its rate decays from the warm-up on."""
    return GRPOConfig(
        output_dir=folder,
        use_cpu=True,
        bf16=False,
        per_device_train_batch_size=512,
        gradient_accumulation_steps=1,
        num_generations=4,
        max_completion_length=LONGEST,
        max_steps=given["steps"],
        learning_rate=8e-4,
        lr_scheduler_type="linear",
        warmup_steps=5,
        optim="adamw_torch_fused",
        adam_beta2=0.999,
        weight_decay=0.0,
        max_grad_norm=1.0,
        epsilon=0.2,
        epsilon_high=0.28,
        beta=0.0,
        temperature=1.0,
        loss_type="bnpo",  # one mean over the tokens of a step
        gradient_checkpointing=False,
        save_strategy="no",
        logging_strategy="no",
        report_to="none",
        disable_tqdm=True,
        seed=given["seed"],
    )


def main() -> None:
    folder, given = sys.argv[1], json.loads(Path(sys.argv[2]).read_text())
    torch.set_num_threads(len(os.sched_getaffinity(0)))
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model: Any = LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with tempfile.TemporaryDirectory() as output:
        GRPOTrainer(
            model=model,
            reward_funcs=[exact],
            args=configuration(given, output),
            train_dataset=Dataset.from_list([{"prompt": text, "answer": right} for text, right in given["train"]]),
            processing_class=tokenizer,
            callbacks=[Examiner(model, tokenizer, given)],
        ).train()


if __name__ == "__main__":
    main()
