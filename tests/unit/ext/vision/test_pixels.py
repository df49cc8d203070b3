"""Pixels are transformers' own, kept within a bound, and placeholders are found where a prompt has images."""

import hashlib
from pathlib import Path
from random import Random

import numpy as np
import pytest
from PIL import Image
from transformers import AutoImageProcessor

from support.images import draw_image
from titan_rl.ext.vision.pixels import ImageFiles, KeptItems, Placeholders, pixels_of
from titan_rl.ext.vision.tiny_folder import write_processor
from titan_rl.wire.types import ImagePlace


@pytest.mark.parametrize("seed", range(4))
def test_pixels_are_the_processors(seed: int, tmp_path: Path) -> None:
    """Of images of any size, in one tile or cut into several."""
    random = Random(seed)
    write_processor(tmp_path, 28, 4)
    processor = AutoImageProcessor.from_pretrained(tmp_path)
    processor.size["longest_edge"] = 56
    processor.do_image_splitting = seed % 2 == 1
    processor.save_pretrained(tmp_path)
    name = draw_image(tmp_path, seed, sides=(random.randint(8, 90), random.randint(8, 90)))
    (pixels,) = ImageFiles(tmp_path, str(tmp_path)).pixels([name])
    expected = processor(Image.open(tmp_path / name), return_tensors="np")
    np.testing.assert_array_equal(pixels.values, expected["pixel_values"][0])
    np.testing.assert_array_equal(pixels.mask, expected["pixel_attention_mask"][0])
    rows, columns = pixels.grid
    assert pixels.tiles == rows * columns + 1
    assert (rows > 0) == processor.do_image_splitting
    again = pixels_of(tmp_path / name, str(tmp_path))
    assert again.sha256 == pixels.sha256
    changed = pixels.values.copy()
    changed[0, 0, 0, 0] += 1e-6
    assert pixels._replace(values=changed).sha256 != pixels.sha256


def test_a_file_that_is_not_the_image_is_refused(tmp_path: Path) -> None:
    write_processor(tmp_path, 28, 4)
    files, name = ImageFiles(tmp_path, str(tmp_path)), draw_image(tmp_path, 0)
    (tmp_path / ("0" * 64)).write_bytes((tmp_path / name).read_bytes())
    with pytest.raises(ValueError, match=f"expected the bytes with the SHA-256 in its name at .*, found {name}"):
        files.pixels(["0" * 64])
    with pytest.raises(ValueError, match=r"expected an image at .*, found No such file"):
        files.pixels(["1" * 64])
    text = hashlib.sha256(b"no image").hexdigest()
    (tmp_path / text).write_bytes(b"no image")
    with pytest.raises(ValueError, match=r"expected an image at .*, found "):
        files.pixels([text])


def test_a_process_keeps_what_it_used_last() -> None:
    made, kept = list[str](), KeptItems[np.ndarray](most_bytes=3 * 8)

    def make(hashes: list[str]) -> list[np.ndarray]:
        made.extend(hashes)
        return [np.array([float(hash)]) for hash in hashes]

    assert [float(x[0]) for x in kept.take(["1", "2", "1", "3"], make)] == [1, 2, 1, 3]
    kept.take(["4", "1"], make)
    assert made == ["1", "2", "3", "4"]
    kept.take(["2"], make)
    assert made == ["1", "2", "3", "4", "2"]
    assert kept.nbytes == 3 * 8
    assert len(kept.take([*"123456"], make)) == 6


@pytest.mark.parametrize("seed", range(20))
def test_placeholders_of_images_are_found_among_sampled_ones(seed: int) -> None:
    random, placeholders = Random(seed), Placeholders(token=9, run=4)
    tokens, places, tiles, images = [1], list[list[int]](), list[int](), list[ImagePlace]()
    for _ in range(random.randrange(4)):
        images.append(ImagePlace("a" * 64, len(tokens)))
        tiles.append(random.choice([1, 1, 3]))
        places.append([])
        for _ in range(tiles[-1]):
            tokens += [7, 8]
            places[-1] += range(len(tokens), len(tokens) + 4)
            tokens += [9] * 4
        tokens += [7, *random.choices([2, 3, 9], k=random.randrange(3)), *[9] * random.randrange(6)]
    found = placeholders.of_images([*tokens, 3], images, tiles)
    assert [each.tolist() for each in found] == places
    for wrong in ([*images, ImagePlace("b" * 64, len(tokens))], [*images, *images[-1:]] if images else []):
        if wrong:
            with pytest.raises(ValueError, match="expected 1 runs of 4 placeholders from token"):
                placeholders.of_images(tokens, wrong, [*tiles, 1])
