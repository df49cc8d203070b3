"""The pixels of an image, processed by transformers, the same for trainers and engines.

    file, known by the SHA-256 of its bytes -> pixels_of -> Pixels -> tower

A folder's processor cuts a large image into tiles. Each tile has a run of placeholder tokens in the prompt.
"""

import hashlib
import json
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any, Generic, NamedTuple, TypeVar

import numpy as np

from titan_rl.ext.vision.quiet import without_idefics3_default
from titan_rl.wire.types import ImagePlace

Kept = TypeVar("Kept")
MOST_BYTES = 1 << 30  # kept by a process


class Pixels(NamedTuple):
    values: np.ndarray  # [tiles, 3, side, side] float32
    mask: np.ndarray  # [tiles, side, side] int64: 1 where the tile has a pixel
    grid: tuple[int, int]  # rows and columns of tiles, besides one of the whole image; zeros: that is the only one

    @property
    def tiles(self) -> int:
        return len(self.values)

    @property
    def nbytes(self) -> int:
        return self.values.nbytes + self.mask.nbytes

    @property
    def sha256(self) -> str:
        """Return a hash of what the tower reads."""
        sizes = json.dumps([self.values.shape, str(self.values.dtype), str(self.mask.dtype)])
        return hashlib.sha256(sizes.encode() + self.values.tobytes() + self.mask.tobytes()).hexdigest()


@cache
def image_processor(folder: str) -> Any:
    """Return the image processor of a Hugging Face folder. The one by PIL is the same in every installation."""
    from transformers import AutoImageProcessor

    with without_idefics3_default():
        return AutoImageProcessor.from_pretrained(folder, backend="pil", local_files_only=True)


def pixels_of(path: Path, folder: str) -> Pixels:
    """Read the image at a path as the model of `folder` sees it. Raise ValueError if it cannot be read."""
    from transformers.image_utils import load_image

    try:
        image = load_image(str(path))
    except (OSError, ValueError, SyntaxError) as error:
        raise ValueError(f"expected an image at {path}, found {error}") from error
    found = image_processor(folder)([[image]], return_tensors="np", return_row_col_info=True)
    grid = int(found["rows"][0][0]), int(found["cols"][0][0])
    values, mask = found["pixel_values"][0], found["pixel_attention_mask"][0]
    return Pixels(np.ascontiguousarray(values, np.float32), np.ascontiguousarray(mask, np.int64), grid)


class KeptItems(Generic[Kept]):
    """Keeps the items used last, up to a number of bytes, by the hashes of their images."""

    def __init__(self, most_bytes: int = MOST_BYTES) -> None:
        self._items: OrderedDict[str, Kept] = OrderedDict()
        self._most, self.nbytes = most_bytes, 0

    def take(self, hashes: Sequence[str], make: Callable[[list[str]], Sequence[Kept]]) -> list[Kept]:
        """Return the items of these hashes. `make` returns the missing ones."""
        missing = [hash for hash in dict.fromkeys(hashes) if hash not in self._items]
        for hash, item in zip(missing, make(missing) if missing else (), strict=True):
            self._items[hash] = item
            self.nbytes += _nbytes(item)
        found = [self._items[hash] for hash in hashes]
        for hash in hashes:
            self._items.move_to_end(hash)
        while self.nbytes > self._most and self._items:
            self.nbytes -= _nbytes(self._items.popitem(last=False)[1])
        return found


def _nbytes(item: Any) -> int:
    return item.nbytes


class ImageFiles:
    """The images of a run: DIRECTORY/HASH has the bytes with that SHA-256."""

    def __init__(self, directory: Path, folder: str) -> None:
        self._directory, self._folder = directory, folder
        self._kept = KeptItems[Pixels]()

    def pixels(self, hashes: Sequence[str]) -> list[Pixels]:
        return self._kept.take(hashes, lambda missing: [self._read(hash) for hash in missing])

    def sums(self, hashes: Sequence[str]) -> list[str]:
        """Return hashes of the pixels, which prove that trainers and engines see the same."""
        return [pixels.sha256 for pixels in self.pixels(hashes)]

    def _read(self, hash: str) -> Pixels:
        path = self._directory / hash
        try:
            found = hashlib.sha256(path.read_bytes()).hexdigest()
        except OSError as error:
            raise ValueError(f"expected an image at {path}, found {error.strerror}") from error
        if found != hash:
            raise ValueError(f"expected the bytes with the SHA-256 in its name at {path}, found {found}")
        return pixels_of(path, self._folder)


class Placeholders(NamedTuple):
    """The tokens of a tile in a prompt: `run` times `token`, one for each feature."""

    token: int
    run: int

    @classmethod
    def of(cls, config: Mapping[str, Any]) -> "Placeholders":
        """Read a config.json."""
        scale = config.get("scale_factor", 2)
        return cls(config["image_token_id"], cls.patches_of(config) // scale**2)

    @staticmethod
    def patches_of(config: Mapping[str, Any]) -> int:
        """Return the number of patches of a tile."""
        vision = config["vision_config"]
        return (vision["image_size"] // vision["patch_size"]) ** 2

    def of_images(
        self, tokens: Sequence[int] | np.ndarray, images: Sequence[ImagePlace], tiles: Sequence[int]
    ) -> list[np.ndarray]:
        """Return the places of each image's placeholders: the next ones from where it begins. Any other placeholder was
        sampled. `tiles`: how many each image has."""
        placeholders = np.flatnonzero(np.asarray(tokens) == self.token)
        places, end = list[np.ndarray](), 0
        for (name, begin), count in zip(images, tiles, strict=True):
            first = np.searchsorted(placeholders, begin)
            own = placeholders[first : first + count * self.run]
            runs = own.reshape(-1, self.run) if len(own) == count * self.run else None
            if runs is None or begin < end or (np.diff(runs) != 1).any():
                expected = f"{count} runs of {self.run} placeholders from token {begin} on for the image {name}"
                raise ValueError(f"expected {expected}, found {len(own)} of {len(placeholders)} placeholders there")
            places.append(own)
            end = int(own[-1]) + 1
        return places


def placeholders_of(folder: str) -> Placeholders:
    return Placeholders.of(json.loads((Path(folder) / "config.json").read_text()))
