"""Checks of the model's dimensions against each other, the parallel degrees and the sequence lengths."""

from collections.abc import Iterator

from titan_rl.config.sections import Config, ParallelismSection
from titan_rl.preflight.checks.role_folders import shape_of_role
from titan_rl.text.tokenizer import SIZE
from titan_rl.wire.model_shape import ModelShape

ADDITION_PROMPT = 7  # tokens: BOS and "47+38="
EXPERT_MULTIPLE = 8  # torch's grouped products take rows of whole 16 bytes; bfloat16 has 2


def check_dimensions(config: Config, shape: ModelShape) -> Iterator[str]:
    model = config.model
    if shape.n_heads % shape.n_kv_heads:
        yield f"model.n_kv_heads: expected a divisor of the model's {shape.n_heads} heads, found {shape.n_kv_heads}"
    if shape.head_dim % 2:
        why = "because rotary embeddings pair its elements"
        yield f"model.head_dim: expected an even number, {why}, found {shape.head_dim}"
    if not model.hf_assets_path and shape.parts.heads_fill_dim and model.head_dim * shape.n_heads not in (0, shape.dim):
        product = f"head_dim x n_heads = {shape.head_dim} x {shape.n_heads}"
        yield f"model.dim: expected {product}, as vLLM's {shape.parts.architectures['lm']} has, found {shape.dim}"
    elif not (model.hf_assets_path or model.flavor or model.head_dim) and model.dim % model.n_heads:
        yield f"model.dim: expected a multiple of n_heads = {model.n_heads}, because head_dim is 0, found {model.dim}"
    if shape.experts_per_token > shape.experts:
        most = f"at most the model's {shape.experts} experts"
        yield f"model.experts_per_token: expected {most}, found {shape.experts_per_token}"
    if not model.hf_assets_path and shape.vocab_size < SIZE:
        yield f"model.vocab_size: expected at least the built-in tokenizer's {SIZE}, found {shape.vocab_size}"


def check_parallelism(config: Config, shape: ModelShape) -> Iterator[str]:
    seq_len = config.training.seq_len
    for mesh, p in {"parallelism": config.parallelism, **{n: r.parallelism for n, r in config.roles.items()}}.items():
        key, tp = f"{mesh}.tensor_parallel_degree", p.tensor_parallel_degree
        own = shape_of_role(config, mesh) or shape
        for size in ("n_heads", "n_kv_heads", "hidden_dim", "vocab_size"):
            if getattr(own, size) % tp:
                yield f"{key}: expected a divisor of the model's {size} = {getattr(own, size)}, found {tp}"
        yield from _check_experts(mesh, p, own)
        if (p.enable_sequence_parallel or p.expert_parallel_degree > 1) and seq_len % tp:
            yield f"training.seq_len: expected a multiple of {key} = {tp} (sequence parallelism), found {seq_len}"

    key, tp = "generator.tensor_parallel_degree", config.generator.tensor_parallel_degree
    for size in ("n_heads", "hidden_dim"):
        if getattr(shape, size) % tp:
            yield f"{key}: expected a divisor of the model's {size} = {getattr(shape, size)}, found {tp}"
    if shape.n_kv_heads % tp and tp % shape.n_kv_heads:
        yield f"{key}: expected a divisor or a multiple of the model's n_kv_heads = {shape.n_kv_heads}, found {tp}"


def _check_experts(mesh: str, p: ParallelismSection, shape: ModelShape) -> Iterator[str]:
    tp, shards, ep = p.tensor_parallel_degree, p.data_parallel_shard_degree, p.expert_parallel_degree
    if not shape.experts:
        if ep > 1:
            yield f"{mesh}.expert_parallel_degree: expected 1 for {shape.family}, which has no experts, found {ep}"
        return
    cuts = tp if ep == 1 else 1  # tensor parallelism cuts the experts' matrices, unless whole experts are dealt out
    for size, multiple in (("dim", EXPERT_MULTIPLE), ("hidden_dim", EXPERT_MULTIPLE * cuts)):
        if (found := getattr(shape, size)) % multiple:
            cut = f" that {mesh}.tensor_parallel_degree = {tp} cuts" if multiple > EXPERT_MULTIPLE else ""
            yield f"model.{size}: expected a multiple of {multiple} with experts{cut}, found {found}"
    if shards * tp % ep:
        ranks = f"data_parallel_shard_degree x tensor_parallel_degree = {shards * tp}"
        yield f"{mesh}.expert_parallel_degree: expected a divisor of {ranks}, found {ep}"
    dealt = shards * tp // cuts
    if shape.experts % dealt:
        key = "data_parallel_shard_degree" + (" x tensor_parallel_degree" if dealt > shards else "")
        yield f"{mesh}.{key}: expected a divisor of the model's {shape.experts} experts, found {dealt}"


def check_lengths(config: Config, shape: ModelShape) -> Iterator[str]:
    generator, seq_len, new = config.generator, config.training.seq_len, config.rollout.max_new_tokens
    # check_row_lengths measures the rows of files and chat templates. At least one token, so that these keys fit.
    prompt = ADDITION_PROMPT if (config.task.name, config.task.template) == ("addition", "plain") else 1
    needed = f"at least {prompt + new} (a prompt of {prompt} and rollout.max_new_tokens = {new})"
    most = f"at most the model's max_seq_len = {shape.max_seq_len}"
    if seq_len > shape.max_seq_len:
        yield f"training.seq_len: expected {most}, found {seq_len}"
    if prompt + new > seq_len:
        yield f"training.seq_len: expected {needed}, found {seq_len}"
    if generator.max_model_len > shape.max_seq_len:
        yield f"generator.max_model_len: expected {most}, found {generator.max_model_len}"
    elif generator.max_model_len > seq_len:
        row = f"at most training.seq_len = {seq_len}, because a rollout must fit a packed row"
        yield f"generator.max_model_len: expected {row}, found {generator.max_model_len}"
    if 0 < generator.max_model_len < prompt + new:
        yield f"generator.max_model_len: expected {needed}, found {generator.max_model_len}"
