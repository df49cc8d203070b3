"""Arguments of a vLLM engine, sampling parameters of one sample, and the reasons to refuse a request."""

from dataclasses import asdict
from typing import Any

from titan_rl.config.sections import GeneratorSection
from titan_rl.wire.model_families import SPECS
from titan_rl.wire.model_shape import SpecShape
from titan_rl.wire.seeds import derive
from titan_rl.wire.types import Request, Sampling

VLLM_NAMES = {"model_dir": "model", "tensor_parallel_degree": "tensor_parallel_size"}
"""Keys of EngineSettings that vLLM calls something else. All other keys are passed on under their own name."""
NOT_VLLMS = {
    "images",
    "adapters",
    "drafts",
    "replicas",
    "kv_cache_memory_mb",
    "sleeps",
    "head_dtype",
    "records",
    "quantization",
    "shape",
}

KEPT_LAYOUT = {"moe_backend": "triton"}
"""Arguments of an engine on a GPU that leave live parameters in the order of the weight plan. Other kernels of vLLM for
experts reorder w13 after loading, in the same shape."""


def quantization_args(settings: GeneratorSection, *, on_cpu: bool) -> dict[str, Any]:
    """Return the arguments for weights in 8 bits. "int8" needs none: its weights are rounded and stay in `dtype`.

    A scale of each weight's row and of each token. The backend is named because others reorder the weights, or round
    no activations. Both of these read a transposed weight in place; torch's also computes on a CPU."""
    if settings.quantization != "fp8":
        return {}
    return {"quantization": "fp8_per_channel", "linear_backend": "torch" if on_cpu else "cutlass"}


def engine_args(settings: Any) -> dict[str, Any]:
    """Return the arguments of vLLM's EngineArgs for an EngineSettings."""
    values = asdict(settings)
    keys = {VLLM_NAMES.get(key, key): value for key, value in values.items() if key not in NOT_VLLMS}
    # A sync writes whole numbers, also where the folder has experts in 4 bits. vLLM's loader takes no None.
    whole = {"quantization_config": None} if values["load_format"] == "dummy" else {}
    text: dict[str, Any] = {"language_model_only": True} if isinstance(settings.shape, SpecShape) else {}
    built = SPECS.get(settings.shape.family) if text else None
    overrides = whole | dict(built.engine_keys if built else {})
    overrides |= dict(built.text_only if built and whole else {})  # a loaded folder has the tower
    recurrent = settings.shape is not None and settings.shape.recurrent_heads
    return {
        **keys,
        **({"mamba_ssm_cache_dtype": "float32"} if recurrent else {}),
        "kv_cache_memory_bytes": settings.kv_cache_memory_mb << 20 or None,
        "max_num_batched_tokens": settings.max_num_batched_tokens or None,  # None: vLLM's default
        # The processes exist already: each rank builds its own engine, and finds its peers by RANK and MASTER_ADDR.
        "distributed_executor_backend": "external_launcher" if settings.tensor_parallel_degree > 1 else None,
        "skip_tokenizer_init": True,
        "use_tqdm_on_load": False,
        "logprobs_mode": "processed_logprobs",  # at the sampling temperature; vLLM's default is at 1
        "generation_config": "vllm",
        **text,
        "hf_overrides": {"head_dtype": values["head_dtype"], **overrides},
        "disable_log_stats": True,
    }


def memory_share(settings: GeneratorSection, free: int, total: int) -> float:
    """Return gpu_memory_utilization for a GPU with `free` of `total` bytes. vLLM refuses to start if this share is not
    free. With a given size of the KV cache it uses the share for nothing else, so half of the free memory is enough:
    NCCL takes a part of it before vLLM looks."""
    if not settings.kv_cache_memory_mb:
        return settings.gpu_memory_utilization
    return min(settings.gpu_memory_utilization, max(1, 500 * free // total) / 1000)


def stream_seed(seed: int, begun: int) -> int:
    """Return the seed for the rest of a sample that has `begun` tokens.

    A resumed sample draws from a new random stream. With the first stream from its start, each new token would depend
    on the noise that chose an earlier one.
    """
    return derive(seed, "go on", begun) % 2**31 if begun else seed


def sampling_params(sampling: Sampling, seed: int, *, begun: int, **changed: Any) -> Any:
    """Return vLLM's parameters for the rest of a sample that has `begun` tokens, some of them `changed`.

    Only the request's own stop tokens stop it: `ignore_eos` switches off stop tokens from the model's folder.
    """
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    truncation = {"top_p": sampling.top_p, "top_k": sampling.top_k, "min_p": sampling.min_p}
    return SamplingParams(
        max_tokens=sampling.max_new_tokens - begun,
        temperature=sampling.temperature,
        seed=stream_seed(seed, begun),
        stop_token_ids=list(sampling.stop_token_ids),
        ignore_eos=True,
        logprobs=0,  # the sampled token's only
        prompt_logprobs=1 if sampling.scores_context and not begun else None,
        flat_logprobs=True,
        detokenize=False,
        output_kind=RequestOutputKind.DELTA,
        skip_clone=True,
        **(truncation | changed),
    )


def problem_of(request: Request, vocab_size: int, max_model_len: int) -> str | None:
    """Return why vLLM could not sample a request exactly as specified."""
    sampling, length = request.sampling, len(request.tokens)
    if not request.tokens or not request.seeds:
        return f"expected tokens and seeds, found {length} and {len(request.seeds)}"
    if not 0 <= min(request.tokens) <= max(request.tokens) < vocab_size:
        return f"expected token ids below {vocab_size}, found {min(request.tokens)} to {max(request.tokens)}"
    if min(request.seeds) < 0:  # vLLM reads -1 as "unseeded"
        return f"expected seeds of at least 0, found {min(request.seeds)}"
    if not (sampling.temperature == 0 or 0.01 <= sampling.temperature <= 2):  # vLLM would sample at 0.01
        return f"expected rollout.temperature 0 or in [0.01, 2], found {sampling.temperature}"
    if outside := [stop for stop in sampling.stop_token_ids if not 0 <= stop < vocab_size]:
        return f"expected stop token ids below {vocab_size}, found {outside[0]}"
    if length + sampling.max_new_tokens > max_model_len:
        return (
            f"{length} tokens and {sampling.max_new_tokens} new ones exceed {max_model_len}; "
            "lower rollout.max_new_tokens or raise generator.max_model_len"
        )
    if request.begun and len(request.begun) != len(request.seeds):
        return f"expected a begun sample for each of {len(request.seeds)} seeds, found {len(request.begun)}"
    longest = max((len(sample.tokens) for sample in request.begun if sample.finish == "abort"), default=0)
    if longest >= sampling.max_new_tokens:
        return f"expected unfinished samples below {sampling.max_new_tokens} tokens, found one of {longest}"
    return None
