"""Bare vLLM on the requests of bench_engine.py, with its own layout of the weights: scripts/bench/engine_vllm.py SHAPE
FOLDER SEQUENCES"""

import sys

from vllm import LLM, SamplingParams
from vllm.sampling_params import RequestOutputKind

from bench.engine_requests import Forward, Group, answer, engine_shape


def main() -> None:
    name, folder, sequences = sys.argv[1:]
    shape = engine_shape(name, int(sequences))
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
    engine = llm.llm_engine
    forward = Forward(engine.model_executor.driver_worker.get_model())  # pyright: ignore[reportAttributeAccessIssue]

    def generate(groups: list[Group]) -> None:
        prompts = [{"prompt_token_ids": group.prompt} for group in groups for _ in group.seeds]
        sampling = [
            SamplingParams(
                max_tokens=group.length,
                ignore_eos=True,
                logprobs=0,
                flat_logprobs=True,
                detokenize=False,
                output_kind=RequestOutputKind.FINAL_ONLY,
            )
            for group in groups
            for _ in group.seeds
        ]
        llm.generate(prompts, sampling, use_tqdm=False)  # pyright: ignore[reportArgumentType]

    answer(shape, forward, generate)


if __name__ == "__main__":
    main()
