"""A TorchTitan ModelSpec for a ModelShape, and the names that Hugging Face gives to its parameters.

Every family is built from TorchTitan's parts, in the blocks of its Qwen3: so are rows in Hugging Face's order, which is
what the weight plan, checkpoints and exports have.
"""

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Placement, Shard
from torchtitan.config import derive
from torchtitan.models import qwen3
from torchtitan.models.common import Embedding, Linear
from torchtitan.models.common.attention import VarlenAttention
from torchtitan.models.common.config_utils import make_ffn_config, make_gqa_config
from torchtitan.models.common.moe import MoE
from torchtitan.models.common.nn_modules import RMSNorm
from torchtitan.models.common.param_init import depth_scaled_std, skip_param_init
from torchtitan.models.qwen3.model import Qwen3Model, Qwen3TransformerBlock
from torchtitan.models.qwen3.state_dict_adapter import Qwen3StateDictAdapter
from torchtitan.models.utils import MoEStateDictAdapter
from torchtitan.protocols.model_spec import ModelSpec

from titan_rl.actors.titan import family_parts, private
from titan_rl.actors.titan.adaptation import Adaptation
from titan_rl.actors.titan.experts import Mixture, moe_config
from titan_rl.actors.titan.rope import ScaledRoPE
from titan_rl.wire.model_families import BEFORE, NormPlace
from titan_rl.wire.model_shape import ROUTE_BIAS, ModelShape, SpecShape
from titan_rl.wire.user_functions import load

NO_DIMENSION = -1
WHOLE = Adaptation()
FEED_FORWARD = {"gate": "w1", "down": "w2", "up": "w3"}
STACKED = "moe.routed_experts.inner_experts."
BIASED_ROUTES = {  # names in a block
    f"mlp.gate.{ROUTE_BIAS}": "moe.expert_bias_E",
    **{f"mlp.shared_experts.{x}_proj.weight": f"moe.shared_experts.{w}.weight" for x, w in FEED_FORWARD.items()},
}
GPT_OSS = {
    "self_attn.o_proj.bias": "attention.wo.bias",
    "self_attn.sinks": "attention.sinks",
    "mlp.router.weight": "moe.router.gate.weight",
    "mlp.router.bias": "moe.router.gate.bias",
    "mlp.experts.{}.gate_up_proj": f"{STACKED}mlp1_weight_EGD",
    "mlp.experts.gate_up_proj_bias": f"{STACKED}mlp1_bias_EG",
    "mlp.experts.{}.down_proj": f"{STACKED}mlp2_weight_EDF",
    "mlp.experts.down_proj_bias": f"{STACKED}mlp2_bias_ED",
}
Init = dict[str, Callable[..., Any]]


class Adapter(Qwen3StateDictAdapter):
    """TorchTitan's translation to and from Hugging Face tensors, with the biases of q, k and v, and with the norms of a
    family."""

    norms: Mapping[str, NormPlace] = BEFORE
    gpt_oss: bool = False  # sinks, biases everywhere, and its kind of experts

    def __init__(self, model_config: Qwen3Model.Config, hf_assets_path: str | None) -> None:
        super().__init__(model_config, hf_assets_path)
        layer = "layers.{}"
        for x in "qkv":
            self.from_hf_map[f"model.{layer}.self_attn.{x}_proj.bias"] = f"{layer}.attention.qkv_linear.w{x}.bias"
        for norm in BEFORE:
            del self.from_hf_map[f"model.{layer}.{norm}.weight"]
        for norm, place in self.norms.items():
            self.from_hf_map[f"model.{layer}.{norm}.weight"] = f"{layer}.{place}.weight"
        for hf, name in BIASED_ROUTES.items():
            self.from_hf_map[f"model.{layer}.{hf}"] = f"{layer}.{name}"
        if self.gpt_oss:
            del self.from_hf_map[f"model.{layer}.mlp.gate.weight"]
            for hf, name in GPT_OSS.items():
                self.from_hf_map[f"model.{layer}.{hf}"] = f"{layer}.{name}"

    def to_hf(self, state_dict: dict[str, Any]) -> dict[str, Any]:
        """Translate a state. gpt-oss's experts stay stacked, by the names of the folder's tensors."""
        stacks, back = dict[str, Any](), {name: hf for hf, name in self.from_hf_map.items()}
        for name in [name for name in state_dict if self.gpt_oss and STACKED in name]:
            _, layer, rest = name.split(".", 2)
            hf = back[f"layers.{{}}.{rest}"].replace("{}", layer, 1)
            stacks[hf.replace(".{}", "")] = state_dict[name]
        others = {name: value for name, value in state_dict.items() if not (self.gpt_oss and STACKED in name)}
        return super().to_hf(others) | stacks


class OfReplicatedExperts(MoEStateDictAdapter):
    """A translation of experts that may be replicated."""

    def _caculate_indices_from_placements(
        self, dim: int, dim_size: int, dtensor_placements: tuple[Placement, ...], device_mesh: DeviceMesh
    ) -> tuple[int, int]:
        """Return the first of a rank's experts and the one behind its last. TorchTitan's asks each placement which
        dimension it cuts, and a replicated one cuts none."""
        cuts = tuple(Shard(NO_DIMENSION) if p.is_replicate() else p for p in dtensor_placements)
        return super()._caculate_indices_from_placements(dim, dim_size, cuts, device_mesh)


@dataclass(frozen=True, slots=True)
class Initializers:
    """How parameters begin if model.initializer_range is 0."""

    linear: Init
    embedding: Init
    head: Init
    by_depth: Callable[[int], Init]  # by layer: for its output projection, and its gate's partner

    @classmethod
    def of(cls, shape: ModelShape) -> "Initializers":
        if shape.parts.initializers == "depth_scaled":  # TorchTitan's Llama 3
            s = shape.dim**-0.5
            return cls(
                _init(partial(nn.init.trunc_normal_, std=0.02)),
                _init(partial(nn.init.normal_, std=1.0)),
                _init(partial(nn.init.trunc_normal_, std=s, a=-3 * s, b=3 * s)),
                lambda layer: _init(partial(nn.init.trunc_normal_, std=depth_scaled_std(0.02, layer))),
            )
        normal = _init(partial(nn.init.normal_, std=0.02))
        return cls(normal, normal, normal, lambda layer: normal)


def _init(weight: Callable[..., Any]) -> Init:
    return {"weight": weight, "bias": nn.init.zeros_}


def build_spec(shape: ModelShape, *, seq_len: int) -> ModelSpec:
    """Build the spec of `shape`, with rotary tables for rows of `seq_len` tokens.

    q, k and v stay separate linears: their shards are then rectangles of Hugging Face's tensors, which is what the
    weight plan moves; the generator fuses them on arrival."""
    if isinstance(shape, SpecShape):
        return given_spec(shape, seq_len)
    init, parts = Initializers.of(shape), shape.parts
    embedding = family_parts.ScaledEmbedding if parts.scaled_embedding else Embedding
    model = family_parts.Model.Config(
        dim=shape.dim,
        vocab_size=shape.vocab_size,
        enable_weight_tying=shape.tied,
        tok_embeddings=embedding.Config(
            num_embeddings=shape.vocab_size,
            embedding_dim=shape.dim,
            param_init={"weight": skip_param_init if shape.tied else init.embedding["weight"]},
        ),
        norm=norm(shape, shape.dim),
        lm_head=Linear.Config(in_features=shape.dim, out_features=shape.vocab_size, param_init=init.head),
        layers=[_layer(shape, init, layer, seq_len) for layer in range(shape.n_layers)],
    )
    own_adapter = type("FamilyAdapter", (Adapter,), {"norms": parts.norms, "gpt_oss": parts.sinks})
    return spec_of_blocks("qwen3", model, own_adapter)


def spec_of_blocks(name: str, model: Any, adapter: Any) -> ModelSpec:
    """Return the spec of a model whose blocks TorchTitan's function for Qwen3 can cut over a mesh."""
    return ModelSpec(
        name=name,
        flavor="titan_rl",
        model=model,
        parallelize_fn=qwen3.parallelize_qwen3,
        pipelining_fn=None,
        post_optimizer_build_fn=None,
        state_dict_adapter=adapter,
    )


def given_spec(shape: SpecShape, seq_len: int) -> ModelSpec:
    """Build the spec of a model that is not made of Qwen3's blocks."""
    spec = spec_of(shape.spec, json.loads(shape.hf))
    model: Any = spec.model
    for layer in model.layers:
        if rope := getattr(layer.attention, "rope", None):
            layer.attention.rope = replace(rope, max_seq_len=seq_len)
        if type(getattr(layer, "moe", None)) is MoE.Config:
            layer.moe = derive(layer.moe, Mixture.Config)
    return spec


def spec_of(name: str, config: Mapping[str, Any]) -> ModelSpec:
    """Call the function "module:name" with the keys of config.json."""
    spec = load(name, "model.spec")(config)
    if not isinstance(spec, ModelSpec) or spec.state_dict_adapter is None:
        raise ValueError(f"expected {name} to return TorchTitan's ModelSpec with an adapter, found {spec!r:.80}")
    return spec


def _layer(shape: ModelShape, init: Initializers, layer: int, seq_len: int) -> Qwen3TransformerBlock.Config:
    parts, window = shape.parts, shape.window(layer)
    attention = make_gqa_config(
        dim=shape.dim,
        n_heads=shape.n_heads,
        n_kv_heads=shape.n_kv_heads,
        head_dim=shape.head_dim,
        wqkv_param_init=init.linear,
        wo_param_init=init.by_depth(layer),
        inner_attention=VarlenAttention.Config(window_size=(window - 1, 0) if window else (-1, 0)),
        rope=rope(shape, layer, seq_len),
        qk_norm=norm(shape, shape.qk_norms["q"], wide=parts.wide_norms) if shape.qk_norms else None,
    )
    qkv: Any = attention.qkv_linear
    qkv.wq.bias = qkv.wkv.bias = shape.qkv_bias
    keys = family_parts.values_of(attention)
    if parts.sinks:
        wo = attention.wo
        sizes: dict[str, Any] = {"in_features": wo.in_features, "out_features": wo.out_features, "bias": True}
        keys["wo"] = family_parts.BiasedRowwiseLinear.Config(**sizes, param_init=wo.param_init)
        keys["param_init"] = {"sinks": init.linear["weight"]}
        attention = family_parts.SinkAttention.Config(**keys)
    elif parts.wide_norms or shape.query_scalar:
        attention = family_parts.Attention.Config(
            **keys,
            k_norm=norm(shape, shape.qk_norms["k"], wide=True) if parts.wide_norms else None,
            scale=shape.query_scalar**-0.5 if shape.query_scalar else None,
        )
    routes = shape.routes(layer)
    feed_forward = make_ffn_config(
        dim=shape.dim,
        hidden_dim=shape.hidden_dim if routes else shape.dense_rows(layer),
        w1_param_init=init.linear,
        w2w3_param_init=init.by_depth(layer),
    )
    if parts.activation != "silu":
        feed_forward = family_parts.GeluFeedForward.Config(w1=feed_forward.w1, w2=feed_forward.w2, w3=feed_forward.w3)
    block: dict[str, Any] = {place: norm(shape, shape.dim) for place in parts.norms.values()}
    missing: dict[str, Any] = {
        place: family_parts.NoNorm.Config(normalized_shape=shape.dim) for place in BEFORE.values()
    }
    kind: Any = family_parts.Block if len(block | missing) > len(missing) else Qwen3TransformerBlock
    return kind.Config(
        attention=attention,
        feed_forward=None if routes else feed_forward,
        moe=moe_config(shape, init.linear, init.by_depth(layer)) if routes else None,
        **(missing | block),
    )


def rope(shape: ModelShape, layer: int, seq_len: int) -> ScaledRoPE.Config:
    """Return the rotary embedding of a layer, with tables for rows of `seq_len` tokens."""
    of_window = bool(shape.window_theta and shape.window(layer))
    other = shape.parts.full_every and not shape.parts.one_rope  # layers with a window have other tables
    keys: dict[str, Any] = {
        "dim": shape.rotary_dim or shape.head_dim,
        "max_seq_len": seq_len,
        "theta": shape.window_theta if of_window else shape.rope_theta,
        "rope_scaling": None if other and shape.window(layer) else shape.rope_scaling,
    }
    if layer in shape.unrotated_layers:
        return family_parts.NoRoPE.Config(**keys)
    if shape.parts.partly_rotated:
        return family_parts.PartialRoPE.Config(**keys, interleaved=shape.parts.interleaved_rope)
    return ScaledRoPE.Config(**keys)


def norm(shape: ModelShape, size: int, *, wide: bool = False) -> RMSNorm.Config:
    if shape.parts.norm_offset:
        init = {"weight": nn.init.zeros_}
        return family_parts.OffsetNorm.Config(normalized_shape=size, eps=shape.norm_eps, param_init=init)
    kind = family_parts.WideNorm if wide else RMSNorm
    return kind.Config(normalized_shape=size, eps=shape.norm_eps, param_init={"weight": nn.init.ones_})


def adapter(spec: ModelSpec, assets: str | None) -> Any:
    """TorchTitan's translation to and from Hugging Face tensors. (Its type is a base class without the name map.)"""
    kind: Any = spec.state_dict_adapter
    if issubclass(kind, MoEStateDictAdapter):
        kind = type(kind.__name__, (OfReplicatedExperts, kind), {})
    return kind(spec.model, assets)


def plain(name: str) -> str:
    """The name that a parameter has in a state dict: without the marks of activation checkpointing."""
    return name.replace(private.CHECKPOINT_PREFIX, "")


def hf_names(spec: ModelSpec, names: list[str], adaptation: Adaptation = WHOLE) -> dict[str, str]:
    """Map TorchTitan's parameter names to Hugging Face's. A stack of all experts has {} for the expert's number."""
    back = {v: k for k, v in adapter(spec, None).from_hf_map.items() if v is not None}

    def hf(name: str) -> str:
        layer = re.search(r"\d+", name)
        generic = re.sub(r"\d+", "{}", plain(name), count=1)
        if generic not in back:
            raise ValueError(f"override.imports: expected overrides that keep the parameters' names, found {name}")
        return back[generic].replace("{}", layer[0], 1) if layer else back[name]

    return {name: adaptation.hf_name(name, hf) for name in names}
