"""Checks of what the engines would refuse: when they are built, or request by request."""

from collections.abc import Iterator

from titan_rl.config.sections import Config
from titan_rl.preflight.checks.assets import policy_tokenizer
from titan_rl.wire.model_shape import ModelShape

COLDEST, HOTTEST = 0.01, 2.0  # vLLM samples at 0.01 below it, and refuses higher ones
SEEDS = 2**32  # vLLM seeds numpy, which takes 32 bits
BATCHED_TOKENS = 2048  # vLLM's default of max_num_batched_tokens, unless a sequence is longer


def check_sampling(config: Config, shape: ModelShape) -> Iterator[str]:
    if not config.samples_rollouts:
        return
    rollout, vocabulary = config.rollout, f"the model's vocabulary, 0 to {shape.vocab_size - 1}"
    if config.algorithm.kind == "rl" and not COLDEST <= rollout.temperature <= HOTTEST:
        yield f"rollout.temperature: expected a value in [{COLDEST:g}, {HOTTEST:g}], found {rollout.temperature:g}"
    if config.algorithm.kind == "rl" and rollout.top_k == 1:
        yield "rollout.top_k: expected 0 or at least 2, because a token without an alternative teaches nothing, found 1"
    if outside := [token for token in rollout.stop_token_ids if not 0 <= token < shape.vocab_size]:
        yield f"rollout.stop_token_ids: expected tokens of {vocabulary}, found {', '.join(map(str, outside))}"
    with policy_tokenizer(config) as tokenizer:
        ends = [] if tokenizer is None else [token for token in tokenizer.eos_ids if not 0 <= token < shape.vocab_size]
    if ends:
        found = f"found {', '.join(map(str, ends))} in {config.model.hf_assets_path}"
        yield f"model.hf_assets_path: expected an eos_token_id of {vocabulary}, {found}"
    if config.debug.seed >= SEEDS:
        why = "because vLLM takes no other"
        yield f"debug.seed: expected a value below 2^32 = {SEEDS}, {why}, found {config.debug.seed}"
    longest = config.generator.max_model_len or config.training.seq_len
    batch = config.generator.max_num_batched_tokens or max(BATCHED_TOKENS, longest)
    if config.generator.max_num_seqs > batch:
        why = "vLLM's limit on the tokens of a step"
        yield f"generator.max_num_seqs: expected at most {batch}, {why}, found {config.generator.max_num_seqs}"
