"""Compares the parameters that vLLM's loader makes with what the learned layout makes from the same tensors."""

import json
import random
from pathlib import Path
from typing import Any

import numpy as np

from support.weight_layouts import execute
from titan_rl.actors.imports import import_vllm_model
from titan_rl.actors.vllm import vllm_cpu
from titan_rl.actors.vllm.vllm_args import KEPT_LAYOUT
from titan_rl.actors.vllm.vllm_params import planned_layout
from titan_rl.wire.model_families import BY_MODEL_TYPE
from titan_rl.wire.model_shape import OF_ROUTER, ROUTE_BIAS, ModelShape
from titan_rl.wire.weight_plan import Shard, plan

EXPERTS: dict[str, Any] = {"num_experts_per_tok": 2, "moe_intermediate_size": 32}
SHARED_EXPERTS: dict[str, Any] = {**EXPERTS, "n_routed_experts": 4, "n_group": 1, "topk_group": 1}
FAMILIES: dict[str, dict[str, Any]] = {  # by model_type: keys that are not drawn
    "qwen3_moe": {
        **EXPERTS,
        "num_experts": 5,
        "head_dim": 32,
    },  # first: vLLM makes the group of experts once
    "glm4_moe": {**SHARED_EXPERTS, "head_dim": 32, "n_shared_experts": 1, "first_k_dense_replace": 1},
    "deepseek_v3": {
        **SHARED_EXPERTS,
        **{"n_shared_experts": 1, "first_k_dense_replace": 1, "kv_lora_rank": 512, "q_lora_rank": 32},
        **{"qk_rope_head_dim": 64, "qk_nope_head_dim": 32, "v_head_dim": 32, "head_dim": 64},
        **{"topk_method": "noaux_tc", "scoring_func": "sigmoid"},
    },
    "gemma4_text": {"head_dim": 32, "global_head_dim": 32, "hidden_size_per_layer_input": 0, "num_kv_shared_layers": 0},
    "llama": {},
    "qwen2": {},
    "qwen3": {"head_dim": 32},
    "mistral": {"head_dim": 32},
    "smollm3": {},
    "olmo2": {},
    "olmo3": {},
    "phi3": {},
    "glm4": {"head_dim": 32},
    "gemma3_text": {"head_dim": 32},
}
TIED = ("llama", "qwen2", "qwen3", "smollm3", "glm4", "gemma3_text", "gemma4_text")


class Folder:
    """The tensors of a folder whose family has no entry."""

    def __init__(self, sizes: dict[str, tuple[int, ...]]) -> None:
        self.hf_tensors = self.folder_tensors = lambda: sizes
        self.fused = self.stacked = dict
        routes = any(name.endswith(ROUTE_BIAS) for name in sizes)
        self.halves = lambda dtype: OF_ROUTER if routes and dtype == "bfloat16" else ()


def write_models(folder: str, seed: int | str) -> None:
    """Write a model of every family, with sizes that are drawn from a seed. One key/value head over two ranks and an
    odd vocabulary test replication and padding."""
    import torch
    from transformers import CONFIG_MAPPING, AutoModelForCausalLM

    for i, (family, keys) in enumerate(FAMILIES.items()):
        draw = random.Random(f"{seed} {family}")
        kv_heads = draw.choice([1, 2, 4])
        heads = kv_heads * draw.choice([2, 4])
        if family == "deepseek_v3":
            kv_heads = heads
        drawn = {
            "vocab_size": draw.choice([100, 128, 131]),
            "hidden_size": heads * 32,
            "intermediate_size": draw.choice([64, 96, 160]),
            "num_hidden_layers": draw.choice([2, 3]),
            "num_attention_heads": heads,
            "num_key_value_heads": kv_heads,
            "max_position_embeddings": 256,
            "tie_word_embeddings": family in TIED and draw.random() < 0.5,
            **{"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0},
        }
        if family == "gemma4_text":
            drawn["vocab_size_per_layer_input"] = drawn["vocab_size"]
        model = AutoModelForCausalLM.from_config(CONFIG_MAPPING[family](**drawn | keys), dtype=torch.float32)
        with torch.no_grad():
            for tensor in model.state_dict().values():
                tensor.uniform_()
        model.save_pretrained(Path(folder, "models", f"{i:02} {family}"))


def compare_with_vllm(folder: str, tp: int | str, rank: int | str) -> None:
    """Compare vLLM's loader with the learned layout, from the same files, bit for bit, and the learned layout with the
    planned one. Runs in a separate process. In bfloat16 on a GPU, as its engines run: the layout may depend on it."""
    import torch
    from safetensors.torch import load_file
    from vllm import EngineArgs
    from vllm.config import set_current_vllm_config
    from vllm.distributed import init_distributed_environment, initialize_model_parallel
    from vllm.model_executor.model_loader import get_model
    from vllm.platforms import current_platform

    from titan_rl.actors.sync.halves import halves_of
    from titan_rl.actors.vllm.engine import with_memory
    from titan_rl.actors.vllm.learned_plan import learned_layout

    on_cpu = current_platform.is_cpu()
    if on_cpu:
        torch.accelerator.empty_cache = lambda: None  # as vLLM's CPU worker does
        vllm_cpu.keep_linear_weights()
        vllm_cpu.keep_expert_weights()

    tp, rank = int(tp), int(rank)
    dtype = torch.float32 if on_cpu else torch.bfloat16

    layout: Any = {} if on_cpu else KEPT_LAYOUT

    named, integers = ("float32", torch.int32) if on_cpu else ("bfloat16", torch.int16)

    def bits(name: str, tensor: Any) -> np.ndarray:
        halved = shape.halves(named) and name.endswith(shape.halves(named))
        viewed = halves_of(tensor.detach().float(), dtype) if halved else tensor.detach().to(dtype)
        return viewed.view(integers).numpy()

    models = sorted(Path(folder, "models").iterdir())
    for model_dir in models:
        import_vllm_model(str(model_dir))
        config = EngineArgs(
            model=str(model_dir),
            dtype="float32" if on_cpu else "bfloat16",
            max_model_len=64,
            skip_tokenizer_init=True,
            enforce_eager=True,
            tensor_parallel_size=tp,
            distributed_executor_backend="external_launcher" if tp > 1 else None,
            **layout,
        ).create_engine_config()
        config.load_config.device = "cpu"
        with set_current_vllm_config(config):
            if model_dir is models[0]:
                init_distributed_environment(tp, rank, f"file://{folder}/rendezvous", rank, "gloo")
                initialize_model_parallel(tp)
            model = get_model(vllm_config=config)
        stored = load_file(model_dir / "model.safetensors")
        hf_config = json.loads((model_dir / "config.json").read_text())
        known = hf_config["model_type"] in BY_MODEL_TYPE
        shape: Any = ModelShape.from_hf(hf_config) if known else Folder({n: tuple(w.shape) for n, w in stored.items()})
        learned = learned_layout(config, shape)

        parameters = dict(model.named_parameters()) | dict(model.named_buffers())
        parameters = {name: parameters[name] for name in learned.shapes}
        assert with_memory(dict(model.named_parameters())).keys() <= learned.shapes.keys(), model_dir.name
        assert all(param.is_contiguous() for param in parameters.values())
        loaded = {name: bits(name, param) for name, param in parameters.items()}
        assert {name: w.shape for name, w in loaded.items()} == learned.shapes
        if known:
            planned = planned_layout(shape, tp=tp, rank=rank, dtype=named)
            assert planned.shapes == learned.shapes
            assert sorted(map(repr, planned.pieces)) == sorted(map(repr, learned.pieces)), model_dir.name

        for one, parts in shape.fused().items():
            sizes = [shape.hf_tensors()[part][0] for part in parts]
            stored |= zip(parts, stored.pop(one).split(sizes), strict=True)
        tensors = {name: bits(name, w.reshape(len(w), -1)) for name, w in stored.items()}
        trainer = [[Shard(name, 0, w.shape[0], 0, w.shape[1]) for name, w in tensors.items()]]
        live = {name: np.zeros_like(w.reshape(-1, w.shape[-1] if w.ndim > 1 else 1)) for name, w in loaded.items()}
        execute(plan(trainer, [learned.pieces]), [tensors], [live])
        for name, values in loaded.items():
            np.testing.assert_array_equal(live[name].reshape(values.shape), values, err_msg=name)
    print(f"{len(models)} models equal")
