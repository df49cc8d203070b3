"""What vLLM needs on a machine without a GPU, and nothing else does."""

from typing import Any

ENV: dict[str, str] = {
    "TORCHDYNAMO_DISABLE": "1",  # else the first log-prob waits 20 s for Inductor to compile one comparison
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
    reduce_over_gloo()


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


def reduce_over_gloo() -> None:
    """Tensor-parallel ranks would reduce in shared memory, spinning: on a peer that died for ever, on busy cores for
    long; under one name for all engines of the host; and they leave it behind in /dev/shm. Gloo has none of this.
    """
    from vllm.distributed.device_communicators.cpu_communicator import CpuCommunicator

    CpuCommunicator._all_group_ranks_share_shm_group_name = lambda self: False
