"""Reads a config.json of transformers 4 or 5: unsupported values, and the rotary embedding."""

import json
import math
from collections.abc import Iterator, Mapping
from typing import Any

from titan_rl.wire.model_families import BY_MODEL_TYPE, FAMILIES, SPECS, FamilyParts, RopeType, why_unknown

HF_TYPES: tuple[tuple[tuple[str, ...], tuple[type, ...], str], ...] = (  # required by transformers
    (
        (
            "tie_word_embeddings",
            "use_cache",
            "attention_bias",
            "mlp_bias",
            "use_sliding_window",
            "norm_topk_prob",
            "use_qk_norm",
        ),
        (bool,),
        "true or false",
    ),
    (("bos_token_id", "pad_token_id", "pretraining_tp", "sliding_window", "max_window_layers"), (int,), "an integer"),
    (("eos_token_id",), (int, list), "an integer or a list of them"),
    (("attention_dropout", "initializer_range"), (int, float), "a number"),
)
SCALING_KEYS: dict[RopeType, tuple[str, ...]] = {  # required
    "default": (),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
    "yarn": ("factor", "original_max_position_embeddings"),
}
YARN_KEYS = ("attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim")  # optional
MOST, MOST_LAYERS, MOST_EXPERTS = 2**30, 1000, 2**14  # far above every model
FULL, WINDOW = "full_attention", "sliding_attention"
EXPERT_COUNTS = ("num_experts", "num_local_experts", "n_routed_experts")
SWIGLU_ALPHA, SWIGLU_LIMIT, GPT_OSS_EPS = 1.702, 7.0, 1e-5  # constants of vLLM's gpt-oss
HF_SIZES = (
    *("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "max_position_embeddings"),
    *("num_attention_heads", "num_key_value_heads", "head_dim"),
)


def rope_of(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return transformers 5's `rope_parameters`, or build them from 4's `rope_theta` and `rope_scaling`. If layers with
    a sliding window have their own, they are not returned."""
    given = config.get("rope_scaling") or config.get("rope_parameters") or {}
    rope: dict[str, Any] = {"rope_theta": config.get("rope_theta") or parts_of(config).rope_theta}
    if config.get("partial_rotary_factor"):
        rope["partial_rotary_factor"] = config["partial_rotary_factor"]
    elif parts_of(config).rotated_share != 1:
        rope["partial_rotary_factor"] = parts_of(config).rotated_share
    rope |= given.get(FULL, {}) if by_layer(given) else given
    rope.setdefault("rope_type", rope.get("type", "default"))
    return rope


def window_theta_of(config: Mapping[str, Any]) -> float:
    """Return the rotary base of the layers that have a sliding window, if other layers have none."""
    given = config.get("rope_parameters") or {}
    if by_layer(given) and given.get(WINDOW):
        return float(given[WINDOW]["rope_theta"])
    theta = config.get("rope_local_base_freq") or parts_of(config).window_theta or rope_of(config)["rope_theta"]
    return float(theta)


def parts_of(config: Mapping[str, Any]) -> FamilyParts:
    return FAMILIES[BY_MODEL_TYPE[config["model_type"]]]


def by_layer(rope: Mapping[str, Any]) -> bool:
    """Return whether `rope_parameters` differ by the type of a layer."""
    return bool(rope) and set(rope) <= {FULL, WINDOW}


def layer_types_of(config: Mapping[str, Any]) -> list[str]:
    """Return the type of each layer, for a family whose layers differ, by transformers' defaults if need be."""
    layers, every = config["num_hidden_layers"], parts_of(config).full_every
    every = config.get("sliding_window_pattern") or config.get("_sliding_window_pattern") or every
    return config.get("layer_types") or [WINDOW if (i + 1) % every else FULL for i in range(layers)]


def rotated_layers_of(config: Mapping[str, Any]) -> list[int]:
    """Return SmolLM3's no_rope_layers: 1 for a layer with rotary embeddings, 0 for one without."""
    every = config.get("no_rope_layer_interval") or 4
    return config.get("no_rope_layers") or [int((i + 1) % every != 0) for i in range(config["num_hidden_layers"])]


def scaling_of(rope: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return the keys of a supported scaling, as in config.json; None if there is none."""
    kind: RopeType = rope["rope_type"]
    optional = (*YARN_KEYS, "truncate") if kind == "yarn" else ()
    keys = {key: rope[key] for key in (*SCALING_KEYS[kind], *optional) if rope.get(key) is not None}
    return {"rope_type": kind, **keys} if kind != "default" else None


def unsupported(config: Mapping[str, Any]) -> Iterator[str]:
    """Yield missing keys, and values that trainer and generator cannot both run."""
    model_type = str(config.get("model_type"))
    if model_type not in BY_MODEL_TYPE:
        *first, last = [*BY_MODEL_TYPE, *SPECS]
        known = f"{', '.join(first)} or {last}"
        yield refused("model_type", known, config.get("model_type")) + why_unknown(model_type)
        return
    parts = parts_of(config)
    yield from _unsupported_heads(config, parts)
    yield from _unsupported_sizes(config, parts)
    for key in ("dtype", "torch_dtype"):
        if config.get(key) not in (None, "auto", "float32", "bfloat16", "float16", "float64"):
            yield refused(key, "float32, bfloat16, float16 or float64", config[key])
    if config.get(parts.activation_key, parts.activation) != parts.activation:
        yield refused(parts.activation_key, f'"{parts.activation}"', config[parts.activation_key])
    scalar = config.get("query_pre_attn_scalar")
    if scalar is not None and (type(scalar) is not int or scalar < 1):
        yield refused("query_pre_attn_scalar", "a positive integer", scalar)
    for key in parts.false_keys:
        if config.get(key):
            yield refused(key, "false", config[key])
    for keys, types, expected in HF_TYPES:
        for key in keys:
            if config.get(key) is not None and type(config[key]) not in types:
                yield refused(key, expected, config[key])
    yield from _unsupported_windows(config, parts)
    yield from _unsupported_experts(config, parts)
    if config.get("quantization_config") and not (parts.clamped_experts and in_mxfp4(config)):
        expected = "weights that are not quantized" + (", or mxfp4" if parts.clamped_experts else "")
        yield refused("quantization_config", expected, config["quantization_config"])
    yield from _unsupported_rope(config, parts)


def experts_of(config: Mapping[str, Any]) -> Any:
    """Return the number of experts. transformers 5 writes num_local_experts, 4 num_experts."""
    return next((config[key] for key in EXPERT_COUNTS if config.get(key)), None)


def in_mxfp4(config: Mapping[str, Any]) -> bool:
    """Return whether the folder's experts are numbers of 4 bits with common exponents."""
    quantization = config.get("quantization_config")
    return isinstance(quantization, dict) and quantization.get("quant_method") == "mxfp4"


def expert_size_key(parts: FamilyParts) -> str:
    """Return the key for the rows of an expert's gate."""
    return "intermediate_size" if parts.clamped_experts else "moe_intermediate_size"


def refused(key: str, expected: str, found: Any) -> str:
    return f"{key}: expected {expected}, found {json.dumps(found, default=str)}"


def _positive(value: Any) -> bool:
    return type(value) in (int, float) and 0 < value < math.inf


def _unsupported_heads(config: Mapping[str, Any], parts: FamilyParts) -> Iterator[str]:
    known, value = list(parts.architectures.values()), parts.architectures.get("value")
    if config.get("architectures") not in [[name] for name in known]:
        yield refused("architectures", " or ".join(f'["{name}"]' for name in known), config.get("architectures"))
    elif config["architectures"] == [value]:
        labels = config.get("num_labels") or len(config.get("id2label") or (0, 1))  # transformers' default is 2
        if labels != 1:
            yield refused("num_labels", "1, as a reward is one number", labels)
    elif config.get("tie_word_embeddings") and not parts.ties:  # a value head has nothing to tie
        yield refused("tie_word_embeddings", f"false, as vLLM ignores it for {known[0]}", True)


def _unsupported_sizes(config: Mapping[str, Any], parts: FamilyParts) -> Iterator[str]:
    wrong = []
    for key in HF_SIZES:
        derived = key in parts.derived_sizes and config.get(key) is None
        if not derived and (type(config.get(key)) is not int or config[key] < 1):
            wrong.append(refused(key, "a positive integer", config.get(key)))
        elif not derived and config[key] > (most := MOST_LAYERS if key == "num_hidden_layers" else MOST):
            wrong.append(refused(key, f"at most {most}", config[key]))
    yield from wrong
    if not wrong and parts.heads_fill_dim and config.get("head_dim") is not None:
        dim, heads = config["hidden_size"], config["num_attention_heads"]
        if config["head_dim"] != dim // heads:
            expected = f"hidden_size / num_attention_heads = {dim // heads}, as vLLM's {parts.architectures['lm']} has"
            yield refused("head_dim", expected, config["head_dim"])
    if not _positive(config.get("rms_norm_eps")) or config["rms_norm_eps"] >= 1:
        yield refused("rms_norm_eps", "a number above 0 and below 1", config.get("rms_norm_eps"))


def _unsupported_experts(config: Mapping[str, Any], parts: FamilyParts) -> Iterator[str]:
    """Every layer but the first ones has the same number of routed experts; or the model is dense."""
    counts = {key: config[key] for key in EXPERT_COUNTS if config.get(key)}
    if not parts.experts:
        yield from (refused(key, "a dense model", count) for key, count in counts.items())
        return
    if len(set(map(str, counts.values()))) > 1:
        (first, count), (other, found), *_ = counts.items()
        yield refused(other, f"{first} = {count}", found)
    experts, each = experts_of(config), config.get("num_experts_per_tok")
    if type(experts) is not int or not 1 <= experts <= MOST_EXPERTS:
        key = "n_routed_experts" if parts.biased_routes else "num_experts"
        yield refused(key, f"a positive integer of at most {MOST_EXPERTS}", experts)
    elif type(each) is not int or not 1 <= each <= experts:
        yield refused("num_experts_per_tok", f"a positive integer of at most num_experts = {experts}", each)
    key = expert_size_key(parts)
    if type(config.get(key)) is not int or not 1 <= config[key] <= MOST:
        yield refused(key, f"a positive integer of at most {MOST}", config.get(key))
    if parts.clamped_experts:
        only_values = {"swiglu_alpha": SWIGLU_ALPHA, "swiglu_limit": SWIGLU_LIMIT, "rms_norm_eps": GPT_OSS_EPS}
        for key, only in only_values.items():
            if config.get(key, only) != only:
                yield refused(key, f"{only}, as vLLM computes", config[key])
        if config.get("attention_bias") is False:
            yield refused("attention_bias", "true", False)
    if parts.biased_routes:
        yield from unsupported_routes(config)
    if config.get("decoder_sparse_step", 1) != 1:
        yield refused("decoder_sparse_step", "1: experts in every layer", config["decoder_sparse_step"])
    if config.get("mlp_only_layers"):
        yield refused("mlp_only_layers", "[]: experts in every layer", config["mlp_only_layers"])


def unsupported_routes(config: Mapping[str, Any]) -> Iterator[str]:
    """The last layer has experts, every token passes shared ones, and its own are in some of the groups."""
    layers, dense = config.get("num_hidden_layers"), config.get("first_k_dense_replace", 1)
    if type(dense) is not int or (type(layers) is int and not 0 <= dense < layers):
        yield refused("first_k_dense_replace", f"0 to {layers} - 1, as vLLM needs a layer with experts", dense)
    shared = config.get("n_shared_experts", 1)
    if type(shared) is not int or not 1 <= shared <= MOST_EXPERTS:
        yield refused("n_shared_experts", f"a positive integer of at most {MOST_EXPERTS}", shared)
    if not _positive(config.get("routed_scaling_factor", 1.0)):
        yield refused("routed_scaling_factor", "a number above 0", config["routed_scaling_factor"])
    experts, each = config.get("n_routed_experts"), config.get("num_experts_per_tok")
    groups, taken = config.get("n_group", 1), config.get("topk_group", 1)
    if type(experts) is not int or type(each) is not int:
        return  # refused already
    if type(groups) is not int or groups < 1 or experts % groups or (groups > 1 and experts // groups < 2):
        yield refused("n_group", f"groups of two or more of n_routed_experts = {experts}", groups)
    elif type(taken) is not int or not 1 <= taken <= groups:
        yield refused("topk_group", f"1 to n_group = {groups}", taken)
    elif each > taken * (experts // groups):
        most = taken * (experts // groups)
        yield refused("num_experts_per_tok", f"at most {most}, the experts of topk_group = {taken} groups", each)


def _unsupported_windows(config: Mapping[str, Any], parts: FamilyParts) -> Iterator[str]:
    """Layers have the window or not as `layer_types` tells, or all have it, or none."""
    window = config.get("sliding_window", parts.default_window) if parts.default_window else None
    ignored = {"llama": "as transformers ignores it for Llama", "phi3": "as vLLM ignores it for Phi-3"}
    if parts.model_type in ignored and config.get("sliding_window") is not None:
        yield refused("sliding_window", f"null, {ignored[parts.model_type]}", config["sliding_window"])
    if type(window) is int and not 0 < window <= MOST:
        yield refused("sliding_window", f"null, or a positive integer of at most {MOST}", window)
    layers, count = config.get("layer_types") or [], config.get("num_hidden_layers")
    if parts.full_every:
        if type(window) is not int:
            yield refused("sliding_window", "a positive integer", window)
        if layers and (not isinstance(layers, list) or len(layers) != count or set(map(str, layers)) - {FULL, WINDOW}):
            yield refused("layer_types", f"{FULL} or {WINDOW} for each of {count} layers", layers)
        elif parts.sinks and any(kind != (FULL if i % 2 else WINDOW) for i, kind in enumerate(layers)):
            yield refused("layer_types", f"{WINDOW} and {FULL} in turn, as vLLM computes", layers)
    else:
        kind = WINDOW if window else FULL
        if not isinstance(layers, list) or any(layer != kind for layer in layers):
            of_window = f", for sliding_window is {window}" if parts.default_window else ""
            yield refused("layer_types", f"{kind.replace('_', ' ')} only{of_window}", config["layer_types"])
    rotated = config.get("no_rope_layers")
    if rotated and (not parts.unrotated_layers or not isinstance(rotated, list) or len(rotated) != count):
        expected = f"a 0 or a 1 for each of {count} layers" if parts.unrotated_layers else "no such key"
        yield refused("no_rope_layers", expected, rotated)


def _unsupported_rope(config: Mapping[str, Any], parts: FamilyParts) -> Iterator[str]:
    for key in ("rope_scaling", "rope_parameters"):
        if not isinstance(config.get(key) or {}, dict):
            yield refused(key, "an object", config[key])
            return
    given = config.get("rope_parameters") or {}
    nested = bool(parts.full_every) and not parts.one_rope and by_layer(given)
    if nested and not all(isinstance(part, dict) and _positive(part.get("rope_theta")) for part in given.values()):
        yield refused("rope_parameters", "a rope_theta above 0 for each type of layer", given)
        return
    if nested and given.get(WINDOW, {}).get("rope_type", "default") != "default":
        yield refused("rope_parameters", f"rope_type default for {WINDOW}", given[WINDOW])
    rope = rope_of(config)
    if not _positive(rope["rope_theta"]):
        yield refused("rope_theta", "a number above 0", rope["rope_theta"])
    if rope["rope_type"] not in parts.rope_types or any(isinstance(value, dict) for value in rope.values()):
        yield refused("rope_parameters", f"rope_type {' or '.join(parts.rope_types)} for all layers", rope)
    elif not all(_positive(rope.get(name)) for name in SCALING_KEYS[rope["rope_type"]]):
        yield refused("rope_parameters", f"numbers above 0 for {', '.join(SCALING_KEYS[rope['rope_type']])}", rope)
    elif rope["rope_type"] == "llama3" and rope["low_freq_factor"] >= rope["high_freq_factor"]:
        yield refused("rope_parameters", "a low_freq_factor below the high_freq_factor", rope)
    elif rope["rope_type"] == "yarn":
        yield from _unsupported_yarn(rope, parts)
    factor = rope.get("partial_rotary_factor") or 1.0
    if factor != 1.0 and not parts.partly_rotated:
        yield refused("partial_rotary_factor", "1.0", factor)
    elif not _positive(factor) or factor > 1:
        yield refused("partial_rotary_factor", "a number above 0, at most 1", factor)


def _unsupported_yarn(rope: Mapping[str, Any], parts: FamilyParts) -> Iterator[str]:
    wrong = [key for key in YARN_KEYS if key in rope and not _positive(rope[key])]
    if wrong:
        yield refused("rope_parameters", f"{wrong[0]} of yarn above 0, or no such key", rope)
    elif parts.sinks and (bad := [key for key in ("beta_fast", "beta_slow") if key not in rope]):
        yield refused("rope_parameters", f"{' and '.join(bad)} of yarn, which vLLM reads", rope)
    elif parts.sinks and (bad := [key for key in ("attention_factor", "mscale", "mscale_all_dim") if key in rope]):
        yield refused("rope_parameters", f"yarn without {' and '.join(bad)}, which vLLM ignores", rope)
    elif type(rope.get("truncate", True)) is not bool:
        yield refused("rope_parameters", "truncate of yarn true or false", rope)
    elif rope["factor"] < 1 or not float(rope["original_max_position_embeddings"]).is_integer():
        yield refused("rope_parameters", "a factor of yarn of at least 1 and a whole original length", rope)
    elif rope["original_max_position_embeddings"] * rope["factor"] > MOST:
        yield refused("rope_parameters", f"a length of at most {MOST}", rope)
    elif rope["rope_theta"] <= 1:
        yield refused("rope_theta", "a number above 1, for yarn", rope["rope_theta"])
