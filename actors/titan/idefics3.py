"""The Llama of an Idefics 3 or SmolVLM from the config.json of its Hugging Face folder. The vision tower and the
projection to the text model stay as they are; without them (model.vision) prompts have text only."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import distributed as dist
from torchtitan.config import derive
from torchtitan.models.common import Embedding
from torchtitan.protocols.model_spec import ModelSpec

from titan_rl.actors.titan.spec import Adapter, build_spec, spec_of_blocks
from titan_rl.wire.hf_config import refused
from titan_rl.wire.model_shape import ModelShape


class Idefics3Adapter(Adapter):
    """Names of the text model in the folder."""

    def __init__(self, model_config: Any, hf_assets_path: str | None) -> None:
        super().__init__(model_config, hf_assets_path)
        self.from_hf_map = {
            hf.replace("model.", "model.text_model.", 1) if hf.startswith("model.") else hf: name
            for hf, name in self.from_hf_map.items()
        }


class ImageEmbedding(Embedding):
    """An embedding that returns given features in some places."""

    @dataclass(kw_only=True, slots=True)
    class Config(Embedding.Config):
        pass

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.features: tuple[torch.Tensor, torch.Tensor] | None = None
        """Places in the flattened tokens of the next forward, [F], and their features, [F, D]."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        embedded_BLD = super().forward(input)
        if self.features is None:
            return embedded_BLD
        (places_F, features_FD), self.features = self.features, None
        if self.tp_group is not None and dist.get_rank(self.tp_group) > 0:  # the ranks' outputs are added up
            features_FD = torch.zeros_like(features_FD)
        flat_TD = embedded_BLD.flatten(0, 1)
        return flat_TD.index_put((places_F,), features_FD.to(flat_TD.dtype)).view(embedded_BLD.shape)


def spec(config: Mapping[str, Any]) -> ModelSpec:
    """Return the spec of the text model that config.json describes. A ValueError names a key that it cannot compute."""
    text = {"model_type": "llama", **config["text_config"], "architectures": ["LlamaForCausalLM"]}
    if text["model_type"] != "llama":
        raise ValueError(refused("text_config", "model_type llama", text["model_type"]))
    tied = [keys.get("tie_word_embeddings", False) for keys in (config, text)]
    if tied[0] != tied[1]:
        raise ValueError(refused("tie_word_embeddings", "one value", tied))
    shape = ModelShape.from_hf(text)
    model: Any = build_spec(shape, seq_len=shape.max_seq_len).model
    model.tok_embeddings = derive(model.tok_embeddings, ImageEmbedding.Config)
    return spec_of_blocks("idefics3", model, Idefics3Adapter)
