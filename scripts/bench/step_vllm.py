"""Bare vLLM on the requests of a step: its offline engine in this process, with the weights' layout of its choice.

.venv/bin/python scripts/bench/step_vllm.py SHAPE MODEL_FOLDER
"""

import json
import random
import sys
import time

from vllm import LLM, SamplingParams
from vllm.sampling_params import RequestOutputKind

from bench.step_shapes import SHAPES


def sampling_of(length: int) -> SamplingParams:
    return SamplingParams(
        max_tokens=length,
        ignore_eos=True,
        logprobs=0,
        flat_logprobs=True,
        detokenize=False,
        output_kind=RequestOutputKind.FINAL_ONLY,
    )


def main() -> None:
    shape, folder = SHAPES[sys.argv[1]], sys.argv[2]
    llm = LLM(
        folder,
        dtype="float32",
        skip_tokenizer_init=True,
        max_num_seqs=512,
        max_model_len=shape.seq_len,
        block_size=32,
        kv_cache_memory_bytes=256 << 20,
        enable_prefix_caching=True,
        enforce_eager=True,
        disable_log_stats=True,
        logprobs_mode="processed_logprobs",
        generation_config="vllm",
    )
    draw = random.Random(0)
    for step in range(shape.warm_up + shape.steps):
        contexts = [draw.choices(range(shape.vocab_size), k=shape.prompt) for _ in range(shape.groups)]
        prompts = [{"prompt_token_ids": context} for context in contexts for _ in range(shape.group_size)]
        read = draw.choices(range(shape.vocab_size), k=shape.read)
        began, cpu = time.perf_counter(), time.process_time()
        found = llm.generate(prompts, list(map(sampling_of, shape.lengths(step))), use_tqdm=False)  # pyright: ignore[reportArgumentType]
        if shape.read:
            begun = [[*one.prompt_token_ids, *one.outputs[0].token_ids, *read] for one in found]  # pyright: ignore
            prompts = [{"prompt_token_ids": context} for context in begun]
            llm.generate(prompts, [sampling_of(shape.second)] * len(prompts), use_tqdm=False)  # pyright: ignore[reportArgumentType]
        seconds = time.perf_counter() - began
        if step >= shape.warm_up:
            print(json.dumps({"step": seconds, "generation": seconds, "cpu": time.process_time() - cpu}), flush=True)


if __name__ == "__main__":
    main()
