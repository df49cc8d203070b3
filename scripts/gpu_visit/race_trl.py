#!/usr/bin/env python3
"""Time the steps of TRL's GRPO with vLLM in the same process, on rows of {"question", ...}. Needs trl 1.16.

    python scripts/gpu_visit/race_trl.py FOLDER ROWS --groups 16 --size 16 --answer 512 --steps 5 --microbatch 32
    python scripts/gpu_visit/race_trl.py FOLDER ROWS --groups 2 --size 2 --answer 4 --device cpu   # without vLLM

On a GPU all answers have --answer tokens: the end of a turn is ignored. Masters are float32 and products bfloat16, as
in titan_rl, and nothing is recomputed in the backward. Prints a JSON line for the start and for each step; its parts
are TRL's own profiling contexts (generation, weight sync), the rest is forward, backward and optimizer.
"""

import argparse
import json
import os
import tempfile
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

PROMPT = 512  # longest, in tokens


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, metavar="FOLDER")
    parser.add_argument("rows", type=Path, metavar="ROWS")
    parser.add_argument("--groups", type=int, default=8)
    parser.add_argument("--size", type=int, default=8, help="samples of a group")
    parser.add_argument("--answer", type=int, default=16, help="tokens of each answer")
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--microbatch", type=int, default=0, help="samples; 0: all")
    parser.add_argument("--share", type=float, default=0.3, help="vllm_gpu_memory_utilization")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    return parser.parse_args()


def main() -> None:
    a = arguments()
    cpu = a.device == "cpu"
    os.environ.update(HF_HUB_OFFLINE="1", TRL_EXPERIMENTAL_SILENCE="1", VLLM_ENABLE_V1_MULTIPROCESSING="0")
    if cpu:
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    import torch
    import trl.trainer.grpo_trainer as grpo  # pyright: ignore[reportMissingImports]
    from datasets import Dataset  # pyright: ignore[reportMissingImports]
    from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
    from trl import GRPOConfig, GRPOTrainer  # pyright: ignore[reportMissingImports]
    from trl.extras import profiling  # pyright: ignore[reportMissingImports]

    parts = defaultdict[str, float](float)

    class Timed(profiling.ProfilingContext):
        """TRL's context, which reports to trackers only, with its seconds added up."""

        def __enter__(self) -> Any:
            self._own = time.perf_counter()
            return super().__enter__()

        def __exit__(self, *error: Any) -> Any:
            parts[self.name.split(".")[-1]] += time.perf_counter() - self._own
            return super().__exit__(*error)

    def timed(trainer: Any, name: str) -> Timed:
        return Timed(name=f"{type(trainer).__name__}.{name}", report_to=[], is_main_process=True, step=0)

    profiling.ProfilingContext, profiling.profiling_context, grpo.profiling_context = Timed, timed, timed

    class Clock(TrainerCallback):
        def on_train_begin(self, *_: Any, **__: Any) -> None:
            self._began = time.perf_counter()

        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            if not cpu:
                torch.cuda.synchronize()
            now = time.perf_counter()
            line = {"step": state.global_step, "seconds": now - self._began, **parts}
            if not cpu:
                line["peak_gib"] = torch.cuda.max_memory_allocated() / 2**30
            print(json.dumps(line), flush=True)
            parts.clear()
            self._began = time.perf_counter()

    samples = a.groups * a.size
    microbatch = a.microbatch or samples
    rows = [json.loads(line) for line in a.rows.read_text().splitlines()]
    data = Dataset.from_list([{"prompt": [{"role": "user", "content": row["question"]}]} for row in rows])
    model = AutoModelForCausalLM.from_pretrained(a.folder, dtype=torch.float32, attn_implementation="sdpa")
    on_gpu: dict[str, Any] = {
        "use_vllm": True,
        "vllm_mode": "colocate",
        "vllm_gpu_memory_utilization": a.share,
        "vllm_max_model_length": PROMPT + a.answer,
        "vllm_tensor_parallel_size": 1,
        "generation_kwargs": {"ignore_eos": True},
    }
    config = GRPOConfig(
        output_dir=tempfile.mkdtemp(),
        use_cpu=cpu,
        bf16=not cpu,
        per_device_train_batch_size=microbatch,
        gradient_accumulation_steps=samples // microbatch,
        num_generations=a.size,
        max_completion_length=a.answer,
        max_steps=a.steps,
        learning_rate=1e-6,
        lr_scheduler_type="constant",
        optim="adamw_torch_fused",
        beta=0.0,
        loss_type="bnpo",
        temperature=1.0,
        gradient_checkpointing=False,
        save_strategy="no",
        logging_strategy="no",
        report_to="none",
        disable_tqdm=True,
        **({} if cpu else on_gpu),
    )

    def reward(completions: list[Any], **_: Any) -> list[float]:
        return [float(len(str(each)) % 7) for each in completions]

    began = time.perf_counter()
    trainer = GRPOTrainer(
        model=model,
        reward_funcs=[reward],
        args=config,
        train_dataset=data,
        processing_class=AutoTokenizer.from_pretrained(a.folder),
        callbacks=[Clock()],
    )
    print(json.dumps({"start_s": time.perf_counter() - began}), flush=True)
    trainer.train()


if __name__ == "__main__":
    main()
