"""Finds the models' dimensions: in [model], or in a Hugging Face folder."""

from contextlib import suppress

from titan_rl.config.sections import Config, ModelSection
from titan_rl.wire.hf_config import GPT_OSS_EPS
from titan_rl.wire.model_families import FAMILIES
from titan_rl.wire.model_shape import ModelShape, shape_of_folder

MAX_SEQ_LEN = 2**15
"""Context length, in tokens, of a model that [model] describes."""
ROPE_THETA = 10000.0
"""Base of its rotary position embedding."""
NORM_EPS = 1e-6
"""Epsilon of its RMSNorm."""
YARN = {"rope_type": "yarn", "factor": 32.0, "original_max_position_embeddings": 4096}
YARN |= {"beta_fast": 32.0, "beta_slow": 1.0, "truncate": False}
"""gpt-oss's rotary embedding, without which vLLM has none of its models."""


def shape_of(model: ModelSection) -> ModelShape:
    """Return the shape that [model] describes. A ValueError names the key to change."""
    if model.hf_assets_path:
        shape = shape_of_folder(model.hf_assets_path, "model.hf_assets_path", model.spec, model.vision)
        if model.name not in ("auto", shape.family):
            expected = f'expected "{shape.family}" or "auto", the family of {model.hf_assets_path}'
            raise ValueError(f'model.name: {expected}, found "{model.name}"')
        return shape
    if model.spec:
        raise ValueError("model.hf_assets_path: expected a Hugging Face folder, required by model.spec, found none")
    if not model.head_dim and model.dim < model.n_heads:
        least = f"at least n_heads = {model.n_heads}, because head_dim is 0"
        raise ValueError(f"model.dim: expected {least}, found {model.dim}")
    family = "llama3" if model.name == "auto" else model.name
    parts = FAMILIES[family]
    routed, dense = parts.experts, int(parts.biased_routes and model.n_layers > 1)
    head_dim = model.head_dim or model.dim // model.n_heads
    rotary_dim = int(head_dim * parts.rotated_share)
    return ModelShape(
        family=family,
        vocab_size=model.vocab_size,
        dim=model.dim,
        n_layers=model.n_layers,
        n_heads=model.n_heads,
        n_kv_heads=model.n_kv_heads,
        head_dim=head_dim,
        hidden_dim=model.hidden_dim,
        max_seq_len=MAX_SEQ_LEN,
        rope_theta=ROPE_THETA,
        norm_eps=GPT_OSS_EPS if parts.sinks else NORM_EPS,
        tied=model.enable_weight_tying,
        experts=model.experts if routed else 0,
        experts_per_token=model.experts_per_token if routed else 0,
        norm_routes=routed,
        dense_layers=dense,
        dense_hidden_dim=model.hidden_dim * (1 + model.experts_per_token) if dense else 0,
        shared_experts=int(parts.biased_routes),
        rotary_dim=rotary_dim if rotary_dim != head_dim else 0,
        rope_scaling=YARN if parts.rope_types == ("yarn",) else None,
        sliding_window=parts.default_window if parts.sinks else 0,
        full_layers=tuple(range(1, model.n_layers, 2)) if parts.sinks else (),
    )


def usable_shape(config: Config) -> tuple[ModelShape | None, list[str]]:
    """Return the policy's shape, or None and the reason why there is none."""
    try:
        return shape_of(config.model), []
    except ValueError as error:
        return None, [str(error)]


def shape_of_role(config: Config, role: str) -> ModelShape | None:
    """Return the shape of a role that may differ from the policy's; None for other roles and for unusable folders."""
    if role not in ("teacher", "reward_model"):
        return None
    with suppress(ValueError):
        return shape_of_folder(getattr(config, role).hf_assets_path, f"{role}.hf_assets_path")
    return None


def role_shapes(config: Config, shape: ModelShape) -> dict[str, ModelShape]:
    own = {name: shape_of_role(config, name) or shape for name in config.roles}
    return own | ({"critic": shape.with_value_head()} if "critic" in own else {})


def shares_prompts(config: Config) -> bool:
    """Return whether packed samples may share the places of a prompt: not if a model has a recurrent state, which a
    place hands on to the next one only."""
    shape, _ = usable_shape(config)
    return shape is None or not any(own.recurrent_heads for own in (shape, *role_shapes(config, shape).values()))
