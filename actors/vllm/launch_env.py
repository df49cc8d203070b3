"""What a process must be launched with to hold a vLLM engine. Importing this imports nothing."""

ENV: dict[str, str] = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # the engine core runs here, where its parameters can be written
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_HOST_IP": "127.0.0.1",
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
    # Warnings about vLLM's use of torch, and about resources left over by a process that was killed, as most are.
    "PYTHONWARNINGS": "ignore::FutureWarning,ignore::UserWarning:multiprocessing.resource_tracker",
}
"""Launch environment of a generator. vLLM reads it when it is imported."""
