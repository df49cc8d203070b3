"""Reads the images of rows, and refuses those that cannot be read.

    row, prompt ── each image: file, data URL or bytes -> opened, hashed ──> row and prompt with hashes, RowImages

An image may be a part of a chat message, or in a column of its own. Parts without an image take those of the column, in
order. Without such parts, the column's images come before the prompt's text.
"""

import base64
import binascii
import hashlib
import warnings
from collections import deque
from collections.abc import Mapping
from functools import lru_cache
from io import BytesIO
from pathlib import Path
from typing import Any

from titan_rl.tasks.examples import RowImage
from titan_rl.tasks.row_formats import ABSENT, cell
from titan_rl.text.template import Message

FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF")
"""Pillow reads others by programs of this machine, or hardly tested code."""
ORIENTATION, TURNED = 0x0112, 5
"""EXIF's tag, and its first value of an image that lies on its side; the processor turns it upright."""
MOST_PIXELS = 2**25
MOST_BYTES = 2**26
KINDS = ("image", "image_url", "input_image")
FIELDS = ("image", "path", "url", "image_url", "bytes")
EXPECTED = "a path, a data URL or bytes"

Read = tuple[dict[str, Any], str | list[Message], tuple[RowImage, ...]]


def read_images(row: dict[str, Any], prompt: str | list[Message], column: str, images_key: str, where: str) -> Read:
    """Return the row, its prompt and its images, with hashes where the images were. `column`: the prompt's."""
    given = _column(row, images_key) if images_key else []
    folder = _folder_of(where)
    kept = [_named(value, folder, f"image {k} of {images_key!r}") for k, value in enumerate(given, 1)]
    if isinstance(prompt, str):
        found = kept
    else:
        prompt, found = _in_messages(prompt, deque(kept), folder)
        if kept and len(found) < len(kept):
            raise ValueError(f"expected an image part for each image of {images_key!r}, found {len(kept)} images")
        row = _with_cell(row, column, prompt)
    if images_key and cell(row, images_key) is not None:
        row = _with_cell(row, images_key, [image.hash for image in kept])
    return row, prompt, tuple(found)


def _column(row: dict[str, Any], key: str) -> list[Any]:
    value = cell(row, key)
    if value is ABSENT:
        raise ValueError(f"expected the column task.images_key = {key!r}, found the columns {sorted(row)}")
    if value is None:
        return []
    return value if isinstance(value, list) else [value]


def _in_messages(
    messages: list[Message], unused: deque[RowImage], folder: Path
) -> tuple[list[Message], list[RowImage]]:
    """Return the messages with hashes, and all images in the order of their parts."""
    images, made = list[RowImage](), list[Message]()
    bare = any(_is_image(part) and _value(part) is None for message in messages for part in _parts(message))
    for number, message in enumerate(messages, 1):
        parts, before = list[Any](), images
        if unused and not bare and message["role"] == "user":  # the column's come first
            before = [*images, *unused]
            parts = [{"type": "image", "image": image.hash} for image in unused]
            unused.clear()
        images = [*before]
        for place, part in enumerate(_parts(message), 1):
            name = f"part {place} of message {number}"
            if not _is_image(part):
                if not (isinstance(part, dict) and part.get("type") == "text" and isinstance(part.get("text"), str)):
                    raise ValueError(f"{name}: expected a text or an image, found {part!r:.80}")
                parts.append({"type": "text", "text": part["text"]})  # Arrow gives each part the keys of all others
                continue
            value = _value(part)
            if value is None and not unused:
                raise ValueError(f"{name}: expected an image, here or in a column (task.images_key), found none")
            images.append(unused.popleft() if value is None else _named(value, folder, name))
            parts.append({"type": "image", "image": images[-1].hash})
        made.append({**message, "content": parts} if any(map(_is_image, parts)) else message)
    return made, images


def _parts(message: Message) -> list[Any]:
    content = message["content"]
    return content if isinstance(content, list) else [{"type": "text", "text": content}] if content else []


def _is_image(part: Any) -> bool:
    return isinstance(part, dict) and part.get("type") in KINDS


def _value(part: Mapping[str, Any]) -> Any:
    return next((part[name] for name in FIELDS if part.get(name) is not None), None)


def _folder_of(where: str) -> Path:
    """Return the folder that paths of a row begin in: its file's, or for a user's task the working directory."""
    file = Path(where.rpartition(":")[0])
    return file.parent if file.is_file() else Path()


def _named(value: Any, folder: Path, name: str) -> RowImage:
    try:
        return _image(value, folder)
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from error


def _image(value: Any, folder: Path) -> RowImage:
    if isinstance(value, Mapping):  # as Hugging Face's data sets and OpenAI's clients have it
        value = _value(value)
    if isinstance(value, bytes):
        return _opened(value)
    if not isinstance(value, str) or not value:
        raise ValueError(f"expected {EXPECTED}, found {value!r:.80}")
    if value.startswith("data:"):
        return _opened(_of_data_url(value))
    if value.startswith(("http://", "https://")):
        raise ValueError(f"expected {EXPECTED}, because nothing is downloaded, found {value[:80]!r}")
    path = (folder / value.removeprefix("file://")).absolute()
    try:
        state = path.stat()
        if not path.is_file():
            raise ValueError(f"expected a regular file, found {str(path)!r}")
        if state.st_size > MOST_BYTES:
            raise ValueError(f"expected at most {MOST_BYTES:,} bytes, found {state.st_size:,} in {str(path)!r}")
        return _of_file(path, state.st_mtime_ns, state.st_size, state.st_ino)
    except OSError as error:
        raise ValueError(f"expected an image that can be read, found {error}") from error


def _of_data_url(url: str) -> bytes:
    head, _, data = url.partition(",")
    try:
        if not head.endswith(";base64"):
            raise ValueError("no ';base64'")
        return base64.b64decode(data, validate=True)
    except (ValueError, binascii.Error) as error:
        raise ValueError(f"expected a data URL in base64, found {error} in {head[:40]!r}") from error


@lru_cache(maxsize=2**16)  # the checks read the same files as the run, and rows may share one
def _of_file(path: Path, *state: int) -> RowImage:
    found = _opened(path.read_bytes(), f" in {str(path)!r}")
    return found._replace(source=path)


def _opened(data: bytes, place: str = "") -> RowImage:
    """Decode an image as a whole, which finds what is cut off."""
    from PIL import Image

    if len(data) > MOST_BYTES:
        raise ValueError(f"expected at most {MOST_BYTES:,} bytes, found {len(data):,}{place}")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", Image.DecompressionBombWarning)
            with Image.open(BytesIO(data), formats=FORMATS) as image:
                width, height = image.size
                if width * height > MOST_PIXELS:
                    raise ValueError(f"expected at most {MOST_PIXELS:,} pixels, found {width} x {height}{place}")
                if getattr(image, "is_animated", False):
                    raise ValueError(f"expected a still image, found an animated {image.format}{place}")
                if image.getexif().get(ORIENTATION, 1) >= TURNED:
                    width, height = height, width
                image.load()
    except Image.DecompressionBombError as error:
        raise ValueError(f"expected at most {MOST_PIXELS:,} pixels, found more{place}") from error
    except (OSError, SyntaxError, EOFError, MemoryError) as error:  # Pillow's own are OSErrors
        kinds = ", ".join(FORMATS)
        raise ValueError(f"expected a whole {kinds} image, found {type(error).__name__}{place}") from error
    return RowImage(hashlib.sha256(data).hexdigest(), width, height, len(data), data)


def _with_cell(row: Mapping[str, Any], key: str, value: Any) -> dict[str, Any]:
    """Return a row with another value in a column, as row_formats.cell finds it."""
    if key in row or "." not in key:
        return {**row, key: value}
    head, _, rest = key.partition(".")
    return {**row, head: _with_cell(row[head], rest, value)}
