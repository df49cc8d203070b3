"""Converts a GGUF file of a Llama-shaped model into a Hugging Face folder, and checks it against transformers.

    python convert_gguf.py MODEL.gguf FOLDER        # needs the package gguf; exit code 2 names what cannot be read

The check computes log-probs of the folder's model and of transformers' own reading of the file.
"""

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:  # each part imports torch itself: a controller that imports all modules does not
    import torch

EPSILON = 1e-4
"""Largest difference of two log-probs. Both models compute in float32 with equal weights."""
WHOLE = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
PARTS = {
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
}


class GgufRefused(ValueError):
    """A file that this program cannot convert."""


def main(source: Path, folder: Path) -> None:
    from gguf import GGUFReader  # pyright: ignore[reportMissingImports]

    try:
        reader = GGUFReader(source)
    except (ValueError, IndexError, OSError) as error:
        raise GgufRefused(f"expected a whole GGUF file, found {error}") from error
    facts = {name: field.contents() for name, field in reader.fields.items()}
    config = hf_config(facts, tied="output.weight" not in {tensor.name for tensor in reader.tensors})
    tensors = {name: values for each in reader.tensors for name, values in [hf_tensor(each, config)]}
    wanted = {f"model.layers.{n}.{part}.weight" for n in range(config["num_hidden_layers"]) for part in PARTS.values()}
    wanted |= {name for gguf, name in WHOLE.items() if gguf != "output.weight"}
    missing = sorted(wanted - tensors.keys())
    if missing:
        raise GgufRefused(f"expected {len(wanted)} tensors of a Llama model, found none of {', '.join(missing[:5])}")
    write(folder, config, tensors)
    write_tokenizer(source, folder)
    check(source, folder)


def hf_config(facts: Mapping[str, Any], *, tied: bool) -> dict[str, Any]:
    """Return the config.json of the file's model."""
    family = facts.get("general.architecture")
    if family != "llama":
        raise GgufRefused(f'expected general.architecture = "llama", found "{family}"')

    def fact(name: str, *default: Any) -> Any:
        if not default and f"llama.{name}" not in facts:
            raise GgufRefused(f"expected the fact llama.{name}, found none")
        return facts.get(f"llama.{name}", *default)

    experts = fact("expert_count", 0)
    if experts:
        raise GgufRefused(f"expected a dense model, found llama.expert_count = {experts}")
    scaling = fact("rope.scaling.type", "none")
    if scaling != "none":
        raise GgufRefused(f'expected llama.rope.scaling.type = "none", found "{scaling}"')
    heads, dim = fact("attention.head_count"), fact("embedding_length")
    head_dim = fact("rope.dimension_count", dim // heads)
    if head_dim * heads != dim:
        raise GgufRefused(
            f"expected heads of {dim // heads} rotated dimensions, found llama.rope.dimension_count = {head_dim}"
        )
    ids = {
        name: facts[f"tokenizer.ggml.{name}"]
        for name in ("bos_token_id", "eos_token_id")
        if f"tokenizer.ggml.{name}" in facts
    }
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": dim,
        "intermediate_size": fact("feed_forward_length"),
        "num_hidden_layers": fact("block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": fact("attention.head_count_kv", heads),
        "head_dim": head_dim,
        "vocab_size": len(facts["tokenizer.ggml.tokens"]),
        "max_position_embeddings": fact("context_length"),
        "rope_theta": float(fact("rope.freq_base", 10000.0)),
        "rms_norm_eps": float(f"{fact('attention.layer_norm_rms_epsilon'):.6g}"),  # the file rounds 1e-5 to float32
        "tie_word_embeddings": tied,
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "torch_dtype": "float32",
        **{name: int(value) for name, value in ids.items()},
        "pad_token_id": int(facts.get("tokenizer.ggml.padding_token_id", ids.get("eos_token_id", 0))),
    }


def hf_tensor(tensor: Any, config: Mapping[str, Any]) -> tuple[str, "torch.Tensor"]:
    """Return a tensor's name in transformers and its values in float32."""
    import torch
    from gguf.quants import dequantize  # pyright: ignore[reportMissingImports]

    name = WHOLE.get(tensor.name)
    block, layer, part, kind = (*tensor.name.split("."), "", "", "")[:4]
    if name is None and (block != "blk" or kind != "weight" or part not in PARTS):
        raise GgufRefused(f"expected tensors of a Llama model, found {tensor.name}")
    try:
        values = dequantize(tensor.data, tensor.tensor_type).astype(np.float32)
    except NotImplementedError as error:
        raise GgufRefused(
            f"{tensor.name}: expected a quantization that the package gguf reads, found {error}"
        ) from error
    values = values.reshape(tensor.shape.tolist()[::-1])
    heads = {"attn_q": "num_attention_heads", "attn_k": "num_key_value_heads"}.get(part)
    if name is None and heads:
        values = in_halves(values, config[heads])
    name = name or f"model.layers.{layer}.{PARTS[part]}.weight"
    return name, torch.from_numpy(np.ascontiguousarray(values))


def in_halves(rows: np.ndarray, heads: int) -> np.ndarray:
    """Return the rows of q or k with each rotated pair as transformers has it, half a head apart: in a GGUF file the
    two rows of a pair are neighbours."""
    return rows.reshape(heads, rows.shape[0] // heads // 2, 2, *rows.shape[1:]).swapaxes(1, 2).reshape(rows.shape)


def write(folder: Path, config: Mapping[str, Any], tensors: Mapping[str, "torch.Tensor"]) -> None:
    from safetensors.torch import save_file

    folder.mkdir(parents=True)
    save_file(dict(tensors), folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "model.safetensors").chmod(0o644)  # safetensors makes it readable by its owner only
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")


def write_tokenizer(source: Path, folder: Path) -> None:
    """Write the tokenizer and the chat template as transformers reads them from the file."""
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(source.parent, gguf_file=source.name)
    except Exception as error:  # its readers raise errors of any type
        raise GgufRefused(
            f"expected a tokenizer that transformers reads, found {type(error).__name__}: {error}"
        ) from error
    tokenizer.save_pretrained(folder)


def check(source: Path, folder: Path) -> None:
    """Compare log-probs of the model in the folder with log-probs of the model that transformers reads from the file:
    its config and its weights."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM
    from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

    facts = load_gguf_checkpoint(str(source), return_tensors=False)["config"]
    facts = {name: value for name, value in facts.items() if not name.startswith("_")}
    theirs: Any = AutoModelForCausalLM.from_config(AutoConfig.for_model(**facts), dtype=torch.float32)
    read = load_gguf_checkpoint(str(source), return_tensors=True, model_to_load=theirs)["tensors"]
    keys = theirs.load_state_dict({name: values.float() for name, values in read.items()}, strict=False)
    if keys.unexpected_keys or set(keys.missing_keys) - {"lm_head.weight"}:
        raise GgufRefused(f"expected transformers to read the same tensors, found {keys}")
    theirs.tie_weights()
    ours: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    tokens = torch.randint(theirs.config.vocab_size, (1, 64), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        gap = float((ours(tokens).logits.log_softmax(-1) - theirs(tokens).logits.log_softmax(-1)).abs().max())
    if not gap <= EPSILON:
        raise GgufRefused(
            f"expected log-probs within {EPSILON} of transformers' own reading of the file, found {gap:.3g}"
        )
    print(json.dumps({"largest difference of log-probs": gap}))


if __name__ == "__main__":
    try:
        main(Path(sys.argv[1]), Path(sys.argv[2]))
    except GgufRefused as error:
        print(error, file=sys.stderr)
        sys.exit(2)
