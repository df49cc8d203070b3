"""Gives an engine the pixels of a request's images. vLLM's own processor never sees an image or a text: the tokens are
the trainer's, and so are the pixels."""

from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import torch

from titan_rl.actors.titan.shard_reader import other_tensors
from titan_rl.ext.vision.pixels import ImageFiles, placeholders_of
from titan_rl.ext.vision.quiet import without_idefics3_default
from titan_rl.wire.types import Request, names_of


class EngineImages:
    """The images of one engine's requests, and the parts of the tower that no sync writes: the folder's."""

    args: Mapping[str, Any] = {
        "language_model_only": False,
        "skip_tokenizer_init": False,  # vLLM's processor, by which it finds the most tokens of an image, needs one
        "skip_mm_profiling": True,
        "mm_processor_cache_gb": 0,
    }
    """Arguments of the engine."""

    def __init__(self, settings: Any, *, on_cpu: bool) -> None:
        if settings.sleeps and not on_cpu:
            raise ValueError("expected an engine that keeps its weights, as no sync writes a tower, found sleeps")
        self._loading = ExitStack()  # ends in begin: vLLM reads the folder's config between the two
        self._loading.enter_context(without_idefics3_default())
        self._folder, self._text = settings.model_dir, settings.shape.folder_tensors()
        self.files, self._placeholders = ImageFiles(Path(settings.images), self._folder), placeholders_of(self._folder)

    def begin(self, llm: Any) -> set[str]:
        """Load the tower, and return the names of its parameters."""
        self._loading.close()
        self._dtype: torch.dtype = llm.vllm_config.model_config.dtype
        tower = other_tensors(Path(self._folder), self._text)

        def load(model: Any) -> set[str]:
            return set(model.load_weights(iter(tower.items())))

        (names,) = llm.apply_model(load)
        return names

    def prompt(self, request: Request, tokens: list[int], salt: str) -> dict[str, Any]:
        """Return vLLM's processed prompt of `tokens`: the request's and a begun sample's. An image without its
        placeholders raises ValueError."""
        from vllm.inputs.engine import mm_input
        from vllm.multimodal.inputs import MultiModalFieldConfig, MultiModalKwargsItems, PlaceholderRange

        if not request.images:
            return {"type": "token", "prompt_token_ids": tokens, "cache_salt": salt}
        names = names_of(request.images)
        pixels = self.files.pixels(names)
        places = self._placeholders.of_images(request.tokens, request.images, [each.tiles for each in pixels])
        ranges = list[PlaceholderRange]()
        for at in places:
            first, length = int(at[0]), int(at[-1] - at[0]) + 1
            reads = torch.zeros(length, dtype=torch.bool).index_fill_(0, torch.from_numpy(at - first), True)
            ranges.append(PlaceholderRange(first, length, None if len(at) == length else reads))
        tiles = torch.tensor([each.tiles for each in pixels])
        values = torch.from_numpy(np.concatenate([each.values for each in pixels]))
        mask = torch.from_numpy(np.concatenate([each.mask for each in pixels]))
        inputs: Any = {"pixel_values": values.to(self._dtype), "pixel_attention_mask": mask, "num_patches": tiles}
        by_tiles = MultiModalFieldConfig.flat_from_sizes("image", tiles)
        fields = {"pixel_values": by_tiles, "pixel_attention_mask": by_tiles}
        fields["num_patches"] = MultiModalFieldConfig.batched("image", keep_on_cpu=True)
        items: Any = MultiModalKwargsItems.from_hf_inputs(inputs, fields)
        kept = [f"{name}-{salt}" for name in names]  # vLLM keeps features of images by these, and a sync changes them
        return dict(mm_input(tokens, items, {"image": kept}, {"image": ranges}, cache_salt=salt))
