"""Adapters beside the weights of an engine, which requests compute with; none by default.

A controller creates this, and ranks get it with their settings: importing it imports neither torch nor vLLM.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from titan_rl.config.sections import LoraSection
from titan_rl.wire.model_shape import ModelShape
from titan_rl.wire.parts import needed_part
from titan_rl.wire.types import Request

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineAdapters:
    """Adds nothing. Two extensions override this: adapters written by weight syncs (titan_rl/ext/adapters), and
    adapters in folders that requests name (titan_rl/ext/tinker)."""

    slots: int = 1  # policies, each with its own weights; a request names its slot

    def engine_args(self, args: Mapping[str, Any], *, on_cpu: bool) -> dict[str, Any]:
        """Return further arguments of vLLM's EngineArgs, besides `args`."""
        return {}

    def request(self, request: Request) -> Any:
        """Return vLLM's LoRARequest for the adapter that a request uses."""
        return None

    def begin(self, llm: Any) -> None:
        """Put the adapters into a new engine, or into one whose memory was freed."""

    def check(self, llm: Any) -> None:
        """Raise unless requests compute with the tensors that weight syncs write."""

    def tensors(self, model: Any, slot: int) -> "dict[str, Tensor]":
        """Return a slot's live tensors by the names of the weight plan (vllm_params.py)."""
        return {}


def engine_adapters(lora: LoraSection | None, shape: ModelShape, policies: int, opponents: int = 0) -> EngineAdapters:
    """Return slots for the adapters of all policies, and for this number of `opponents`. Without `lora` vLLM applies
    none."""
    if lora is None:
        return EngineAdapters(slots=policies)
    return needed_part("adapters of engines", "lora.rank")(lora, shape, slots=policies, opponents=opponents)
