"""Compares the planned live parameters with the parameters that vLLM's loader makes from the same tensors."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from support.weight_layouts import TINY, execute, hf_sizes
from titan_rl.actors.imports import import_vllm_model
from titan_rl.actors.vllm import vllm_cpu
from titan_rl.actors.vllm.vllm_args import KEPT_LAYOUT
from titan_rl.actors.vllm.vllm_params import param_shapes, pieces
from titan_rl.wire.model_shape import ModelShape
from titan_rl.wire.weight_plan import Shard, plan


def write_models(folder: Path) -> None:
    """Write models of every family. One key/value head over two ranks and a vocabulary of 100 test replication and
    padding."""
    from safetensors.numpy import save_file

    rng = np.random.default_rng(0)
    for family in ("llama3", "qwen2", "qwen3", "qwen3_moe", "mistral"):
        routed: dict[str, Any] = {"experts": 5, "experts_per_token": 2} if family == "qwen3_moe" else {}
        for tied in (False,) if routed else (False, True):
            shape = replace(TINY, family=family, tied=tied, dim=128 if family == "qwen2" else TINY.dim, **routed)
            model = folder / "models" / f"{family}-{'tied' if tied else 'untied'}"
            model.mkdir(parents=True)
            (model / "config.json").write_text(json.dumps(shape.hf_config(bos=1, eos=2, pad=0)))
            tensors = {name: rng.random(size, np.float32) for name, size in hf_sizes(shape).items()}
            vectors = {name: w[:, 0] if w.shape[1] == 1 else w for name, w in tensors.items()}
            save_file(vectors, model / "model.safetensors", metadata={"format": "pt"})


def compare_with_vllm(folder: str, tp: int | str, rank: int | str) -> None:
    """Compare vLLM's loader with the plan, from the same files, bit for bit. Runs in a separate process. In
    bfloat16 on a GPU, as its engines run: the layout may depend on it."""
    import torch
    from safetensors.torch import load_file
    from vllm import EngineArgs
    from vllm.config import set_current_vllm_config
    from vllm.distributed import init_distributed_environment, initialize_model_parallel
    from vllm.model_executor.model_loader import get_model
    from vllm.platforms import current_platform

    on_cpu = current_platform.is_cpu()
    if on_cpu:
        torch.accelerator.empty_cache = lambda: None  # as vLLM's CPU worker does
        vllm_cpu.keep_linear_weights()
        vllm_cpu.keep_expert_weights()

    tp, rank = int(tp), int(rank)
    dtype = torch.float32 if on_cpu else torch.bfloat16

    layout: Any = {} if on_cpu else KEPT_LAYOUT

    def bits(tensor: Any) -> np.ndarray:
        return tensor.detach().to(dtype).view(torch.int32 if on_cpu else torch.int16).numpy()

    # First the model with experts: vLLM makes their group of ranks only where it knows of any.
    models = sorted(Path(folder, "models").iterdir(), key=lambda path: "moe" not in path.name)
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
        shape = ModelShape.from_hf(json.loads((model_dir / "config.json").read_text()))
        parameters = dict(model.named_parameters())
        assert all(param.is_contiguous() and param.dtype == dtype for param in parameters.values())
        loaded = {name: bits(param) for name, param in parameters.items()}
        assert {name: w.shape for name, w in loaded.items()} == param_shapes(shape, tp)

        stored = load_file(model_dir / "model.safetensors")
        tensors = {name: bits(w.reshape(len(w), -1)) for name, w in stored.items()}
        trainer = [[Shard(name, 0, w.shape[0], 0, w.shape[1]) for name, w in tensors.items()]]
        live = {name: np.zeros_like(w.reshape(-1, w.shape[-1] if w.ndim > 1 else 1)) for name, w in loaded.items()}
        execute(plan(trainer, [pieces(shape, tp=tp, rank=rank)]), [tensors], [live])
        for name, values in loaded.items():
            np.testing.assert_array_equal(live[name].reshape(values.shape), values, err_msg=name)
    print(f"{len(models)} models equal")
