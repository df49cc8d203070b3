"""What vLLM needs on a machine without a GPU, and nothing else does."""

import os
from typing import Any

ENV: dict[str, str] = {
    "TORCHDYNAMO_DISABLE": "1",  # else the first log-prob waits 20 s for Inductor to compile one comparison
    "TORCH_CPP_LOG_LEVEL": "ERROR",  # no NUMA notes
}
"""Launch environment of a CPU generator, on top of engine.ENV."""

ENGINE_ARGS: dict[str, Any] = {
    # After a partial prefill vLLM rewinds the sample's random generator, which raises for a CPU generator. Prefills
    # then wait until they fit into a step as a whole.
    "enable_chunked_prefill": False,
}


def patch() -> None:
    """Call before the first model is built."""
    keep_linear_weights()
    name_shared_memory()


def check_head_size(size: int) -> None:
    """vLLM itself finds out at the first step."""
    from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend

    sizes = CPUAttentionBackend.get_supported_head_sizes()
    if size not in sizes:
        raise ValueError(f"model.head_dim: expected one of {sizes} for vLLM's attention on CPU, found {size}")


def keep_linear_weights() -> None:
    """vLLM repacks every linear layer's weight for oneDNN or AMX and then drops or ignores the parameter, so that an
    in-place write reaches nothing (lm_head: silently). A plain linear reads the parameter at every call.
    """
    from torch.nn.functional import linear
    from vllm.model_executor.layers import utils

    def dispatch(layer: Any, remove_weight: bool) -> None:
        layer.cpu_linear = linear

    utils.dispatch_cpu_unquantized_gemm = dispatch


def name_shared_memory() -> None:
    """Tensor-parallel ranks reduce in shared memory that vLLM names after the launcher's address, which is "env://" for
    every engine of the host. The rendezvous port tells engines apart.
    """
    from vllm.distributed.device_communicators.cpu_communicator import _CPUSHMDistributed

    vllm_name = _CPUSHMDistributed.make_group_name

    def name(communicator: Any) -> str:
        return f"{vllm_name(communicator)}-{os.environ.get('MASTER_PORT')}"

    _CPUSHMDistributed.make_group_name = staticmethod(name)
