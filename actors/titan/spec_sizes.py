"""Prints the dimensions of the model that a spec function builds from a config.json.

    python -m titan_rl.actors.titan.spec_sizes MODULE:FUNCTION < config.json

The last line of the output is JSON: fields of SpecShape. Exit code 1: the last line of stderr is a refusal.
"""

import json
import os
import sys
from typing import Any

import torch
from torchtitan.models.common.attention import VarlenAttention

from titan_rl.actors.titan.spec import adapter, hf_names, spec_of


def sizes(spec_name: str, config: dict[str, Any]) -> dict[str, Any]:
    spec = spec_of(spec_name, config)
    model: Any = spec.model
    for i, layer in enumerate(model.layers):
        inner = getattr(layer.attention, "inner_attention", None)
        if not isinstance(inner, VarlenAttention.Config):
            raise ValueError(f"expected VarlenAttention in layer {i}, found {type(inner).__qualname__}")
        if getattr(layer, "moe", None) is not None:
            raise ValueError(f"expected a dense model, found experts in layer {i}")
    attention, feed_forward, eps = model.first_attention, model.layers[0].feed_forward, model.norm.eps
    return {
        "vocab_size": model.vocab_size,
        "dim": model.dim,
        "n_layers": len(model.layers),
        "n_heads": attention.n_heads,
        "n_kv_heads": getattr(attention, "n_kv_heads", None) or attention.n_heads,
        "head_dim": getattr(attention, "head_dim", None) or model.dim // attention.n_heads,
        "hidden_dim": feed_forward.w1.out_features,
        "max_seq_len": model.max_seq_len,
        "rope_theta": attention.rope.theta,
        "norm_eps": eps,
        "tied": model.enable_weight_tying,
        "tensors": tensors(spec),
    }


def tensors(spec: Any) -> dict[str, list[int]]:
    """Return the sizes of the folder's tensors by name. Each must be a parameter as it is: a shard of the model is then
    a rectangle of the folder's tensors, which is what checkpoints, exports and weight syncs move."""
    with torch.device("meta"):
        model = spec.model.build()
    state, translate = model.state_dict(), adapter(spec, None)
    if spec.model.enable_weight_tying:
        del state["lm_head.weight"]
    for name, value in state.items():
        if [id(tensor) for tensor in translate.to_hf({name: value}).values()] != [id(value)]:
            raise ValueError(f"expected an adapter that only renames tensors, found that it changes {name}")
    if buffers := sorted(state.keys() - dict(model.named_parameters()).keys()):
        raise ValueError(f"expected no buffers in a checkpoint, found {buffers[0]}")
    return {hf_name: list(state[name].shape) for name, hf_name in hf_names(spec, list(state)).items()}


if __name__ == "__main__":
    try:
        found = sizes(sys.argv[1], json.load(sys.stdin))
    except KeyError as error:
        sys.exit(f"expected a key {error}, found none")
    except (AttributeError, TypeError, ValueError) as error:
        sys.exit(str(error) or repr(error))
    print(json.dumps(found), flush=True)
    os._exit(0)  # torch takes a second to take itself down
