"""A trainer's vision tower: transformers' own modules with the folder's weights, which stay as they are.

images of a microbatch's rows -> pixels -> tower, projection -> features -> in the places of placeholders
"""

from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from titan_rl.actors.titan.shard_reader import other_tensors
from titan_rl.ext.vision.pixels import ImageFiles, KeptItems, placeholders_of
from titan_rl.wire.types import ImagePlace, names_of

TILES = 32  # computed at once


class Tower:
    """Features of images, kept by their hashes: a frozen tower computes each once."""

    def __init__(
        self, folder: str, directory: Path, text: Collection[str], *, device: torch.device, dtype: torch.dtype
    ) -> None:
        """`text`: names of the text model's tensors in the folder. `directory`: of the files of images."""
        self.files, self._placeholders = ImageFiles(directory, folder), placeholders_of(folder)
        self.model, self._device = frozen_tower(folder, text).to(device, dtype), device
        self._kept = KeptItems[Tensor]()

    def features(self, tokens_BL: np.ndarray, images: Sequence[Sequence[ImagePlace]]) -> tuple[Tensor, Tensor] | None:
        """Return the places in the flattened rows that read features, [F], and the features, [F, D]; None if there are
        none. `images`: each row's; empty: no row has any. An image without its placeholders raises ValueError."""
        places, features = list[np.ndarray](), list[Tensor]()
        for row, (tokens, seen) in enumerate(zip(tokens_BL, images, strict=False)):
            found = self._kept.take(names_of(seen), self._computed)
            tiles = [len(each) // self._placeholders.run for each in found]
            begin = row * len(tokens)
            for at in self._placeholders.of_images(tokens, seen, tiles):
                places.append(begin + at)
            features += found
        if not places:
            return None
        places_F = torch.from_numpy(np.concatenate(places))
        return places_F.to(self._device), torch.cat(features)

    @torch.no_grad()
    def _computed(self, hashes: Sequence[str]) -> list[Tensor]:
        pixels = self.files.pixels(hashes)
        values = torch.from_numpy(np.concatenate([each.values for each in pixels]))
        mask = torch.from_numpy(np.concatenate([each.mask for each in pixels])).bool()
        found = list[Tensor]()
        for begin in range(0, len(values), TILES):
            some = slice(begin, begin + TILES)
            answer = self.model.get_image_features(
                values[some][None].to(self._device),
                mask[some][None].to(self._device),
            )
            found.append(answer.pooler_output)
        tiles_NRD = torch.cat(found)
        expected = len(values), self._placeholders.run
        if tiles_NRD.shape[:2] != expected:
            raise RuntimeError(
                f"expected {expected} tiles and features, found {[*tiles_NRD.shape[:2]]}: "
                "the tower drops tiles of zeros"
            )
        counts = [each.tiles for each in pixels]
        return [part.flatten(0, 1).clone() for part in tiles_NRD.split(counts)]


def frozen_tower(folder: str, text: Collection[str]) -> Any:
    """Return transformers' model of the folder without its text model."""
    from transformers import AutoConfig, AutoModel

    config = AutoConfig.from_pretrained(folder, local_files_only=True)
    config.text_config.num_hidden_layers, config.text_config.vocab_size, config.text_config.pad_token_id = 0, 1, None
    model: Any = AutoModel.from_config(config, dtype=torch.float32)
    del model.text_model
    tensors = other_tensors(Path(folder), text)
    model.load_state_dict({name.removeprefix("model."): tensor for name, tensor in tensors.items()})
    return model.eval().requires_grad_(False)
