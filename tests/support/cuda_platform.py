"""What vLLM's CUDA build decides for the engines of presets. Runs by cuda_on_cpu.py: nothing is computed."""

import json
from dataclasses import asdict, replace
from typing import Any

from titan_rl.actors.vllm.engine import Engine, EngineSettings
from titan_rl.config.auto import on_device
from titan_rl.config.sections import Config
from titan_rl.config.toml import find, load


class Built(Exception):
    """Ends the construction of an engine where vLLM would build its own."""


def print_facts(*presets_and_folders: str) -> None:
    """Print a JSON line for each preset and its model's folder."""
    for name, folder in zip(presets_and_folders[::2], presets_and_folders[1::2], strict=True):
        print(json.dumps(facts_of(on_device(load(find(name)), "cuda"), folder)))


def arguments_of(settings: EngineSettings) -> Any:
    """Return the EngineArgs that an Engine gives to vLLM."""
    from vllm import LLMEngine

    def build(arguments: Any) -> None:
        raise Built(arguments)

    engine: Any = LLMEngine
    engine.from_engine_args = build
    try:
        Engine(settings)
    except Built as built:
        return built.args[0]
    raise AssertionError("Engine built no LLMEngine")


def facts_of(config: Config, folder: str) -> dict[str, Any]:
    """Return what vLLM decides for one rank of a config's engine, and the parameters of its model."""
    import torch
    from vllm.config import set_current_vllm_config
    from vllm.distributed import parallel_state
    from vllm.model_executor.model_loader.utils import initialize_model
    from vllm.v1.attention.selector import get_attn_backend

    from titan_rl.actors.vllm.learned_plan import learned_layout
    from titan_rl.actors.vllm.vllm_params import param_shapes, pieces, verify_complete
    from titan_rl.wire.model_shape import shape_of_folder

    g = replace(config.generator, tensor_parallel_degree=1)
    own: Any = {**asdict(g), "max_model_len": g.max_model_len or config.training.seq_len}
    settings = EngineSettings(**own, model_dir=folder, sleeps=config.placement.kind == "colocated")
    arguments = arguments_of(settings)
    decided = arguments.create_engine_config()
    with set_current_vllm_config(decided):
        if not parallel_state.model_parallel_is_initialized():
            parallel_state.init_distributed_environment(1, 0, f"file://{folder}/group", 0, "gloo")
            parallel_state.ensure_model_parallel_initialized(1, 1)
        torch.set_default_dtype(getattr(torch, g.dtype))
        with torch.device("meta"):
            model = initialize_model(decided)
        attention = get_attn_backend(decided.model_config.get_head_size(), getattr(torch, g.dtype), "auto").get_name()
    shapes = {name: tuple(p.shape) for name, p in model.named_parameters()}
    shape = shape_of_folder(folder, "folder")
    verify_complete(shapes, param_shapes(shape, 1))
    learned = learned_layout(decided, shape)
    assert sorted(map(repr, learned.pieces)) == sorted(map(repr, pieces(shape, tp=1, rank=0)))
    verify_complete(shapes, learned.shapes)
    return {
        "v2": bool(decided.use_v2_model_runner),
        "attention": attention,
        "graphs": str(decided.compilation_config.cudagraph_mode.name),
        "batch": decided.scheduler_config.max_num_batched_tokens,
        "moe": decided.kernel_config.moe_backend,
        "sleep": (decided.model_config.enable_sleep_mode, decided.model_config.sleep_mode_backend),
        "memory": decided.cache_config.gpu_memory_utilization,
        "async": bool(decided.scheduler_config.async_scheduling),
        "logprobs": decided.model_config.logprobs_mode,
        "contiguous": all(p.is_contiguous() for p in model.parameters()),
        "dtypes": sorted({str(p.dtype) for p in model.parameters()}),
        "parameters": sum(p.numel() for p in model.parameters()),
    }
