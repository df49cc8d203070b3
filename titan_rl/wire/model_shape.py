"""Dimensions of a decoder, read from our own keys, a TorchTitan flavor or a Hugging Face folder."""

import json
import math
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from titan_rl.config.sections import Family

HF_LM_HEAD = "lm_head.weight"
HF_VALUE_HEAD = "score.weight"  # its name in transformers' *ForSequenceClassification
Head = Literal["lm", "value"]  # log-probs of tokens, or one number per position (critic, reward model)


@dataclass(frozen=True, slots=True, kw_only=True)
class FamilyFacts:
    """What differs between model families."""

    model_type: str  # in config.json
    architectures: dict[Head, str]  # in config.json
    head_norms: bool = False  # RMSNorm over each query and key head
    derived_sizes: tuple[str, ...] = ()  # keys that config.json may omit: they follow from the other sizes
    rope_types: tuple[str, ...] = ("default",)  # that TorchTitan supports


FACTS: dict[Family, FamilyFacts] = {
    "llama3": FamilyFacts(
        model_type="llama",
        architectures={"lm": "LlamaForCausalLM", "value": "LlamaForSequenceClassification"},
        derived_sizes=("num_key_value_heads", "head_dim"),
        rope_types=("default", "llama3"),
    ),
    "qwen3": FamilyFacts(
        model_type="qwen3",
        architectures={"lm": "Qwen3ForCausalLM", "value": "Qwen3ForSequenceClassification"},
        head_norms=True,  # the defaults of its sizes are those of one particular model, so none are derived
    ),
}
FAMILIES: dict[str, Family] = {facts.model_type: family for family, facts in FACTS.items()}

HF_TYPES: tuple[tuple[tuple[str, ...], tuple[type, ...], str], ...] = (  # that transformers insists on
    (
        ("tie_word_embeddings", "use_cache", "attention_bias", "mlp_bias", "use_sliding_window"),
        (bool,),
        "true or false",
    ),
    (("bos_token_id", "pad_token_id", "pretraining_tp", "sliding_window", "max_window_layers"), (int,), "an integer"),
    (("eos_token_id",), (int, list), "an integer or a list of them"),
    (("attention_dropout", "initializer_range"), (int, float), "a number"),
)
LLAMA3_SCALING = ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")
MOST = 2**30  # of any size: far above every model
HF_SIZES = (
    *("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "max_position_embeddings"),
    *("num_attention_heads", "num_key_value_heads", "head_dim"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelShape:
    family: Family
    vocab_size: int
    dim: int
    n_layers: int
    n_heads: int
    n_kv_heads: int
    head_dim: int
    hidden_dim: int
    max_seq_len: int
    rope_theta: float
    rope_scaling: dict[str, Any] | None = field(default=None, hash=False)  # "rope_type": "llama3" and LLAMA3_SCALING
    norm_eps: float
    tied: bool
    head: Head = "lm"

    @property
    def facts(self) -> FamilyFacts:
        return FACTS[self.family]

    @property
    def parameters(self) -> int:
        head = self.dim if self.head == "value" else 0 if self.tied else self.vocab_size * self.dim
        embeddings = self.vocab_size * self.dim + head
        attention = 2 * self.dim * self.head_dim * (self.n_heads + self.n_kv_heads)  # q and o, k and v
        norms = 2 * self.dim + (2 * self.head_dim if self.facts.head_norms else 0)
        block = attention + 3 * self.dim * self.hidden_dim + norms
        return embeddings + self.n_layers * block + self.dim

    def with_value_head(self) -> "ModelShape":
        """Return the same body with a value head. There is no vocabulary projection to tie."""
        return replace(self, head="value", tied=False)

    @property
    def hf_head(self) -> dict[str, Any]:
        """Return the keys of config.json that describe the head. A reward model may start from a language model's
        folder and keep the other keys of its config.json."""
        labels = {"num_labels": 1} if self.head == "value" else {}
        return {"architectures": [self.facts.architectures[self.head]], "tie_word_embeddings": self.tied, **labels}

    @property
    def hf_head_weight(self) -> str:
        """Return the name of the head's own tensor in a Hugging Face folder; empty if it is the embedding."""
        return HF_VALUE_HEAD if self.head == "value" else "" if self.tied else HF_LM_HEAD

    def hf_tensors(self, *, head: bool = True) -> dict[str, tuple[int, ...]]:
        """Return the names and sizes of the tensors in a Hugging Face folder, without the head's own if not `head`."""
        queries, keys = self.n_heads * self.head_dim, self.n_kv_heads * self.head_dim
        block: dict[str, tuple[int, ...]] = {
            "input_layernorm": (self.dim,),
            "self_attn.q_proj": (queries, self.dim),
            "self_attn.k_proj": (keys, self.dim),
            "self_attn.v_proj": (keys, self.dim),
            "self_attn.o_proj": (self.dim, queries),
            **({f"self_attn.{x}_norm": (self.head_dim,) for x in "qk"} if self.facts.head_norms else {}),
            "post_attention_layernorm": (self.dim,),
            "mlp.gate_proj": (self.hidden_dim, self.dim),
            "mlp.up_proj": (self.hidden_dim, self.dim),
            "mlp.down_proj": (self.dim, self.hidden_dim),
        }
        heads = {HF_LM_HEAD: (self.vocab_size, self.dim), HF_VALUE_HEAD: (1, self.dim), "": ()}
        own = self.hf_head_weight if head else ""
        return {
            "model.embed_tokens.weight": (self.vocab_size, self.dim),
            **{f"model.layers.{i}.{n}.weight": size for i in range(self.n_layers) for n, size in block.items()},
            "model.norm.weight": (self.dim,),
            **({own: heads[own]} if own else {}),
        }

    def hf_config(self, *, bos: int | None, eos: int | list[int] | None, pad: int | None) -> dict[str, Any]:
        """Return the config.json of this model for transformers 5 and vLLM."""
        return {
            "model_type": self.facts.model_type,
            "dtype": "float32",
            "vocab_size": self.vocab_size,
            "hidden_size": self.dim,
            "intermediate_size": self.hidden_dim,
            "num_hidden_layers": self.n_layers,
            "num_attention_heads": self.n_heads,
            "num_key_value_heads": self.n_kv_heads,
            "head_dim": self.head_dim,
            "hidden_act": "silu",
            "max_position_embeddings": self.max_seq_len,
            "rms_norm_eps": self.norm_eps,
            "rope_parameters": {"rope_type": "default", **(self.rope_scaling or {}), "rope_theta": self.rope_theta},
            "attention_bias": False,
            "attention_dropout": 0.0,
            "bos_token_id": bos,
            "eos_token_id": eos,
            "pad_token_id": pad,
            "use_cache": True,
            **self.hf_head,
        }

    @classmethod
    def from_hf(cls, config: Mapping[str, Any]) -> "ModelShape":
        """Read a config.json written by transformers 4 or 5. The ValueError lists everything that is not supported."""
        if unsupported := "; ".join(_unsupported(config)):
            raise ValueError(unsupported)
        rope = _rope(config)
        scaled = rope["rope_type"] == "llama3"
        head: Head = "value" if config["architectures"][0].endswith("ForSequenceClassification") else "lm"
        return cls(
            family=FAMILIES[config["model_type"]],
            vocab_size=config["vocab_size"],
            dim=config["hidden_size"],
            n_layers=config["num_hidden_layers"],
            n_heads=config["num_attention_heads"],
            n_kv_heads=config.get("num_key_value_heads") or config["num_attention_heads"],
            head_dim=config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"],
            hidden_dim=config["intermediate_size"],
            max_seq_len=config["max_position_embeddings"],
            rope_theta=float(rope["rope_theta"]),
            rope_scaling={"rope_type": "llama3", **{key: rope[key] for key in LLAMA3_SCALING}} if scaled else None,
            norm_eps=float(config["rms_norm_eps"]),
            tied=head == "lm" and bool(config.get("tie_word_embeddings")),  # a value head has nothing to tie
            head=head,
        )


def shape_of_folder(folder: str, key: str) -> ModelShape:
    """Return the shape of the Hugging Face folder that the config key `key` names."""
    path = Path(folder) / "config.json"
    if not os.path.isdir(path.parent):  # unlike Path.is_dir, never raises
        raise ValueError(f"{key}: expected a Hugging Face folder, found none at {path.parent}")
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(found, dict):
            raise ValueError(f"a {type(found).__name__}, not a JSON object")
        return ModelShape.from_hf(found)
    except RecursionError as error:
        raise ValueError(f"{key}: expected a usable {path}, found JSON that is nested too deeply") from error
    except (AttributeError, LookupError, OSError, OverflowError, TypeError, ValueError) as error:
        raise ValueError(f"{key}: expected a usable {path}, found {error}") from error


def _rope(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return transformers 5's `rope_parameters`, or build them from 4's `rope_theta` and `rope_scaling`."""
    rope = {"rope_theta": config.get("rope_theta") or 10000.0}
    rope |= config.get("rope_scaling") or config.get("rope_parameters") or {}
    rope.setdefault("rope_type", rope.get("type", "default"))
    return rope


def _positive(value: Any) -> bool:
    return type(value) in (int, float) and 0 < value < math.inf


def _unsupported(config: Mapping[str, Any]) -> Iterator[str]:
    """Yield what is missing, and what trainer and generator cannot both run."""

    def refused(key: str, expected: str, found: Any) -> str:
        return f"{key}: expected {expected}, found {json.dumps(found, default=str)}"

    family = FAMILIES.get(str(config.get("model_type")))
    if family is None:
        yield refused("model_type", " or ".join(FAMILIES), config.get("model_type"))
        return
    facts = FACTS[family]
    known = list(facts.architectures.values())
    if config.get("architectures") not in [[name] for name in known]:
        yield refused("architectures", " or ".join(f'["{name}"]' for name in known), config.get("architectures"))
    elif config["architectures"] == [facts.architectures["value"]]:
        labels = config.get("num_labels") or len(config.get("id2label") or (0, 1))  # transformers' default is 2
        if labels != 1:
            yield refused("num_labels", "1, as a reward is one number", labels)
    for key in HF_SIZES:
        derived = key in facts.derived_sizes and config.get(key) is None
        if not derived and (type(config.get(key)) is not int or not 1 <= config[key] <= MOST):
            yield refused(key, "a positive integer", config.get(key))
    if not _positive(eps := config.get("rms_norm_eps")) or eps >= 1:
        yield refused("rms_norm_eps", "a number above 0 and below 1", eps)
    for key in ("dtype", "torch_dtype"):
        if config.get(key) not in (None, "auto", "float32", "bfloat16", "float16", "float64"):
            yield refused(key, "float32, bfloat16, float16 or float64", config[key])
    if config.get("hidden_act", "silu") != "silu":
        yield refused("hidden_act", '"silu"', config["hidden_act"])
    for key in ("attention_bias", "mlp_bias", "use_sliding_window"):
        if config.get(key):
            yield refused(key, "false", config[key])
    for keys, types, expected in HF_TYPES:
        for key in keys:
            if config.get(key) is not None and type(config[key]) not in types:
                yield refused(key, expected, config[key])
    layers = config.get("layer_types") or []
    if not isinstance(layers, list) or "sliding_attention" in layers:
        yield refused("layer_types", "full attention only", config["layer_types"])
    for key in ("num_experts", "num_local_experts"):
        if config.get(key):
            yield refused(key, "a dense model", config[key])
    if config.get("quantization_config"):
        yield refused("quantization_config", "weights that are not quantized", config["quantization_config"])

    for key in ("rope_scaling", "rope_parameters"):
        if not isinstance(config.get(key) or {}, dict):
            yield refused(key, "an object", config[key])
            return
    rope = _rope(config)
    if not _positive(rope["rope_theta"]):
        yield refused("rope_theta", "a number above 0", rope["rope_theta"])
    if rope["rope_type"] not in facts.rope_types or any(isinstance(value, dict) for value in rope.values()):
        yield refused("rope_parameters", f"rope_type {' or '.join(facts.rope_types)} for all layers", rope)
    elif rope["rope_type"] == "llama3" and not all(_positive(rope.get(name)) for name in LLAMA3_SCALING):
        yield refused("rope_parameters", f"numbers above 0 for {', '.join(LLAMA3_SCALING)}", rope)
    if (factor := rope.get("partial_rotary_factor") or config.get("partial_rotary_factor") or 1.0) != 1.0:
        yield refused("partial_rotary_factor", "1.0", factor)
