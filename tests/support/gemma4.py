"""Tiny Gemma 4 folders with random weights, made by transformers itself, with sizes that are drawn from a seed."""

import json
from pathlib import Path
from typing import Any

from bench import drawn_families

drawn, drawn_small = drawn_families.gemma4, drawn_families.small_gemma4
FULL, WINDOW = drawn_families.FULL, drawn_families.WINDOW
VISION: dict[str, Any] = {
    **{"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "head_dim": 8, "patch_size": 2},
    **{"num_attention_heads": 2, "num_key_value_heads": 2, "position_embedding_size": 4},
}
AUDIO: dict[str, Any] = {
    **{"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "subsampling_conv_channels": [4, 4]},
    **{"conv_kernel_size": 3, "output_proj_dims": 16},
}
TOKENS = ("eoa_token_index", "boi_token_id", "eoi_token_id", "boa_token_id", "image_token_id", "video_token_id")


def make_folder(folder: Path, keys: dict[str, Any], *, std: float = 0.2, towers: tuple[str, ...] = ()) -> Path:
    """Write the folder: of a text model, or with some of the towers "vision" and "audio"."""
    import torch
    from transformers import AutoModelForCausalLM, Gemma4Config, Gemma4ForConditionalGeneration, Gemma4TextConfig

    torch.manual_seed(0)
    if towers:
        others: dict[str, Any] = {"audio_token_id": 62} | {name: 56 + i for i, name in enumerate(TOKENS)}
        config = Gemma4Config(
            text_config=keys,
            vision_config=VISION if "vision" in towers else None,
            audio_config=AUDIO if "audio" in towers else None,
            tie_word_embeddings=keys["tie_word_embeddings"],
            **others,
        )
        model: Any = Gemma4ForConditionalGeneration(config).float()
        layers = model.model.language_model.layers
    else:
        model = AutoModelForCausalLM.from_config(Gemma4TextConfig(**keys), dtype=torch.float32)
        layers = model.model.layers
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.normal_(1.0 if "norm" in name else 0.0, std)
        for i, layer in enumerate(layers):
            layer.layer_scalar.fill_(0.8 + 0.1 * i)
    model.save_pretrained(folder)
    return folder


def add_unused(folder: Path) -> None:
    """Add what folders on the Hub have besides: keys of attention that another layer's are taken for."""
    from safetensors.torch import load_file, save_file

    text = json.loads((folder / "config.json").read_text())["text_config"]
    tensors, layers, shared = (
        load_file(folder / "model.safetensors"),
        text["num_hidden_layers"],
        text["num_kv_shared_layers"],
    )
    for i in range(layers - shared, layers):
        at = f"model.language_model.layers.{i}.self_attn"
        tensors |= {f"{at}.k_norm.weight": tensors[f"{at}.q_norm.weight"] + i}
        tensors |= {f"{at}.{x}_proj.weight": tensors[f"{at}.q_proj.weight"][:32] + i for x in "kv"}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def make_model(folder: Path, keys: dict[str, Any], *, towers: tuple[str, ...] = ()) -> Path:
    """Write a folder with the built-in tokenizer, whose weights learn."""
    from titan_rl.text.tokenizer import build

    make_folder(folder, keys, std=0.08, towers=towers)
    config = (folder / "config.json").read_text()
    build(folder)
    (folder / "config.json").write_text(config)
    return folder


def gradient_gaps(scratch: Path, folder: str, tensor: int, context: int, recompute: str) -> dict[str, float]:
    """Return how far the gradients of ranks are from transformers', as a share of their norm, by the folder's names."""
    import numpy as np
    import torch
    from torch.distributed.tensor import DTensor

    from support.muse_glimmer import transformers_model
    from titan_rl.actors.titan.model import TitanModel
    from titan_rl.batch.packing import pack
    from titan_rl.config import sections as c
    from titan_rl.preflight.shapes import shape_of
    from titan_rl.wire.types import Sample

    config = c.Config(
        job=c.JobSection(dump_folder=str(scratch)),
        model=c.ModelSection(hf_assets_path=folder),
        training=c.TrainingSection(seq_len=160),
        activation_checkpoint=c.ActivationCheckpointSection(mode=recompute),  # type: ignore[arg-type]
        parallelism=c.ParallelismSection(
            data_parallel_shard_degree=1, tensor_parallel_degree=tensor, context_parallel_degree=context
        ),
    )
    model = TitanModel(config, shape_of(config.model), config.parallelism)
    model.read(folder)
    random = np.random.default_rng(0)
    texts = [random.integers(3, 55, n).tolist() for n in (60, 90, 50, 100)]
    samples = [Sample(text, [0] + [1] * (len(text) - 1), {}, 0) for text in texts]
    (batch,) = pack(samples, shards=1, seq_len=160, rows_per_microbatch=2, pad_id=0)
    for rows in batch.microbatches:
        placed = model.placed(rows)
        model.backward((model.logprobs(placed, temperature=1.0)[0] * placed.mask).sum())
    model.reshard()
    gradients = {model.names[name]: p.grad for name, p in model.model.named_parameters() if p.grad is not None}
    ours = {name: (g.full_tensor() if isinstance(g, DTensor) else g) for name, g in gradients.items()}
    theirs = transformers_model(Path(folder), vision="text_config" in (Path(folder) / "config.json").read_text())
    for text in texts:
        ids = torch.tensor([text])
        theirs(input_ids=ids).logits[0, :-1].log_softmax(-1).gather(-1, ids[0, 1:, None]).sum().backward()
    wanted = {name: p.grad for name, p in theirs.named_parameters() if name in ours}
    return {name: float((ours[name] - g).norm() / g.norm()) for name, g in wanted.items()}
