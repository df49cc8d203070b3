"""vLLM's CUDA build on CPU tensors: its scheduler, worker, model runner V2, samplers and loaders run without a GPU.

real      LLMEngine, Scheduler, Worker, GPUModelRunner (V2), its states, block tables, sampler and outputs, the
          metadata of FlashAttention, the loaders, CuMemAllocator. Triton's kernels run in Triton's interpreter
replaced  Worker.init_device; the C++ kernels: FlashAttention and its cache by their definition, norms, rotary
          embedding, activation, top-k and top-p by vLLM's own torch code; CUDA's streams, events, figures of
          memory, pinned memory; the driver's part of CuMemAllocator, by a fill with garbage;
          NCCL, by gloo
not run   the experts' forward, CUDA graphs, torch.compile

Run with the Python of a `cuda` install: `-m support.cuda_on_cpu MODULE FUNCTION ARGUMENTS` calls a function there.
"""

import ctypes
import importlib
import os
import sys
import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

MEMORY = 80 << 30
GARBAGE = 0x7B  # every byte of unmapped memory: a float32 of 1e36


class Nothing:
    """A stream or an event. A CPU's work is done when the call returns."""

    def __init__(self, *_: Any, **__: Any) -> None:
        self.device = "cpu"

    def __getattr__(self, name: str) -> Any:
        return lambda *_, **__: None


def run_on_cpu() -> None:
    """Let vLLM's CUDA build compute with CPU tensors. Call it before vLLM is imported."""
    os.environ["TRITON_INTERPRET"] = "1"
    import torch
    from triton.backends.nvidia.driver import CudaDriver

    CudaDriver.is_active = staticmethod(lambda: True)
    _replace_nvml()
    h100 = types.SimpleNamespace(multi_processor_count=132, major=9, minor=0, total_memory=MEMORY, name="NVIDIA H100")
    memory = (MEMORY, MEMORY)
    cuda: dict[str, Any] = dict.fromkeys(("set_stream", "synchronize", "empty_cache", "set_device"))
    cuda |= {"current_stream": Nothing(), "default_stream": Nothing(), "stream": nullcontext(), "is_available": True}
    cuda |= {"current_device": 0, "mem_get_info": memory, "get_device_properties": h100}
    accelerator: dict[str, Any] = dict.fromkeys(("synchronize", "empty_cache", "set_device_index"))
    accelerator |= {"get_memory_info": memory, "current_device_index": 0}
    for module, values in ((torch.cuda, cuda), (torch.accelerator, accelerator)):
        for name, value in values.items():
            setattr(module, name, lambda *_, value=value, **__: value)
    torch.cuda.Stream, torch.cuda.Event = type("Stream", (Nothing,), {}), type("Event", (Nothing,), {})

    from vllm.config.kernel import IrOpPriorityConfig
    from vllm.platforms import current_platform

    platform: Any = type(current_platform)
    platform.dispatch_key = "CPU"  # where vLLM registers the operations that it writes in Python
    communicator = "vllm.distributed.device_communicators.base_device_communicator.DeviceCommunicatorBase"
    platform.get_device_communicator_cls = classmethod(lambda cls: communicator)  # torch's, in NCCL's place
    platform.is_pin_memory_available = classmethod(lambda cls: False)
    platform.get_current_memory_usage = classmethod(lambda cls, device=None: 0.0)
    platform.get_default_ir_op_priority = classmethod(lambda cls, config: IrOpPriorityConfig.with_default(["native"]))

    from vllm.model_executor.custom_op import CustomOp

    op: Any = CustomOp
    op.dispatch_forward = lambda self, compile_native: self.forward_native
    from vllm.v1.sample.ops import topk_topp_sampler

    top: Any = topk_topp_sampler
    top.apply_top_k_top_p_triton = top.apply_top_k_top_p_pytorch  # its kernel asks an int for `.to`
    _replace_worker()
    _replace_attention()
    _replace_driver()


def _replace_nvml() -> None:
    """Answer for 8 H100s."""
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


def _replace_worker() -> None:
    import torch
    from vllm.utils.torch_utils import set_random_seed
    from vllm.v1.worker import gpu_worker
    from vllm.v1.worker.gpu import buffer_utils

    def init_device(self: Any) -> None:
        self.device = torch.device("cpu", 0)  # the index marks what a GPU would hold
        self.load_config.device = "cpu:0"
        gpu_worker.init_worker_distributed_environment(
            self.vllm_config, self.rank, self.distributed_init_method, self.local_rank, "gloo"
        )
        set_random_seed(self.model_config.seed)
        self.init_snapshot = types.SimpleNamespace(free_memory=MEMORY, total_memory=MEMORY)
        self._init_workspace_and_model_runner()

    class UvaBuffer:
        """Memory that the CPU and the GPU share."""

        def __init__(self, size: Any, dtype: Any) -> None:
            self.cpu = torch.zeros(size, dtype=dtype)
            self.np = self.cpu.numpy()

        def uva(self, n: int | None = None) -> Any:
            return self.cpu[:n] if n is not None else self.cpu

    worker: Any = gpu_worker.Worker
    worker.init_device = init_device
    worker._scoped_allocator_max_split = lambda self, max_split_size_mb: nullcontext()
    buffers: Any = buffer_utils
    buffers.is_uva_available, buffers.UvaBuffer = lambda: True, UvaBuffer


def _replace_attention() -> None:
    """Compute FlashAttention by its definition, in float32 too, so that results can be compared closely."""
    import torch
    from vllm.v1.attention.backends import flash_attn

    def attend(*, q: Any, k: Any, v: Any, out: Any, block_table: Any, **other: Any) -> Any:
        assert (other["causal"], other["window_size"], other["softcap"]) in ((True, [-1, -1], 0), (True, None, 0)), (
            other
        )
        starts, lengths = other["cu_seqlens_q"].tolist(), other["seqused_k"].tolist()
        for row, (begin, end, length) in enumerate(zip(starts, starts[1:], lengths, strict=False)):
            keys, values = (cache[block_table[row].long()].flatten(0, 1)[:length] for cache in (k, v))
            seen = torch.ones(end - begin, length, dtype=torch.bool).tril(length - (end - begin))
            heads = (x.transpose(0, 1).float()[None] for x in (q[begin:end], keys, values))
            attended = torch.nn.functional.scaled_dot_product_attention(
                *heads, attn_mask=seen, scale=other["softmax_scale"], enable_gqa=True
            )
            out[begin:end] = attended[0].transpose(0, 1)
        return out

    def store(key: Any, value: Any, key_cache: Any, value_cache: Any, slot_mapping: Any, *_: Any) -> None:
        tokens = (slot_mapping >= 0).nonzero()[:, 0]
        slots, block = slot_mapping[tokens], key_cache.shape[1]
        for new, cache in ((key, key_cache), (value, value_cache)):
            cache[slots // block, slots % block] = new[tokens]

    module: Any = flash_attn
    module.flash_attn_varlen_func, module.reshape_and_cache_flash = attend, store
    module.get_scheduler_metadata = lambda **_: None
    module.FlashAttentionBackend.supported_dtypes.append(torch.float32)


def _replace_driver() -> None:
    """Give CuMemAllocator the tensors that a GPU would hold. Memory that it unmaps is filled with garbage."""
    import torch
    from torch.utils._python_dispatch import TorchDispatchMode
    from torch.utils._pytree import tree_leaves
    from vllm.device_allocator import cumem

    owned: dict[int, Any] = {}  # storages by address, kept alive: their addresses may not be used again

    class Pool(TorchDispatchMode):
        """Reports allocations on cpu:0, and results that are computed from them."""

        def __init__(self, report: Callable[[Any], None]) -> None:
            super().__init__()
            self._report = report

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            kwargs = kwargs or {}
            result = func(*args, **kwargs)
            inputs = [x for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)]
            computed = any(x.untyped_storage().data_ptr() in owned for x in inputs)
            if computed or getattr(kwargs.get("device"), "index", None) == 0:
                for tensor in tree_leaves(result):
                    if isinstance(tensor, torch.Tensor) and tensor.is_cpu and tensor.numel():
                        storage = tensor.untyped_storage()
                        if owned.setdefault(storage.data_ptr(), storage) is storage:
                            self._report((0, storage.nbytes(), storage.data_ptr(), 0))
            return result

    @contextmanager
    def pool(malloc: Callable[[Any], None], free: Any) -> Iterator[tuple[Any, None]]:
        with Pool(malloc):
            yield types.SimpleNamespace(snapshot=list), None

    module: Any = cumem
    module.use_memory_pool_with_allocator = pool
    module.create_and_map = lambda handle: None
    module.unmap_and_release = lambda handle: ctypes.memset(handle[2], GARBAGE, handle[1])
    module.libcudart = types.SimpleNamespace(cudaMemcpy=ctypes.memmove)


if __name__ == "__main__":
    from titan_rl.actors.vllm.launch_env import ENV

    os.environ |= {**ENV, "HF_HUB_OFFLINE": "1"}
    run_on_cpu()
    module_name, function, *arguments = sys.argv[1:]
    getattr(importlib.import_module(module_name), function)(*arguments)
    sys.stdout.flush()
    os._exit(0)
