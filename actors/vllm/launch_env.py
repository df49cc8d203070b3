"""The launch environment of a process that holds a vLLM engine. Importing this imports nothing."""

ENV: dict[str, str] = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # the engine core runs here, where its parameters can be written
    "VLLM_LOGGING_LEVEL": "ERROR",
    "FLASHINFER_LOGGING_LEVEL": "ERROR",
    "TQDM_DISABLE": "1",  # bars of CUDA graphs, between a run's own lines
    "VLLM_HOST_IP": "127.0.0.1",
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
    # Warnings about vLLM's use of torch, and about resources left over by a process that was killed, as most are.
    "PYTHONWARNINGS": "ignore::FutureWarning,ignore::UserWarning:multiprocessing.resource_tracker",
}
"""Launch environment of a generator. vLLM reads it when it is imported."""

BATCH_INVARIANT: dict[str, str] = {"VLLM_BATCH_INVARIANT": "1"}
"""Makes a GPU engine sample the same tokens in any batch, on top of ENV. vLLM 0.32 then chooses kernels and reductions
that do not depend on the size of a batch, configures cuBLAS and NCCL, and refuses other attention backends. It needs a
GPU of capability 8.0 or above; before 9.0 matrix products become Triton kernels."""
