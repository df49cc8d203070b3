"""Adapters in folders of PEFT's layout, which requests name. vLLM reads them when they are used first, and keeps those
that were used last.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from titan_rl.actors.vllm.engine_adapters import EngineAdapters
from titan_rl.config.sections import LoraSection
from titan_rl.ext.adapters.layers import PEFT_WEIGHTS, adapted, slot_rank
from titan_rl.ext.adapters.ranks.cpu_adapters import apply_adapters
from titan_rl.ext.tinker.served import MAX_TOGETHER
from titan_rl.wire.model_shape import ModelShape
from titan_rl.wire.types import Request

MAX_READ = 32
"""Adapters that stay in host memory. Requests for others read again."""


@dataclass(frozen=True, slots=True)
class FolderAdapters(EngineAdapters):
    """Adapters of at most lora.rank."""

    lora: LoraSection
    shape: ModelShape
    _numbers: dict[tuple[str, int, int], int] = field(default_factory=dict, compare=False)  # vLLM's, by folder and file

    def engine_args(self, args: Mapping[str, Any], *, on_cpu: bool) -> dict[str, Any]:
        if on_cpu:
            apply_adapters()
        rank = slot_rank(self.lora.rank)
        sizes = {"max_loras": MAX_TOGETHER, "max_cpu_loras": MAX_READ, "max_lora_rank": rank}
        return {"enable_lora": True, "lora_target_modules": adapted(self.shape, self.lora), **sizes}

    def request(self, request: Request) -> Any:
        """Return what makes a request use the adapter in its folder, or None if it names none. vLLM keeps it under a
        number: other weights in the same folder get another one."""
        from vllm.lora.request import LoRARequest

        folder = request.adapter
        if not folder:
            return None
        try:
            file = Path(folder, PEFT_WEIGHTS).stat()
        except OSError as error:  # vLLM would fail in a step, and with it all requests
            raise ValueError(f"expected an adapter in {folder}, found none") from error
        number = self._numbers.setdefault((folder, file.st_ino, file.st_mtime_ns), len(self._numbers) + 1)
        return LoRARequest(str(number), number, folder)
