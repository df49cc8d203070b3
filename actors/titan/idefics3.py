"""The Llama of an Idefics 3 or SmolVLM from the config.json of its Hugging Face folder, and the parts of its vision
tower that are trained (model.vision). The others stay as they are; without them prompts have text only."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import distributed as dist
from torchtitan.config import derive
from torchtitan.models.common import Embedding
from torchtitan.protocols.model_spec import ModelSpec

from titan_rl.actors.titan import siglip
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


class SeeingAdapter(Idefics3Adapter):
    """Names of the text model and of the trained parts of the tower."""

    def __init__(self, model_config: Any, hf_assets_path: str | None) -> None:
        super().__init__(model_config, hf_assets_path)
        for hf, name in siglip.NAMES.items():
            for end in (".weight", ".bias"):
                self.from_hf_map[hf + end] = name + end


class SeenImages(NamedTuple):
    """The images of the next forward, as the frozen part of the tower leaves them."""

    places_F: torch.Tensor  # in the flattened tokens
    features_F: torch.Tensor  # which feature each place reads
    values: torch.Tensor  # each tile's features, squares of encoded patches, or patches
    mask_NP: torch.Tensor  # patches with a pixel


class ImageEmbedding(Embedding):
    """An embedding that returns features of images in some places."""

    @dataclass(kw_only=True, slots=True)
    class Config(Embedding.Config):
        reader: siglip.Reader.Config | None = None

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.reader = config.reader and config.reader.build()
        self.images: SeenImages | None = None

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        embedded_BLD = super().forward(input)
        if self.images is None:
            return embedded_BLD
        images, self.images = self.images, None
        tiles_NFD = self.reader(images.values, images.mask_NP) if self.reader else images.values
        features_FD = tiles_NFD.flatten(0, 1)[images.features_F]
        if self.tp_group is not None and dist.get_rank(self.tp_group) > 0:
            # The ranks' outputs are added up, and each gets the whole gradient, as each has the whole reader.
            features_FD = features_FD - features_FD.detach()
        flat_TD = embedded_BLD.flatten(0, 1)
        return flat_TD.index_put((images.places_F,), features_FD.to(flat_TD.dtype)).view(embedded_BLD.shape)


def spec(config: Mapping[str, Any]) -> ModelSpec:
    """Return the spec of the text model that config.json describes. A ValueError names a key that it cannot compute."""
    return _spec(config, None)


def with_projection(config: Mapping[str, Any]) -> ModelSpec:
    """Return the spec of the text model and of the projection to it."""
    return _spec(config, siglip.reader(config, encoder=False))


def with_tower(config: Mapping[str, Any]) -> ModelSpec:
    """Return the spec of the text model, the projection and the tower's encoder."""
    return _spec(config, siglip.reader(config, encoder=True))


def _spec(config: Mapping[str, Any], reader: siglip.Reader.Config | None) -> ModelSpec:
    text = {"model_type": "llama", **config["text_config"], "architectures": ["LlamaForCausalLM"]}
    if text["model_type"] != "llama":
        raise ValueError(refused("text_config", "model_type llama", text["model_type"]))
    tied = [keys.get("tie_word_embeddings", False) for keys in (config, text)]
    if tied[0] != tied[1]:
        raise ValueError(refused("tie_word_embeddings", "one value", tied))
    shape = ModelShape.from_hf(text)
    model: Any = build_spec(shape, seq_len=shape.max_seq_len).model
    model.tok_embeddings = derive(model.tok_embeddings, ImageEmbedding.Config, reader=reader)
    return spec_of_blocks("idefics3", model, SeeingAdapter if reader else Idefics3Adapter)
