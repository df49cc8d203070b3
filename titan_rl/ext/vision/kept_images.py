"""Keeps the images of a run in its folder, each under the SHA-256 of its file."""

import hashlib
import os
from collections.abc import Iterable
from pathlib import Path

from titan_rl.tasks.examples import RowImage


def keep(images: Iterable[RowImage], folder: Path) -> None:
    """Write the images that the folder lacks. A reader finds an image whole, or not at all."""
    folder.mkdir(parents=True, exist_ok=True)
    for image in images:
        path = folder / image.hash
        if path.exists():
            continue
        data = image.source
        if not isinstance(data, bytes):
            data = data.read_bytes()
        found = hashlib.sha256(data).hexdigest()
        if found != image.hash:
            raise ValueError(f"expected {image.source} as it was checked, found other bytes, of SHA-256 {found}")
        half = folder / f".{image.hash}.{os.getpid()}"
        half.write_bytes(data)
        half.replace(path)
