"""Adapters in folders of PEFT's layout, which requests name. vLLM reads them when they are used first, and keeps those
that were used last.
"""

from pathlib import Path
from typing import Any

from titan_rl.ext.adapters.layers import PEFT_WEIGHTS, slot_rank
from titan_rl.ext.tinker.served import MAX_TOGETHER

MAX_READ = 32
"""Adapters that stay in host memory. Requests for others read again."""


def engine_args(rank: int, layers: tuple[str, ...]) -> dict[str, Any]:
    """Return the arguments of vLLM's EngineArgs for adapters of at most this rank on these layers of every block."""
    sizes = {"max_loras": MAX_TOGETHER, "max_cpu_loras": MAX_READ, "max_lora_rank": slot_rank(rank)}
    return {"enable_lora": True, "lora_target_modules": [*layers], **sizes}


def request(folder: str, numbers: dict[tuple[str, int, int], int]) -> Any:
    """Return what makes a request use the adapter in a folder. vLLM keeps it under a number: other weights in the same
    folder get another one."""
    from vllm.lora.request import LoRARequest

    try:
        file = Path(folder, PEFT_WEIGHTS).stat()
    except OSError as error:  # vLLM would fail in a step, and with it all requests
        raise ValueError(f"expected an adapter in {folder}, found none") from error
    number = numbers.setdefault((folder, file.st_ino, file.st_mtime_ns), len(numbers) + 1)
    return LoRARequest(str(number), number, folder)
