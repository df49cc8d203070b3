"""Settings and patches that vLLM needs on a machine without a GPU."""

from functools import wraps
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from titan_rl.wire import failpoints
from titan_rl.wire.hf_config import SWIGLU_ALPHA, SWIGLU_LIMIT

if TYPE_CHECKING:
    from torch import Tensor

ENV: dict[str, str] = {
    "TORCHDYNAMO_DISABLE": "1",  # otherwise the first log-prob waits 20 s for Inductor to compile one comparison
}
"""Launch environment of a CPU generator, on top of launch_env.ENV."""

LATENT_ATTENTION: dict[str, Any] = {"attention_backend": "CPU_MLA"}
"""Given AMX, vLLM would choose a backend that takes bfloat16 only and packs weights when they are loaded, so that a
sync would not reach them. Models without latent attention ignore this setting."""


def engine_args() -> dict[str, Any]:
    """Return the arguments of vLLM's EngineArgs that a CPU needs."""
    # Without chunks a prefill waits until it fits into one step.
    return LATENT_ATTENTION | ({"enable_chunked_prefill": False} if draws_for_parts() else {})


def draws_for_parts() -> bool:
    """Return whether a prefill of a part of a context draws from the sample's random generator.

    vLLM throws the drawn token away and rewinds the generator, which raises for a CPU generator. A vLLM with
    docs/upstream/vllm-cpu-seeds leaves the generator out.
    """
    import vllm.v1.worker.cpu_worker  # before any other module of the worker, as it demands  # noqa: F401
    from vllm.v1.worker.gpu_input_batch import InputBatch

    skip_draws = getattr(InputBatch, "skip_draws", None)
    if skip_draws is None:
        return True
    batch = SimpleNamespace(generators={0: "whole", 1: "part"}, sampling_metadata=SimpleNamespace(generators=None))
    skip_draws(batch, [False, True])
    return batch.sampling_metadata.generators != {0: "whole"}


def patch() -> None:
    """Apply all patches. Call this before the first model is built."""
    from titan_rl.kernels import cpu_matmul

    cpu_matmul.use_fastest()
    keep_linear_weights()
    keep_expert_weights()
    rotate_all_heads()
    reduce_over_gloo()
    keep_async_scheduling()
    run_delta_layers()


def keep_linear_weights() -> None:
    """Make every linear layer read its parameter.

    vLLM repacks linear weights for oneDNN or AMX and then drops or ignores the parameter, so that an in-place write has
    no effect (for lm_head silently). docs/upstream/vllm-cpu-weight-updates tells why this stays after its merge.
    """
    from torch.nn.functional import linear
    from vllm.model_executor.layers import utils

    def dispatch(layer: Any, remove_weight: bool) -> None:
        layer.cpu_linear = linear
        if remove_weight and failpoints.hit("pack"):  # as vLLM does, not for embeddings
            packed = layer.weight.detach().clone()
            layer.cpu_linear = lambda x, weight, bias=None: linear(x, packed, bias)

    utils.dispatch_cpu_unquantized_gemm = dispatch


def keep_expert_weights() -> None:
    """Make experts read their parameters at every call, which vLLM otherwise packs into tensors of the same shape and
    dtype: an in-place write would succeed and spoil them. Each expert computes the tokens that chose it.
    """
    import torch
    from torch.nn.functional import linear, silu
    from vllm.model_executor.layers.fused_moe.activation import MoEActivation
    from vllm.model_executor.layers.fused_moe.experts.cpu_moe import CPUUnquantizedExperts

    def silu_and_mul(both: "Tensor") -> "Tensor":
        gate, up = both.chunk(2, dim=-1)
        return silu(gate) * up

    def clamped_swiglu(both: "Tensor") -> "Tensor":
        gate, up = both[..., ::2].clamp(max=SWIGLU_LIMIT), both[..., 1::2].clamp(-SWIGLU_LIMIT, SWIGLU_LIMIT)
        return (up + 1) * (gate * (gate * SWIGLU_ALPHA).sigmoid())

    def apply(
        self: Any,
        output: "Tensor",
        hidden_states: "Tensor",
        w1: "Tensor",
        w2: "Tensor",
        topk_weights: "Tensor",
        topk_ids: "Tensor",
        activation: Any,
        **_: Any,
    ) -> None:
        if activation not in (MoEActivation.SILU, MoEActivation.SWIGLUOAI):
            raise ValueError(f"expected experts with silu or swigluoai, found {activation}")
        clamped = activation == MoEActivation.SWIGLUOAI
        summed = torch.zeros_like(output, dtype=torch.float32)
        for expert in topk_ids.unique().tolist():
            token, nth = (topk_ids == expert).nonzero(as_tuple=True)
            b1, b2 = (bias if bias is None else bias[expert] for bias in (self.w1_bias, self.w2_bias))
            both = linear(hidden_states[token], w1[expert], b1)
            out = linear(clamped_swiglu(both) if clamped else silu_and_mul(both), w2[expert], b2)
            summed.index_add_(0, token, out.float() * topk_weights[token, nth, None].float())
        output.copy_(summed)

    patched: Any = CPUUnquantizedExperts
    patched.apply = apply
    patched.process_weights_after_loading = lambda self, layer: None
    patched._supports_grouped_gemm = classmethod(lambda cls, moe_config: (True, None))  # linear has no alignment


def rotate_all_heads() -> None:
    """Rotate every head of a query that has a dimension for its heads, as in multi-head latent attention. The CPU's
    kernel counts heads by the last dimension (docs/upstream/vllm-cpu-rotary-heads)."""
    from vllm.model_executor.layers.rotary_embedding.base import RotaryEmbedding

    rope: Any = RotaryEmbedding
    rotate = rope.forward_cpu
    if hasattr(rotate, "__wrapped__"):  # an earlier engine of this process has done it
        return

    @wraps(rotate)
    def flattened(
        self: Any, positions: "Tensor", query: "Tensor", key: "Tensor | None" = None
    ) -> "tuple[Tensor, Tensor | None]":
        tokens = positions.numel()
        flat_key = None if key is None else key.reshape(tokens, -1)
        query_out, key_out = rotate(self, positions, query.reshape(tokens, -1), flat_key)
        return query_out.view(query.shape), None if key is None else key_out.view(key.shape)

    rope.forward_cpu = flattened


def reduce_over_gloo() -> None:
    """Make tensor-parallel ranks reduce over gloo instead of vLLM's shared memory.

    In shared memory ranks spin: forever on a dead peer, and for long on busy cores. A killed rank leaves it behind in
    /dev/shm (docs/upstream/issues/vllm-cpu-shm-timeout.md). All engines of a host use one name for it, which
    docs/upstream/vllm-cpu-shm-names repairs.
    """
    from vllm.distributed.device_communicators.cpu_communicator import CpuCommunicator

    CpuCommunicator._all_group_ranks_share_shm_group_name = lambda self: False


def keep_async_scheduling() -> None:
    """Schedule as an engine's arguments ask. vLLM turns asynchronous scheduling off on a CPU, where it gains nothing.
    Tests turn it on, to run what GPUs run."""
    from vllm.platforms.cpu import CpuPlatform

    platform: Any = CpuPlatform
    update = platform.check_and_update_config
    if hasattr(update, "__wrapped__"):  # an earlier engine of this process has done it
        return

    @wraps(update)
    def update_the_rest(cls: Any, vllm_config: Any) -> None:
        asked = vllm_config.scheduler_config.async_scheduling
        update(vllm_config)
        vllm_config.scheduler_config.async_scheduling = asked

    platform.check_and_update_config = classmethod(update_the_rest)


def run_delta_layers() -> None:
    """Compute Gated DeltaNet in torch, in the dtype of the model. vLLM's kernels for a CPU take bfloat16 only, and a
    packed weight of the convolution, which an in-place write would spoil."""
    from vllm.model_executor.layers.mamba.ops.cpu import gdn_attention

    from titan_rl.actors.vllm import delta_layers

    module: Any = gdn_attention
    module.cpu_gdn_attention_core = delta_layers.run
