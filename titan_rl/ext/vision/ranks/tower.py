"""The parts of a trainer's vision tower that stay as they are: transformers' own modules with the folder's weights.

images of a microbatch's rows -> pixels -> frozen parts -> the model's embedding, which computes the trained parts
"""

from collections.abc import Collection, Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from titan_rl.actors.titan.shard_reader import other_tensors
from titan_rl.ext.vision.pixels import ImageFiles, KeptItems, placeholders_of
from titan_rl.ext.vision.quiet import without_idefics3_default
from titan_rl.wire.types import ImagePlace, names_of

TILES = 32  # computed at once


class Tiles(NamedTuple):
    """An image after the frozen parts."""

    values: Tensor  # [tiles, F, V]: features, squares of encoded patches, or patches
    mask: Tensor  # [tiles, P]: patches with a pixel

    @property
    def nbytes(self) -> int:
        return self.values.nbytes + self.mask.nbytes


class Tower:
    """What frozen parts make of images, computed once and kept by the images' hashes."""

    def __init__(
        self,
        folder: str,
        directory: Path,
        trained: Collection[str],
        vision: str,
        *,
        device: torch.device,
        dtype: torch.dtype,
    ) -> None:
        """`trained`: names of the trained tensors in the folder. `directory`: of the files of images. `vision`:
        model.vision."""
        self.files, self._placeholders = ImageFiles(directory, folder), placeholders_of(folder)
        self.model, self._device = frozen_parts(folder, trained, vision).to(device, dtype), device
        self._patches_only, self._kept = vision == "all", KeptItems[Tiles]()
        vision_config = self.model.config.vision_config
        self._patch, side = vision_config.patch_size, vision_config.image_size
        blank = self._of_tiles(torch.ones(1, 3, side, side), torch.ones(1, side, side).bool())
        self._none = Tiles(blank.values[:0], blank.mask[:0])

    def seen(self, tokens_BL: np.ndarray, images: Sequence[Sequence[ImagePlace]]) -> tuple[Tensor, ...]:
        """Return the places in the flattened rows that read features, [F], which feature each reads, [F], and the tiles
        of all images. `images`: each row's; empty: no row has any. An image without its placeholders raises ValueError.
        """
        names = [*dict.fromkeys(name for row in images for name in names_of(row))]
        tiles = self._kept.take(names, self._computed)
        counts = [len(each.values) for each in tiles]
        run = self._placeholders.run
        by_name = dict(zip(names, zip(counts, accumulate(counts, initial=0), strict=False), strict=True))
        places, features = [np.empty(0, np.int64)], [np.empty(0, np.int64)]
        for row, (tokens, own) in enumerate(zip(tokens_BL, images, strict=False)):
            found = [by_name[name] for name in names_of(own)]
            all_at = self._placeholders.of_images(tokens, own, [count for count, _ in found])
            for at, (_, first) in zip(all_at, found, strict=True):
                places.append(row * len(tokens) + at)
                features.append(first * run + np.arange(len(at)))
        indices = (torch.from_numpy(np.concatenate(each)).to(self._device) for each in (places, features))
        values = torch.cat([self._none.values, *(each.values for each in tiles)])
        return (*indices, values, torch.cat([self._none.mask, *(each.mask for each in tiles)]))

    def _computed(self, hashes: Sequence[str]) -> list[Tiles]:
        pixels = self.files.pixels(hashes)
        values = torch.from_numpy(np.concatenate([each.values for each in pixels]))
        mask = torch.from_numpy(np.concatenate([each.mask for each in pixels])).bool()
        parts = [
            self._of_tiles(values[begin : begin + TILES], mask[begin : begin + TILES])
            for begin in range(0, len(values), TILES)
        ]
        counts = [each.tiles for each in pixels]
        values, mask = (torch.cat(part).split(counts) for part in zip(*parts, strict=True))
        return [Tiles(*(part.clone() for part in each)) for each in zip(values, mask, strict=True)]

    @torch.no_grad()
    def _of_tiles(self, values: Tensor, mask: Tensor) -> Tiles:
        values, mask, p = values.to(self._device), mask.to(self._device), self._patch
        patches = mask.unfold(1, p, p).unfold(2, p, p).any(-1).any(-1)
        if self._patches_only:
            found = self.model.vision_model.embeddings(values.to(self.model.dtype), patches)
        else:
            found = self.model.get_image_features(values[None], mask[None]).pooler_output
        mask = patches.flatten(1)
        expected = len(values), mask.shape[1] if self._patches_only else self._placeholders.run
        if found.shape[:2] != expected:
            raise RuntimeError(
                f"expected {expected} tiles and features, found {[*found.shape[:2]]}: the tower drops tiles of zeros"
            )
        return Tiles(found, mask)


def frozen_parts(folder: str, trained: Collection[str], vision: str) -> Any:
    """Return transformers' model of the folder without its trained parts."""
    from transformers import AutoConfig, AutoModel

    with without_idefics3_default():
        config = AutoConfig.from_pretrained(folder, local_files_only=True)
    config.text_config.num_hidden_layers, config.text_config.vocab_size, config.text_config.pad_token_id = 0, 1, None
    model: Any = AutoModel.from_config(config, dtype=torch.float32)
    del model.text_model
    if vision != "frozen":
        model.connector.modality_projection = torch.nn.Identity()
    if vision == "all":
        del model.vision_model.encoder, model.vision_model.post_layernorm
    tensors = other_tensors(Path(folder), trained)
    model.load_state_dict({name.removeprefix("model."): tensor for name, tensor in tensors.items()})
    return model.eval().requires_grad_(False)
