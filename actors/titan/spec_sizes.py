"""Prints the dimensions of the model that a spec function builds from a config.json.

    python -m titan_rl.actors.titan.spec_sizes MODULE:FUNCTION < config.json

The last line of the output is JSON: fields of SpecShape. Exit code 1: the last line of stderr is a refusal.
"""

import json
import math
import os
import sys
from collections.abc import Iterable
from typing import Any

import spmd_types as spmd
import torch
from torchtitan.models.common import Linear
from torchtitan.models.common.attention import VarlenAttention
from torchtitan.models.common.decoder_sharding import dense_param_placement
from torchtitan.models.common.moe import GroupedExperts, MoE

from titan_rl.actors.titan import private
from titan_rl.actors.titan.experts import route_biases
from titan_rl.actors.titan.model import titan_config
from titan_rl.actors.titan.spec import adapter, hf_names, spec_of
from titan_rl.config.sections import Config, ParallelismSection


def sizes(spec_name: str, config: dict[str, Any]) -> dict[str, Any]:
    spec = spec_of(spec_name, config)
    model: Any = spec.model
    recurrent_heads, attentions = 0, list[Any]()
    for i, layer in enumerate(model.layers):
        attention: Any = layer.attention
        if heads := getattr(attention, "recurrent_heads", ()):
            recurrent_heads = math.gcd(recurrent_heads, *heads)
            continue
        attentions.append(attention)
        inner = getattr(attention, "inner_attention", None)
        if not isinstance(inner, VarlenAttention.Config):
            raise ValueError(f"expected VarlenAttention in layer {i}, found {type(inner).__qualname__}")
    attention, eps, folder = model.first_attention, model.norm.eps, tensors(spec)
    latent = getattr(attention, "kv_lora_rank", None)
    return {
        "vocab_size": model.vocab_size,
        "dim": model.dim,
        "n_layers": len(model.layers),
        "n_heads": attention.n_heads,
        "n_kv_heads": math.gcd(  # which tensor parallelism divides
            *(getattr(each, "n_kv_heads", None) or each.n_heads for each in attentions)
        ),
        "head_dim": _head_dim(attention, model.dim),
        "latent_dim": latent + attention.qk_rope_head_dim if latent else 0,
        **_feed_forwards(model.layers),
        "max_seq_len": model.max_seq_len,
        "rope_theta": attention.rope.theta,
        "norm_eps": eps,
        "tied": model.enable_weight_tying,
        "tensors": folder,
        "blocks": blocks(spec, folder),
        "fused_tensors": fused(spec, folder),
        "float32_ends": getattr(spec.state_dict_adapter, "in_float32", ()),
        "recurrent_heads": recurrent_heads,
        "adaptable": {} if recurrent_heads else adaptable(spec),
    }


def _head_dim(attention: Any, dim: int) -> int:
    if hasattr(attention, "qk_nope_head_dim"):
        return attention.qk_nope_head_dim + attention.qk_rope_head_dim
    return getattr(attention, "head_dim", None) or dim // attention.n_heads


def _feed_forwards(layers: list[Any]) -> dict[str, int]:
    """Return the fields that describe feed-forwards and experts."""
    mixtures = [getattr(layer, "moe", None) for layer in layers]
    routed = [moe for moe in mixtures if moe is not None]
    if not routed:
        return {"hidden_dim": layers[0].feed_forward.w1.out_features}
    dense, kinds = len(layers) - len(routed), {_experts(moe) for moe in routed}
    if any(mixtures[:dense]):
        raise ValueError(f"expected experts in all layers from one on, found them in layer {mixtures.index(routed[0])}")
    if len(kinds) > 1:
        raise ValueError(f"expected experts of one kind, found (experts, each token's, rows, shared rows) {kinds}")
    ((experts, each, rows, shared),) = kinds
    if shared % rows:
        raise ValueError(f"expected shared experts with a multiple of {rows} rows, as an expert has, found {shared}")
    return {
        "hidden_dim": rows,
        "dense_layers": dense,
        "dense_hidden_dim": layers[0].feed_forward.w1.out_features if dense else 0,
        "experts": experts,
        "experts_per_token": each,
        "shared_experts": shared // rows,
    }


def _experts(moe: Any) -> tuple[int, int, int, int]:
    if type(moe.routed_experts.inner_experts) is not GroupedExperts.Config:
        raise ValueError(f"expected GroupedExperts, found {type(moe.routed_experts.inner_experts).__qualname__}")
    shared = moe.shared_experts.w1.out_features if moe.shared_experts else 0
    return moe.num_experts, moe.router.top_k, moe.routed_experts.inner_experts.hidden_dim, shared


def tensors(spec: Any) -> dict[str, list[int]]:
    """Return the sizes of the folder's tensors by name. Each must be a parameter as it is, perhaps with another
    dimension of 1, or an expert's matrix in a stack: a shard of the model is then a rectangle of the folder's tensors,
    which is what checkpoints, exports and weight syncs move. Biases of routers are buffers, which stay as they are
    read."""
    with torch.device("meta"):
        model = spec.model.build()
    state, translate = model.state_dict(), adapter(spec, None)
    if spec.model.enable_weight_tying:
        del state["lm_head.weight"]
    biases, sizes = {name for name, _ in route_biases(model)}, dict[str, list[int]]()
    for name, hf_name in hf_names(spec, list(state)).items():
        own = dict(enumerate(state[name])) if "{}" in hf_name else {0: state[name]}
        own = {hf_name.format(i): part for i, part in own.items()}
        found = translate.to_hf({name: state[name]})
        flat = {n: part.squeeze(1) if part.dim() == 3 else part for n, part in found.items()}
        if {n: _place(part) for n, part in own.items()} != {n: _place(part) for n, part in flat.items()}:
            raise ValueError(f"expected an adapter that only renames tensors, found that it changes {name}")
        sizes |= {n: list(part.shape) for n, part in found.items()}
    if buffers := sorted(state.keys() - dict(model.named_parameters()).keys() - biases):
        raise ValueError(f"expected no buffers in a checkpoint but biases of routers, found {buffers[0]}")
    return sizes


def _place(tensor: torch.Tensor) -> tuple[Any, ...]:
    """Return which elements of which storage a tensor has."""
    return tensor.untyped_storage()._cdata, tensor.storage_offset(), tuple(tensor.shape), tensor.stride()


def adaptable(spec: Any) -> dict[str, tuple[str, str]]:
    """Return the linear layers of blocks that TorchTitan's converter can give adapters, by their weight's name in the
    folder: each one's config, and how tensor parallelism cuts it. The converter asks for the names of configs, which
    experts may share. It takes no layer that tensor parallelism leaves whole."""
    private.update_from_config(spec.model, titan_config(Config(), ParallelismSection()))
    placements: list[Any] = [None, dense_param_placement(tp=spmd.S(0)), dense_param_placement(tp=spmd.S(1))]
    routed = tuple(f"{path}." for path, *_ in spec.model.traverse(MoE.Config))
    found, excluded = dict[str, tuple[str, str]](), set[str]()
    for path, config, *_ in spec.model.traverse(Linear.Config):
        sharding, name = config.sharding_config, path.rpartition(".")[2]
        placement = sharding.state_shardings.get("weight") if sharding else None
        if path.startswith("layers.") and not path.startswith(routed) and placement in placements:
            found[path] = name, ("", "rows", "columns")[placements.index(placement)]
        else:
            excluded.add(name)
    with torch.device("meta"):
        modules = dict(spec.model.build().named_modules())
    shared = {path for path in found if path not in modules}  # each builds several modules, as k and v
    linears = dict[str, tuple[str, str]]()
    for path, module in modules.items():
        beside = [other for other in shared if other.rpartition(".")[0] == path.rpartition(".")[0]]
        config = found.get(path) or (found[beside[0]] if len(beside) == 1 else None)
        if isinstance(module, Linear) and config and config[0] not in excluded:
            linears[f"{path}.weight"] = config
    return {hf_name: linears[name] for name, hf_name in hf_names(spec, list(linears)).items()}


def blocks(spec: Any, names: Iterable[str]) -> str:
    """Return what the names of the blocks' tensors in the folder begin with."""
    adapter_names = adapter(spec, None).from_hf_map.items()
    found = {hf.partition("{}")[0] for hf, name in adapter_names if name and name.startswith("layers.{}.")}
    used = {begin for begin in found if any(name.startswith(begin) for name in names)}
    if len(used) != 1:
        raise ValueError(f"expected one beginning of the names of blocks, found {sorted(used)}")
    return used.pop()


def fused(spec: Any, names: Iterable[str]) -> dict[str, list[str]]:
    """Return the tensors that the folder has as one, from top to bottom, by its name there."""
    return {
        name.removesuffix(parts[0]) + one: [name.removesuffix(parts[0]) + part for part in parts]
        for one, parts in getattr(spec.state_dict_adapter, "fused", {}).items()
        for name in names
        if name.endswith("." + parts[0])
    }


if __name__ == "__main__":
    try:
        found = sizes(sys.argv[1], json.load(sys.stdin))
    except KeyError as error:
        sys.exit(f"expected a key {error}, found none")
    except (AttributeError, TypeError, ValueError) as error:
        sys.exit(str(error) or repr(error))
    print(json.dumps(found), flush=True)
    os._exit(0)  # torch takes a second to take itself down
