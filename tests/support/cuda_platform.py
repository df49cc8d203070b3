"""vLLM's CUDA build on a machine without a GPU: NVML answers for 8 H100s, and vLLM believes it.

Run with the Python of a `cuda` install: prints a JSON line for each folder named on the command line.
"""

import json
import os
import sys
import types
from dataclasses import asdict
from pathlib import Path
from typing import Any

from titan_rl.actors.vllm.engine import EngineSettings
from titan_rl.actors.vllm.launch_env import ENV
from titan_rl.actors.vllm.vllm_args import engine_args
from titan_rl.config.sections import Config
from titan_rl.config.toml import find, load

MEMORY = 80 << 30


def pretend() -> None:
    from vllm.utils.import_utils import import_pynvml

    nvml: Any = import_pynvml()
    nvml.nvmlInit = nvml.nvmlShutdown = lambda *_: None
    nvml.nvmlDeviceGetCount = lambda: 8
    nvml.nvmlDeviceGetHandleByIndex = lambda index: index
    nvml.nvmlDeviceGetHandleByUUID = lambda uuid: 0
    nvml.nvmlDeviceGetCudaComputeCapability = lambda handle: (9, 0)
    nvml.nvmlDeviceGetName = lambda handle: "NVIDIA H100 80GB HBM3"
    nvml.nvmlDeviceGetUUID = lambda handle: f"GPU-{handle}"
    nvml.nvmlDeviceGetMemoryInfo = lambda handle: types.SimpleNamespace(total=MEMORY, free=MEMORY, used=0)
    nvml.nvmlDeviceGetP2PStatus = lambda *_: nvml.NVML_P2P_STATUS_OK
    nvml.nvmlSystemGetDriverVersion = lambda: "580.95"
    nvml.nvmlSystemGetCudaDriverVersion = lambda: 13000


def facts_of(config: Config, folder: str) -> dict[str, Any]:
    """Return what vLLM decides for a config's engine, and the parameters of its model."""
    import torch
    from vllm import EngineArgs
    from vllm.config import set_current_vllm_config
    from vllm.distributed import parallel_state
    from vllm.model_executor.model_loader.utils import initialize_model
    from vllm.v1.attention.selector import get_attn_backend

    from titan_rl.actors.vllm.vllm_params import verify_complete
    from titan_rl.wire.model_shape import shape_of_folder

    g = config.generator
    own: Any = {**asdict(g), "max_model_len": config.training.seq_len}
    settings = EngineSettings(**own, model_dir=folder, sleeps=config.placement.kind == "colocated")
    decided = EngineArgs(**engine_args(settings), enable_sleep_mode=settings.sleeps).create_engine_config()
    with set_current_vllm_config(decided):
        if not parallel_state.model_parallel_is_initialized():
            parallel_state.init_distributed_environment(1, 0, f"file://{folder}/group", 0, "gloo")
            parallel_state.ensure_model_parallel_initialized(1, 1)
        torch.set_default_dtype(getattr(torch, g.dtype))
        with torch.device("meta"):
            model = initialize_model(decided)
        attention = get_attn_backend(decided.model_config.get_head_size(), getattr(torch, g.dtype), "auto").get_name()
    shapes = {name: tuple(p.shape) for name, p in model.named_parameters()}
    verify_complete(shapes, shape_of_folder(folder, "folder"), 1)
    return {
        "v2": bool(decided.use_v2_model_runner),
        "attention": attention,
        "graphs": str(decided.compilation_config.cudagraph_mode),
        "batch": decided.scheduler_config.max_num_batched_tokens,
        "contiguous": all(p.is_contiguous() for p in model.parameters()),
        "parameters": sum(p.numel() for p in model.parameters()),
    }


if __name__ == "__main__":
    os.environ |= {**ENV, "HF_HUB_OFFLINE": "1", "VLLM_LOGGING_LEVEL": "ERROR"}
    pretend()
    for name, model_folder in zip(sys.argv[1::2], sys.argv[2::2], strict=True):
        assert Path(model_folder, "config.json").exists()
        print(json.dumps(facts_of(load(find(name)), model_folder)))
