"""Chooses the trained parameters of a model: all, or added ones beside its own frozen weights."""

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from torch import Tensor, nn
from torchtitan.components.checkpoint import ModelWrapper
from torchtitan.protocols.model_spec import ModelSpec

from titan_rl.actors.sync.held_shards import local_tensors
from titan_rl.config.sections import Config
from titan_rl.wire.model_shape import ModelShape
from titan_rl.wire.parts import needed_part


class Adaptation:
    """Trains the whole model, and adds nothing to it. Adapters override this (titan_rl/ext/adapters/ranks/lora.py).

    Names are TorchTitan's; `params` are a rank's parameters by Hugging Face's names.
    """

    freezes = False
    """Whether the model's own weights stay as they are, so that they are its reference."""

    def convert(self, spec: ModelSpec, shape: ModelShape) -> None:
        """Add parameters to the spec of a model."""

    def freeze(self, model: nn.Module) -> None:
        """Freeze the own weights of a model that is not sharded yet."""

    def begin(self, model: nn.Module, seed: int) -> None:
        """Draw the added parameters. They change no output until they are trained."""

    def adds(self, name: str) -> bool:
        """Return True if a parameter was added to the model."""
        return False

    def syncs(self, name: str) -> bool:
        """Return True if a weight sync moves a parameter."""
        return True

    def hf_name(self, name: str, of_weight: Callable[[str], str]) -> str:
        """Return Hugging Face's name of a parameter. `of_weight` does so for the model's own."""
        return of_weight(name)

    def state(self, model: nn.Module) -> ModelWrapper:
        """Return the trained parameters as the model of a checkpoint."""
        return ModelWrapper([model])

    def packed(self, params: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """Return this rank's tensors as a weight sync packs them. In a dict they are all in memory; otherwise each is
        computed when it is read."""
        return local_tensors(params)

    def merged(self, state: Mapping[str, Any], params: Mapping[str, Tensor]) -> Iterable[tuple[str, Any]]:
        """Yield the tensors of a state by Hugging Face's names, with adapters added."""
        return state.items()

    def write(self, folder: Path, params: Mapping[str, Tensor], shape: ModelShape, base: str) -> None:
        """Write the added parameters into the folder of an export. `base`: the folder of the frozen weights."""

    def read(self, model: nn.Module, names: Mapping[str, str], folder: str | Path) -> None:
        """Load the added parameters of an exported folder; without one, make them change no output. `names`: Hugging
        Face's, by TorchTitan's."""


def adaptation_of(config: Config) -> Adaptation:
    """Return the adaptation that config.lora asks for."""
    return needed_part("adapters of trainers", "lora.rank")(config.lora) if config.lora.on else Adaptation()
