"""transformers' generate, which TRL samples with by default, on the requests of bench_engine.py, without log-probs:
scripts/bench/engine_transformers.py SHAPE FOLDER SEQUENCES"""

import sys
from typing import Any

import torch
from transformers import AutoModelForCausalLM, GenerationConfig

from bench.engine_requests import Forward, Group, answer, engine_shape


def main() -> None:
    name, folder, sequences = sys.argv[1:]
    shape = engine_shape(name, int(sequences))
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    forward = Forward(model)

    def generate(groups: list[Group]) -> None:
        prompts = torch.tensor([group.prompt for group in groups for _ in group.seeds])
        longest = max(group.length for group in groups)  # the answers of a batch end together
        settings = GenerationConfig(max_new_tokens=longest, do_sample=True, top_k=0, eos_token_id=None, pad_token_id=0)
        with torch.inference_mode():
            model.generate(prompts, attention_mask=torch.ones_like(prompts), generation_config=settings)

    answer(shape, forward, generate)


if __name__ == "__main__":
    main()
