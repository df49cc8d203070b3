"""Dimensions of a decoder, read from our own keys or a Hugging Face folder."""

import json
import math
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple, TypeVar, cast

from titan_rl.config.choices import Family
from titan_rl.config.plain_files import text_of
from titan_rl.config.sections import BYTES, Config, ParallelismSection
from titan_rl.wire.hf_config import (
    FULL,
    SWIGLU_ALPHA,
    SWIGLU_LIMIT,
    WINDOW,
    expert_size_key,
    experts_of,
    in_mxfp4,
    layer_types_of,
    rope_of,
    rotated_layers_of,
    scaling_of,
    unsupported,
    window_theta_of,
)
from titan_rl.wire.model_families import BY_MODEL_TYPE, FAMILIES, SPECS, FamilyParts, Head
from titan_rl.wire.sizes_of_spec import sizes_of_spec
from titan_rl.wire.weight_plan import Piece, Shard

HF_LM_HEAD = "lm_head.weight"
HF_VALUE_HEAD = "score.weight"  # its name in transformers' *ForSequenceClassification
MXFP4_BLOCK, BLOCKS, SCALES = 32, "_blocks", "_scales"  # numbers with one exponent; its tensors of 4 and of 8 bits
ROUTE_BIAS = "e_score_correction_bias"  # end of the name of a router's bias, which only the choice of experts reads
OF_ROUTER = (".mlp.gate.weight", ROUTE_BIAS)
Part = TypeVar("Part", Shard, Piece)
ABSORBED = "kv_b_proj.weight"  # end of the name of a matrix of which vLLM's latent attention computes with copies
CLAMPED = ("gate_up_proj", "down_proj")  # the matrices of each of gpt-oss's experts; their biases end in _bias


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelShape:
    family: Family
    vocab_size: int
    dim: int
    n_layers: int
    n_heads: int
    n_kv_heads: int
    head_dim: int
    hidden_dim: int  # rows of the feed-forward, or of each expert
    dense_layers: int = 0  # first layers of a mixture of experts, which have one feed-forward instead
    dense_hidden_dim: int = 0  # rows of their feed-forward
    max_seq_len: int
    rope_theta: float
    rope_scaling: dict[str, Any] | None = field(default=None, hash=False)  # "rope_type", and its keys of config.json
    sliding_window: int = 0  # tokens that a token attends to, itself included; 0: to all before it
    full_layers: tuple[int, ...] = ()  # layers without the window
    window_theta: float = 0.0  # rotary base of the layers with the window; 0: rope_theta
    unrotated_layers: tuple[int, ...] = ()  # layers without rotary embeddings
    rotary_dim: int = 0  # first elements of a head that are rotated; 0: all
    query_scalar: int = 0  # scores are divided by its root; 0: head_dim
    attention_bias: bool = False  # query, key and value projections have biases, where the family does not tell
    use_head_norms: bool = False  # query and key heads have norms, where the family does not tell
    norm_eps: float
    tied: bool
    head: Head = "lm"
    experts: int = 0  # per layer; 0: one feed-forward
    experts_per_token: int = 0
    shared_experts: int = 0  # which every token passes, besides its own ones
    route_scale: float = 1.0  # multiplies the weights of a token's experts
    norm_routes: bool = False  # the weights of a token's experts add up to 1
    route_groups: int = 0  # into which experts are divided; 0: none
    groups_per_token: int = 0  # whose experts a token may pass
    latent_dim: int = 0  # numbers that latent attention caches of a token in each layer; 0: keys and values
    mxfp4: bool = field(default=False, compare=False)  # the folder has experts in 4 bits; exports do not
    recurrent_heads: int = 0  # ranks that can share a layer with a recurrent state divide it; 0: there is no such layer

    @property
    def parts(self) -> FamilyParts:
        return FAMILIES[self.family]

    @property
    def parameters(self) -> int:
        head = self.dim if self.head == "value" else 0 if self.tied else self.vocab_size * self.dim
        embeddings = self.vocab_size * self.dim + head
        return embeddings + sum(count * self.block_parameters(i) for i, count in self.kinds.items()) + self.dim

    def block_parameters(self, layer: int) -> int:
        attention = 2 * self.dim * self.head_dim * (self.n_heads + self.n_kv_heads)  # q and o, k and v
        biases = self.head_dim * (self.n_heads + 2 * self.n_kv_heads) if self.qkv_bias else 0
        if self.parts.sinks:
            biases += self.dim + self.n_heads
        if self.parts.clamped_experts:
            biases += self.experts * (2 * self.hidden_dim + self.dim + 1)
        norms = len(self.parts.norms) * self.dim + sum(self.qk_norms.values())
        experts = self.experts if self.routes(layer) else 0
        rows = self.dense_rows(layer) + self.hidden_dim * experts
        return attention + norms + biases + self.dim * (3 * rows + experts)

    @property
    def attention_parameters(self) -> int:
        """Return the parameters of all blocks' attention projections."""
        return self.n_layers * 2 * self.dim * self.head_dim * (self.n_heads + self.n_kv_heads)

    def routes(self, layer: int) -> bool:
        """Return whether a layer has experts."""
        return self.experts > 0 and layer >= self.dense_layers

    @property
    def routed_layers(self) -> int:
        return self.n_layers - self.dense_layers if self.experts else 0

    @property
    def kinds(self) -> dict[int, int]:
        """Return how many layers there are of each kind, by the number of the first."""
        kinds = ((0, self.dense_layers), (self.dense_layers, self.n_layers - self.dense_layers))
        return {first: count for first, count in kinds if count}

    def dense_rows(self, layer: int) -> int:
        """Return the rows of a layer's feed-forward that every token passes: of its only one, or of shared experts."""
        if self.routes(layer):
            return self.shared_experts * self.hidden_dim
        return self.dense_hidden_dim if self.experts else self.hidden_dim

    @property
    def linears(self) -> list[tuple[int, int]]:
        """Return rows and columns of all blocks' linear layers, fused as vLLM has them, without routers and experts of
        which a token passes some."""
        queries, keys = self.n_heads * self.head_dim, self.n_kv_heads * self.head_dim
        layers = []
        for layer in range(self.n_layers):
            rows = self.dense_rows(layer)
            layers += [(queries + 2 * keys, self.dim), (self.dim, queries)]
            layers += [(2 * rows, self.dim), (self.dim, rows)] if rows else []
        return layers

    @property
    def qkv_bias(self) -> bool:
        return self.attention_bias if self.parts.qkv_bias is None else self.parts.qkv_bias

    @property
    def qk_norms(self) -> dict[str, int]:
        """Return the sizes of the norms of queries (q) and keys (k)."""
        if self.parts.wide_norms:
            return {"q": self.n_heads * self.head_dim, "k": self.n_kv_heads * self.head_dim}
        head_norms = self.use_head_norms if self.parts.head_norms is None else self.parts.head_norms
        return dict.fromkeys("qk", self.head_dim) if head_norms else {}

    def window(self, layer: int) -> int:
        """Return the sliding window of a layer; 0: none."""
        return 0 if layer in self.full_layers else self.sliding_window

    def hidden_per_token(self, layer: int) -> int:
        """Return the rows of a layer's feed-forwards that a token passes."""
        return self.dense_rows(layer) + (self.hidden_dim * self.experts_per_token if self.routes(layer) else 0)

    @property
    def most_hidden_per_token(self) -> int:
        return max(map(self.hidden_per_token, self.kinds))

    def halves(self, dtype: str) -> tuple[str, ...]:
        """Return the ends of the names of tensors that vLLM keeps in float32 in an engine of 16 bits: of a router with
        a bias. A weight plan has them as numbers of 16 bits, two for each."""
        return OF_ROUTER if self.parts.biased_routes and BYTES[dtype] == 2 else ()

    def with_value_head(self) -> "ModelShape":
        """Return the same body with a value head. There is no vocabulary projection to tie."""
        return replace(self, head="value", tied=False)

    @property
    def hf_head(self) -> dict[str, Any]:
        """Return the keys of config.json that describe the head. A reward model may start from a language model's
        folder and keep the other keys of its config.json."""
        labels = {"num_labels": 1} if self.head == "value" else {}
        return {"architectures": [self.parts.architectures[self.head]], "tie_word_embeddings": self.tied, **labels}

    @property
    def hf_head_weight(self) -> str:
        """Return the name of the head's own tensor in a Hugging Face folder; empty if it is the embedding."""
        return HF_VALUE_HEAD if self.head == "value" else "" if self.tied else HF_LM_HEAD

    def hf_tensors(self, *, head: bool = True) -> dict[str, tuple[int, ...]]:
        """Return the names and sizes of the model's tensors, without the head's own if not `head`."""
        queries, keys = self.n_heads * self.head_dim, self.n_kv_heads * self.head_dim
        biases = {"q": queries, "k": keys, "v": keys} if self.qkv_bias else {}
        attention: dict[str, tuple[int, ...]] = {
            **{f"{norm}.weight": (self.dim,) for norm in self.parts.norms},
            "self_attn.q_proj.weight": (queries, self.dim),
            "self_attn.k_proj.weight": (keys, self.dim),
            "self_attn.v_proj.weight": (keys, self.dim),
            **{f"self_attn.{x}_proj.bias": (rows,) for x, rows in biases.items()},
            "self_attn.o_proj.weight": (self.dim, queries),
            **({"self_attn.o_proj.bias": (self.dim,), "self_attn.sinks": (self.n_heads,)} if self.parts.sinks else {}),
            **{f"self_attn.{x}_norm.weight": (rows,) for x, rows in self.qk_norms.items()},
        }
        blocks = [attention | self._feed_forward(layer) for layer in range(self.n_layers)]
        heads = {HF_LM_HEAD: (self.vocab_size, self.dim), HF_VALUE_HEAD: (1, self.dim), "": ()}
        own = self.hf_head_weight if head else ""
        return {
            "model.embed_tokens.weight": (self.vocab_size, self.dim),
            **{f"model.layers.{i}.{n}": size for i, block in enumerate(blocks) for n, size in block.items()},
            "model.norm.weight": (self.dim,),
            **({own: heads[own]} if own else {}),
        }

    def fused(self) -> dict[str, tuple[str, ...]]:
        """Return the tensors that the folder has as one, from top to bottom, by its name there."""
        return {
            f"model.layers.{i}.{one}.weight": tuple(f"model.layers.{i}.{part}.weight" for part in parts)
            for i in range(self.n_layers)
            for one, parts in self.parts.fused.items()
        }

    def stacked(self) -> dict[str, tuple[str, ...]]:
        """Return the experts' matrices that the folder has as one tensor, each transposed, by its name there."""
        if not self.parts.clamped_experts:
            return {}
        return {
            f"model.layers.{i}.mlp.experts.{one}": tuple(
                f"model.layers.{i}.mlp.experts.{expert}.{one}" for expert in range(self.experts)
            )
            for i in range(self.n_layers)
            for one in CLAMPED
        }

    def folder_tensors(self, *, head: bool = True, mxfp4: bool = False) -> dict[str, tuple[int, ...]]:
        """Return the names and sizes of the tensors in a Hugging Face folder."""
        tensors = self.hf_tensors(head=head)
        for one, parts in self.fused().items():
            sizes = [tensors.pop(part) for part in parts]
            tensors[one] = (sum(rows for rows, *_ in sizes), *sizes[0][1:])
        for one, experts in self.stacked().items():
            sizes = [tensors.pop(expert) for expert in experts]
            rows, columns = sizes[0]
            if mxfp4:
                scales = (len(sizes), rows, columns // MXFP4_BLOCK)
                tensors |= {one + BLOCKS: (*scales, MXFP4_BLOCK // 2), one + SCALES: scales}
            else:
                tensors[one] = (len(sizes), columns, rows)
        return tensors

    def folder_rows(self) -> dict[str, tuple[str, int]]:
        """Return where a tensor is that the folder has as part of another: its name there, and the first row, or the
        number of the expert."""
        tensors, places = self.hf_tensors(), {}
        for one, experts in self.stacked().items():
            places |= {expert: (one, i) for i, expert in enumerate(experts)}
        for one, parts in self.fused().items():
            row0 = 0
            for part in parts:
                places[part] = one, row0
                row0 += tensors[part][0]
        return places

    def _feed_forward(self, layer: int) -> dict[str, tuple[int, ...]]:
        if self.parts.clamped_experts:
            return self._clamped_experts()

        def three(at: str, rows: int) -> dict[str, tuple[int, ...]]:
            sizes = {"gate_proj": (rows, self.dim), "up_proj": (rows, self.dim), "down_proj": (self.dim, rows)}
            return {f"{at}.{name}.weight": size for name, size in sizes.items()}

        rows = self.dense_rows(layer)
        if not self.routes(layer):
            return three("mlp", rows)
        tensors: dict[str, tuple[int, ...]] = {"mlp.gate.weight": (self.experts, self.dim)}
        if self.parts.biased_routes:
            tensors[f"mlp.gate.{ROUTE_BIAS}"] = (self.experts,)
        for expert in range(self.experts):
            tensors |= three(f"mlp.experts.{expert}", self.hidden_dim)
        return tensors | (three("mlp.shared_experts", rows) if rows else {})

    def _clamped_experts(self) -> dict[str, tuple[int, ...]]:
        into, out = (2 * self.hidden_dim, self.dim), (self.dim, self.hidden_dim)
        each = dict(zip(CLAMPED, (into, out), strict=True))
        return {
            "mlp.router.weight": (self.experts, self.dim),
            "mlp.router.bias": (self.experts,),
            **{f"mlp.experts.{i}.{name}": size for i in range(self.experts) for name, size in each.items()},
            **{f"mlp.experts.{name}_bias": (self.experts, rows) for name, (rows, _) in each.items()},
        }

    def hf_config(self, *, bos: int | None, eos: int | list[int] | None, pad: int | None) -> dict[str, Any]:
        """Return the config.json of this model for transformers 5 and vLLM."""
        return {
            "model_type": self.parts.model_type,
            "dtype": "float32",
            "vocab_size": self.vocab_size,
            "hidden_size": self.dim,
            "intermediate_size": self.dense_hidden_dim or self.hidden_dim,
            "num_hidden_layers": self.n_layers,
            "num_attention_heads": self.n_heads,
            "num_key_value_heads": self.n_kv_heads,
            "head_dim": self.head_dim,
            **self._hf_experts(),
            self.parts.activation_key: self.parts.activation,
            "max_position_embeddings": self.max_seq_len,
            "rms_norm_eps": self.norm_eps,
            **self._hf_rope(),
            **({"attention_bias": False} if "attention_bias" in self.parts.false_keys else {}),
            **({"attention_bias": self.attention_bias} if self.parts.qkv_bias is None else {}),
            **({"use_qk_norm": self.use_head_norms} if self.parts.head_norms is None else {}),
            **({"sliding_window": self.sliding_window or None} if self.parts.default_window else {}),
            **({"query_pre_attn_scalar": self.query_scalar or self.head_dim} if self.parts.scaled_embedding else {}),
            "attention_dropout": 0.0,
            "bos_token_id": bos,
            "eos_token_id": eos,
            "pad_token_id": pad,
            "use_cache": True,
            **self.hf_head,
        }

    def _hf_rope(self) -> dict[str, Any]:
        rope: dict[str, Any] = {"rope_type": "default", **(self.rope_scaling or {}), "rope_theta": self.rope_theta}
        if self.parts.partly_rotated:
            rope["partial_rotary_factor"] = (self.rotary_dim or self.head_dim) / self.head_dim
        layers = range(self.n_layers)
        if self.parts.unrotated_layers:
            return {"rope_parameters": rope, "no_rope_layers": [int(i not in self.unrotated_layers) for i in layers]}
        if not self.parts.full_every:
            return {"rope_parameters": rope}
        types = [WINDOW if self.window(i) else FULL for i in layers]
        if self.parts.one_rope:
            return {"rope_parameters": rope, "layer_types": types}
        of_window = {"rope_type": "default", "rope_theta": self.window_theta or self.rope_theta}
        return {"rope_parameters": {FULL: rope, WINDOW: of_window}, "layer_types": types}

    def _hf_experts(self) -> dict[str, Any]:
        if not self.experts:
            return {}
        if self.parts.clamped_experts:
            counts = {"num_local_experts": self.experts, "num_experts_per_tok": self.experts_per_token}
            return {**counts, "attention_bias": True, "swiglu_alpha": SWIGLU_ALPHA, "swiglu_limit": SWIGLU_LIMIT}
        common = {
            "num_experts_per_tok": self.experts_per_token,
            "moe_intermediate_size": self.hidden_dim,
            "norm_topk_prob": self.norm_routes,
        }
        if self.parts.biased_routes:
            return {
                "n_routed_experts": self.experts,
                "n_shared_experts": self.shared_experts,
                "first_k_dense_replace": self.dense_layers,
                "routed_scaling_factor": self.route_scale,
                "n_group": self.route_groups or 1,
                "topk_group": self.groups_per_token or 1,
                "num_nextn_predict_layers": 0,
                **common,
            }
        return {"num_experts": self.experts, **common, "decoder_sparse_step": 1, "mlp_only_layers": []}

    @classmethod
    def from_hf(cls, config: Mapping[str, Any]) -> "ModelShape":
        """Read a config.json written by transformers 4 or 5. The ValueError lists everything that is not supported."""
        if problems := "; ".join(unsupported(config)):
            raise ValueError(problems)
        rope, family = rope_of(config), BY_MODEL_TYPE[config["model_type"]]
        parts, routed = FAMILIES[family], FAMILIES[family].experts
        head: Head = "value" if config["architectures"][0].endswith("ForSequenceClassification") else "lm"
        longest = config["max_position_embeddings"]
        if rope["rope_type"] == "yarn":  # vLLM has no rotary table beyond
            longest = min(longest, int(rope["original_max_position_embeddings"] * rope["factor"]))
        window = config.get("sliding_window", parts.default_window)
        types = layer_types_of(config) if parts.full_every else []
        rotated = rotated_layers_of(config) if parts.unrotated_layers else []
        heads, dim = config["num_attention_heads"], config["hidden_size"]
        head_dim = config.get("head_dim") or dim // heads
        theta, scalar = float(rope["rope_theta"]), config.get("query_pre_attn_scalar") or head_dim
        window_theta = window_theta_of(config) if WINDOW in types else theta
        rotary_dim = int(head_dim * (rope.get("partial_rotary_factor") or 1.0))
        biased = parts.biased_routes
        groups = config.get("n_group", 1) if biased else 1
        return cls(
            family=family,
            vocab_size=config["vocab_size"],
            dim=dim,
            n_layers=config["num_hidden_layers"],
            n_heads=heads,
            n_kv_heads=config.get("num_key_value_heads") or heads,
            head_dim=head_dim,
            hidden_dim=config[expert_size_key(parts) if routed else "intermediate_size"],
            max_seq_len=longest,
            rope_theta=theta,
            rope_scaling=scaling_of(rope),
            sliding_window=(window or 0) if parts.default_window else 0,
            full_layers=tuple(i for i, kind in enumerate(types) if kind == FULL),
            window_theta=window_theta if window_theta != theta else 0.0,
            unrotated_layers=tuple(i for i, rotates in enumerate(rotated) if not rotates),
            rotary_dim=rotary_dim if rotary_dim != head_dim else 0,
            query_scalar=scalar if parts.scaled_embedding and scalar != head_dim else 0,
            attention_bias=bool(config.get("attention_bias", not biased)) if parts.qkv_bias is None else False,
            use_head_norms=parts.head_norms is None and bool(config.get("use_qk_norm")),
            norm_eps=float(config["rms_norm_eps"]),
            tied=head == "lm"
            and bool(config.get("tie_word_embeddings", parts.tied)),  # a value head has nothing to tie
            head=head,
            experts=experts_of(config) if routed else 0,
            experts_per_token=config["num_experts_per_tok"] if routed else 0,
            norm_routes=parts.clamped_experts or (routed and bool(config.get("norm_topk_prob", biased))),
            dense_layers=config.get("first_k_dense_replace", 1) if biased else 0,
            dense_hidden_dim=config["intermediate_size"] if biased else 0,
            shared_experts=config.get("n_shared_experts", 1) if biased else 0,
            route_scale=float(config.get("routed_scaling_factor", 1.0)) if biased else 1.0,
            route_groups=groups if groups > 1 else 0,
            groups_per_token=config["topk_group"] if groups > 1 else 0,
            mxfp4=in_mxfp4(config),
        )


def planned(parts: Iterable[Part], shape: ModelShape, dtype: str) -> list[Part]:
    """Return parts of tensors as the weight plan of engines in `dtype` has them."""
    ends = shape.halves(dtype)
    return [part.of_halves() if ends and part.name.endswith(ends) else part for part in parts]


class SpecLinear(NamedTuple):
    """A linear layer of a block."""

    config: str  # name of its config in TorchTitan's model, which may build others too
    cut: str  # "rows" or "columns" by tensor parallelism; empty: its layout is not known


@dataclass(frozen=True, slots=True, kw_only=True)
class SpecShape(ModelShape):
    """Dimensions of a model whose TorchTitan spec a function builds from config.json, and which is not made of the
    parts in FAMILIES."""

    spec: str  # "module:function"
    hf: str  # config.json
    tensors: Mapping[str, tuple[int, ...]] = field(hash=False)  # sizes by the names in the folder
    adaptable: Mapping[str, SpecLinear] = field(hash=False)  # layers that TorchTitan can give adapters, by their weight
    fused_tensors: Mapping[str, tuple[str, ...]] = field(default_factory=dict, hash=False)  # see fused()
    float32_ends: tuple[str, ...] = ()  # ends of the names of tensors that vLLM keeps in float32
    blocks: str = "model.layers."  # what the names of the blocks' tensors begin with; a tower has layers, too

    @classmethod
    def of(cls, spec: str, text: str) -> "SpecShape":
        sizes, family = dict(sizes_of_spec(spec, text)), cast("Family", json.loads(text)["model_type"])
        tensors = {name: tuple(size) for name, size in sizes.pop("tensors").items()}
        adaptable = {name: SpecLinear(*linear) for name, linear in sizes.pop("adaptable").items()}
        fused = {one: tuple(parts) for one, parts in sizes.pop("fused_tensors").items()}
        ends = tuple(sizes.pop("float32_ends"))
        names = {"tensors": tensors, "fused_tensors": fused, "float32_ends": ends, "adaptable": adaptable}
        return cls(**(sizes | names), family=family, spec=spec, hf=text)

    @property
    def parts(self) -> FamilyParts:
        return counts_of(self).parts

    @property
    def parameters(self) -> int:
        return counts_of(self).parameters

    def block_parameters(self, layer: int) -> int:
        return counts_of(self).of_blocks[layer]

    @property
    def attention_parameters(self) -> int:
        return counts_of(self).of_attention

    @property
    def linears(self) -> list[tuple[int, int]]:
        blocks = [size for name, size in self.tensors.items() if name.startswith(self.blocks)]
        return [(size[0], size[1]) for size in blocks if len(size) == 2]

    def halves(self, dtype: str) -> tuple[str, ...]:
        ends = (*self.float32_ends, *((ROUTE_BIAS,) if self.parts.biased_routes else ()))
        return ends if BYTES[dtype] == 2 else ()

    @property
    def hf_head(self) -> dict[str, Any]:
        return {}  # an export keeps the keys of its folder's config.json

    def hf_tensors(self, *, head: bool = True) -> dict[str, tuple[int, ...]]:
        return {name: size for name, size in self.tensors.items() if head or name != HF_LM_HEAD}

    def fused(self) -> dict[str, tuple[str, ...]]:
        return dict(self.fused_tensors)


class SpecCounts(NamedTuple):
    """Numbers of a SpecShape's parameters, and the parts that its tensors show."""

    parts: FamilyParts
    parameters: int
    of_blocks: list[int]
    of_attention: int  # in the matrices of all blocks, but for feed-forwards, experts and routers


@lru_cache(maxsize=64)  # a plan asks for the same ones again and again
def counts_of(shape: SpecShape) -> SpecCounts:
    of_blocks, in_matrices = [0] * shape.n_layers, 0
    for name, size in shape.tensors.items():
        if layer := re.match(rf"{re.escape(shape.blocks)}(\d+)\.", name):
            of_blocks[int(layer[1])] += math.prod(size)
            in_matrices += math.prod(size) * (len(size) == 2)
    rows = [shape.dense_rows(i) + shape.routes(i) * shape.experts * shape.hidden_dim for i in range(shape.n_layers)]
    in_routers = shape.routed_layers * shape.experts * shape.dim
    parts = FamilyParts(
        model_type=shape.family,
        architectures={"lm": json.loads(shape.hf)["architectures"][0]},
        experts=shape.experts > 0,
        biased_routes=any(name.endswith(ROUTE_BIAS) for name in shape.tensors),
    )
    total = sum(math.prod(size) for size in shape.tensors.values())
    return SpecCounts(parts, total, of_blocks, in_matrices - 3 * shape.dim * sum(rows) - in_routers)


def shape_of_folder(folder: str, key: str, spec: str = "", vision: str = "none") -> ModelShape:
    """Return the shape of the Hugging Face folder that the config key `key` names. `spec`: the function that builds its
    model ("module:function"); by default the one for its model_type, if there is one, else the parts of its family.
    `vision`: model.vision."""
    path = Path(folder) / "config.json"
    if not os.path.isdir(path.parent):  # unlike Path.is_dir, never raises
        fetch = "`hf download OWNER/NAME --local-dir FOLDER` fetches one of the Hub's: a run downloads nothing"
        hint = "" if path.parent.name == "hf" else f"; {fetch}"  # hf/ is what another run is yet to write
        raise ValueError(f"{key}: expected a Hugging Face folder, found none at {path.parent}{hint}")
    try:
        text = text_of(path)
        found = json.loads(text)
        if not isinstance(found, dict):
            raise ValueError(f"a {type(found).__name__}, not a JSON object")
        built = SPECS.get(str(found.get("model_type")))
        if spec := spec or (built.seeing.get(vision, built.spec) if built else ""):
            return SpecShape.of(spec, text)
        return ModelShape.from_hf(found)
    except RecursionError as error:
        raise ValueError(f"{key}: expected a usable {path}, found JSON that is nested too deeply") from error
    except FileNotFoundError as error:
        raise ValueError(f"{key}: expected a config.json in {path.parent}, found none") from error
    except (AttributeError, LookupError, OSError, OverflowError, TypeError, ValueError) as error:
        raise ValueError(f"{key}: expected a usable {path}, found {error}") from error


@dataclass(frozen=True, slots=True)
class ShardedModel:
    """Numbers of parameters on the fullest rank of a mesh, and how many of them FSDP2 gathers at once."""

    held: int  # in its shards
    whole: int  # with all groups gathered, under tensor parallelism
    block: int  # in the largest transformer block, gathered
    last: int  # in the head's group, gathered
    sent: Sequence[Sequence[int]] = ()  # moved by a weight sync, by rank and reader; empty without readers
    adapters: int = 0  # adapters in `held`: if there are any, nothing else is trained (LoRA)
    adapters_whole: int = 0  # adapters in `whole`


@dataclass(frozen=True, slots=True)
class MeshQuestion:
    """The inputs for cutting a model over a mesh. `config` has no "auto"."""

    config: Config
    shape: ModelShape
    parallelism: ParallelismSection
    readers: Sequence[Sequence[Piece]] = ()
