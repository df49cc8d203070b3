"""Settings and patches that vLLM needs on a machine without a GPU."""

import os
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

from titan_rl.wire import failpoints

if TYPE_CHECKING:
    from torch import Generator, Tensor

ENV: dict[str, str] = {
    "TORCHDYNAMO_DISABLE": "1",  # otherwise the first log-prob waits 20 s for Inductor to compile one comparison
    # glibc would return a forward's memory to the kernel and take it back page by page: 10,000 of them in a generation
    # of grpo_llama, which is a tenth of its time and more on busy cores.
    "MALLOC_TRIM_THRESHOLD_": str(1 << 30),
    "MALLOC_MMAP_THRESHOLD_": str(32 << 20),  # the most that glibc accepts
}
"""Launch environment of a CPU generator, on top of launch_env.ENV."""

ENGINE_ARGS: dict[str, Any] = {
    # After a partial prefill vLLM rewinds the sample's random generator, which raises for a CPU generator. Without
    # chunks a prefill waits until it fits into one step.
    "enable_chunked_prefill": False,
}


def patch() -> None:
    """Apply all patches. Call this before the first model is built."""
    from titan_rl.kernels import cpu_matmul

    cpu_matmul.use_fastest()
    keep_linear_weights()
    reduce_over_gloo()
    draw_seeds_in_blocks()


def compute_exactly(model_dir: str, dtype: str) -> None:
    """Compute as the trainer does in exact mode, or raise if this machine cannot. Call this after `patch`."""
    import torch

    from titan_rl.actors.vllm.exact_ops import use_exact_ops
    from titan_rl.kernels.row_check import require_independent_rows
    from titan_rl.wire.model_shape import shape_of_folder

    use_exact_ops()
    require_independent_rows(shape_of_folder(model_dir, "model.hf_assets_path"), getattr(torch, dtype))


def use_given_threads() -> None:
    """Compute on as many threads as this process was launched with: OpenMP read the number of its zygote."""
    import torch

    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))


def check_head_size(size: int) -> None:
    """Raise unless vLLM's CPU attention supports this head size. vLLM itself checks at the first step only."""
    from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend

    sizes = CPUAttentionBackend.get_supported_head_sizes()
    if size not in sizes:
        raise ValueError(f"model.head_dim: expected one of {sizes} for vLLM's attention on CPU, found {size}")


def keep_linear_weights() -> None:
    """Make every linear layer read its parameter at every call.

    vLLM repacks linear weights for oneDNN or AMX and then drops or ignores the parameter, so that an in-place write has
    no effect (for lm_head silently).
    """
    from torch.nn.functional import linear
    from vllm.model_executor.layers import utils

    def dispatch(layer: Any, remove_weight: bool) -> None:
        layer.cpu_linear = linear
        if remove_weight and failpoints.hit("pack"):  # as vLLM does, not for embeddings
            packed = layer.weight.detach().clone()
            layer.cpu_linear = lambda x, weight, bias=None: linear(x, packed, bias)

    utils.dispatch_cpu_unquantized_gemm = dispatch


def reduce_over_gloo() -> None:
    """Make tensor-parallel ranks reduce over gloo instead of vLLM's shared memory.

    In shared memory ranks spin: forever on a dead peer, and for long on busy cores. All engines of a host use one name
    for it, and it is left behind in /dev/shm.
    """
    from vllm.distributed.device_communicators.cpu_communicator import CpuCommunicator

    CpuCommunicator._all_group_ranks_share_shm_group_name = lambda self: False


def draw_seeds_in_blocks(block: int = 16) -> None:
    """Make the sampler draw many numbers of a sample's generator at once.

    vLLM's kernel derives the noise of a token from a number that the sample's generator draws: one call of torch for
    each token of each sample. A generator draws the same numbers in blocks, and is used for nothing else.
    """
    import torch
    from vllm.v1.sample.ops import topk_topp_sampler as ops

    vllms = ops.TopKTopPSampler.forward_cpu
    drawn: WeakKeyDictionary[Generator, Iterator[int]] = WeakKeyDictionary()

    def draw(generator: "Generator") -> int:
        if (number := next(drawn.get(generator, iter(())), None)) is None:
            drawn[generator] = iter(torch.randint(0, 2**31, (block,), generator=generator).tolist())
            number = next(drawn[generator])
        return number

    def forward_cpu(self: Any, logits: "Tensor", generators: "dict[int, Generator]", k: Any, p: Any) -> Any:
        if self.use_fp64_gumbel or self.logprobs_mode != "processed_logprobs":
            return vllms(self, logits, generators, k, p)
        logits = ops.apply_top_k_top_p(logits, k, p).float()
        seeds = [0] * len(logits)  # of a greedy sample: vLLM takes its token from the logits
        for row, generator in generators.items():
            seeds[row] = draw(generator)
        logprobs = logits.log_softmax(dim=-1)
        return torch.ops._C.fused_gumbel_argmax(logits, torch.tensor(seeds)), logprobs

    ops.TopKTopPSampler.forward_cpu = forward_cpu
