"""Keeps the images of a run in its folder, each under the SHA-256 of its file."""

import hashlib
import secrets
from collections.abc import Iterable
from pathlib import Path

from titan_rl.tasks.examples import RowImage


def keep(images: Iterable[RowImage], folder: Path) -> None:
    """Write the images that the folder lacks. A reader finds an image whole, or not at all."""
    folder.mkdir(parents=True, exist_ok=True)
    for image in images:
        if (folder / image.hash).exists():
            continue
        data = image.source
        if not isinstance(data, bytes):
            data = data.read_bytes()
        found = name_of(data)
        if found != image.hash:
            raise ValueError(f"expected {image.source} as it was checked, found other bytes, of SHA-256 {found}")
        write_image(folder, data)


def write_image(folder: Path, data: bytes) -> str:
    """Write the file of an image under its name, and return the name. The file is not synced to the disk: that would
    take most of the start of a run with many images, and readers check the hash."""
    name = name_of(data)
    half = folder / f".{name}.{secrets.token_hex(8)}"  # processes and threads may write one image at the same time
    half.write_bytes(data)
    half.replace(folder / name)
    return name


def name_of(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()
