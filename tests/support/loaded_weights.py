"""Compares the parameters that vLLM's loader makes with what the learned layout makes from the same tensors."""

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from bench.family_folders import SIZES, drawn, write_folder
from bench.family_ranks import tensors_of
from support import gemma4, qwen3_5
from support.weight_layouts import execute
from titan_rl.actors.imports import import_vllm_model
from titan_rl.actors.vllm import vllm_cpu
from titan_rl.actors.vllm.vllm_args import KEPT_LAYOUT
from titan_rl.actors.vllm.vllm_params import planned_layout
from titan_rl.wire.model_families import BY_MODEL_TYPE, FAMILIES
from titan_rl.wire.model_shape import SpecShape, shape_of_folder
from titan_rl.wire.weight_plan import Shard, plan

DEEPSEEK_V3: dict[str, Any] = {
    **{"num_experts_per_tok": 2, "moe_intermediate_size": 32, "n_routed_experts": 4, "n_group": 1, "topk_group": 1},
    **{"num_attention_heads": 4, "num_key_value_heads": 4, "n_shared_experts": 1, "first_k_dense_replace": 1},
    **{"kv_lora_rank": 512, "q_lora_rank": 32, "qk_rope_head_dim": 64, "qk_nope_head_dim": 32, "v_head_dim": 32},
    **{"head_dim": 64, "topk_method": "noaux_tc", "scoring_func": "sigmoid"},
}
BUILT: dict[str, Callable[[int], dict[str, Any]]] = {  # keys for a number of ranks, by model_type, and perhaps a name
    "deepseek_v3": lambda ranks: DEEPSEEK_V3,
    "gemma4_text": lambda ranks: drawn("gemma4_text", ranks, ranks=ranks),
    "gemma4_text, small": lambda ranks: gemma4.drawn_small(ranks, ranks=ranks),
    "muse_glimmer": lambda ranks: drawn("muse_glimmer", ranks, ranks=ranks),
    "qwen3_5_text": lambda ranks: qwen3_5.drawn(ranks, ranks=ranks),
}


def models(ranks: int) -> list[str]:
    """Return every model that engines of `ranks` ranks have, those with experts first: vLLM makes their group once."""
    known = sorted(BY_MODEL_TYPE, key=lambda model_type: not FAMILIES[BY_MODEL_TYPE[model_type]].experts)
    wholes = [model_type for model_type in known if FAMILIES[BY_MODEL_TYPE[model_type]].clamped_experts and ranks > 1]
    return [name for name in (*known, *BUILT) if name not in wholes]


def write_models(folder: str, ranks: int | str) -> None:
    """Write a model of every family, with sizes that are drawn from the number of ranks. One key/value head over two
    ranks and an odd vocabulary test replication and padding."""
    for i, name in enumerate(models(int(ranks))):
        draw, model_type = random.Random(f"{ranks} {name}"), name.partition(",")[0]
        keys = BUILT[name](int(ranks)) if name in BUILT else drawn(model_type, int(ranks), ranks=int(ranks))
        if model_type in BY_MODEL_TYPE:
            keys |= {"vocab_size": draw.choice([100, 128, 131])}
            keys |= {"num_key_value_heads": 1} if draw.random() < 0.3 else {}
        write_folder(Path(folder, "models", f"{i:02} {name}"), model_type, SIZES | keys, seed=f"{ranks}")


def compare_with_vllm(folder: str, tp: int | str, rank: int | str) -> None:
    """Compare vLLM's loader with the learned layout, from the same files, bit for bit, and the learned layout with the
    planned one. Runs in a separate process. In bfloat16 on a GPU, as its engines run: the layout may depend on it."""
    import torch
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

    layout: Any = vllm_cpu.LATENT_ATTENTION if on_cpu else KEPT_LAYOUT

    named, integers = ("float32", torch.int32) if on_cpu else ("bfloat16", torch.int16)

    def bits(name: str, tensor: Any) -> np.ndarray:
        halved = shape.halves(named) and name.endswith(shape.halves(named))
        viewed = halves_of(tensor.detach().float(), dtype) if halved else tensor.detach().to(dtype)
        return viewed.view(integers).numpy()

    folders = sorted(Path(folder, "models").iterdir())
    for model_dir in folders:
        import_vllm_model(str(model_dir))
        shape = shape_of_folder(str(model_dir), "model")
        text: dict[str, Any] = {"language_model_only": True} if isinstance(shape, SpecShape) else {}
        config = EngineArgs(
            model=str(model_dir),
            dtype="float32" if on_cpu else "bfloat16",
            max_model_len=64,
            skip_tokenizer_init=True,
            enforce_eager=True,
            tensor_parallel_size=tp,
            distributed_executor_backend="external_launcher" if tp > 1 else None,
            **layout,
            **text,
        ).create_engine_config()
        config.load_config.device = "cpu"
        with set_current_vllm_config(config):
            if model_dir is folders[0]:
                init_distributed_environment(tp, rank, f"file://{folder}/rendezvous", rank, "gloo")
                initialize_model_parallel(tp)
            model = get_model(vllm_config=config)
        learned = learned_layout(config, shape)

        parameters = dict(model.named_parameters()) | dict(model.named_buffers())
        parameters = {name: parameters[name] for name in learned.shapes}
        assert with_memory(dict(model.named_parameters())).keys() <= learned.shapes.keys(), model_dir.name
        assert all(param.is_contiguous() for param in parameters.values())
        loaded = {name: bits(name, param) for name, param in parameters.items()}
        assert {name: w.shape for name, w in loaded.items()} == learned.shapes
        if not isinstance(shape, SpecShape):
            planned = planned_layout(shape, tp=tp, rank=rank, dtype=named)
            assert planned.shapes == learned.shapes
            assert sorted(map(repr, planned.pieces)) == sorted(map(repr, learned.pieces)), model_dir.name

        tensors = {name: bits(name, w.reshape(len(w), -1)) for name, w in tensors_of(model_dir, shape).items()}
        trainer = [[Shard(name, 0, w.shape[0], 0, w.shape[1]) for name, w in tensors.items()]]
        live = {name: np.zeros_like(w.reshape(-1, w.shape[-1] if w.ndim > 1 else 1)) for name, w in loaded.items()}
        execute(plan(trainer, [learned.pieces]), [tensors], [live])
        for name, values in loaded.items():
            np.testing.assert_array_equal(live[name].reshape(values.shape), values, err_msg=name)
    print(f"{len(folders)} models equal")
