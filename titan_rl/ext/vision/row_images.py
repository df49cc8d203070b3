"""Reads the images of rows, and refuses unreadable ones.

    row, prompt ── each image: file, data URL or bytes -> opened, hashed ──> row and prompt with hashes, RowImages

An image may be a part of a chat message, or in the column task.images_key. Parts without an image take the column's
images in order. Without such parts, the column's images come before the prompt's text.
"""

import base64
import hashlib
import warnings
from collections import deque
from collections.abc import Mapping, Sequence
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
    folder, kept = _folder_of(where), list[RowImage]()
    given = _column(row, images_key) if images_key else []
    for number, value in enumerate(given, 1):
        kept.append(_named(value, folder, f"image {number} of {images_key!r}"))
    found = kept
    if not isinstance(prompt, str):
        prompt, found = in_messages(prompt, deque(kept), folder)
        if kept and len(found) < len(kept):
            raise ValueError(f"expected an image part for each image of {images_key!r}, found {len(kept)} images")
        row = _with_cell(row, column, prompt)
    if images_key and cell(row, images_key) is not None:
        row = _with_cell(row, images_key, [image.hash for image in kept])
    return row, prompt, tuple(found)


def _column(row: dict[str, Any], key: str) -> list[Any]:
    value = cell(row, key)
    if value is ABSENT:
        columns = ", ".join(sorted(row))
        raise ValueError(f"expected the column task.images_key = {key!r}, found {columns}")
    if value is None:
        return []
    if isinstance(value, list):
        return value
    return [value]


def in_messages(
    messages: Sequence[Message], unused: deque[RowImage], folder: Path
) -> tuple[list[Message], list[RowImage]]:
    """Return the messages with hashes, and all images in the order of their parts."""
    images, made = list[RowImage](), list[Message]()
    bare = any(_takes_next(part) for message in messages for part in _parts(message))

    def shown(image: RowImage) -> dict[str, Any]:
        images.append(image)
        return {"type": "image", "image": image.hash}

    for number, message in enumerate(messages, 1):
        parts = list[dict[str, Any]]()
        if not bare and message["role"] == "user":  # the column's come first
            parts += map(shown, unused)
            unused.clear()
        for place, part in enumerate(_parts(message), 1):
            name = f"part {place} of message {number}"
            if not _is_image(part):
                parts.append({"type": "text", "text": _text(part, name)})
            elif not _takes_next(part):
                parts.append(shown(_named(_value(part), folder, name)))
            elif unused:
                parts.append(shown(unused.popleft()))
            else:
                raise ValueError(f"{name}: expected an image, here or in a column (task.images_key), found none")
        seen = any(map(_is_image, parts))
        made.append({**message, "content": parts} if seen else message)
    return made, images


def _text(part: Any, name: str) -> str:
    """Return the text of a part. Arrow gives each part the keys of all others."""
    if isinstance(part, dict) and part.get("type") == "text":
        text = part.get("text")
        if isinstance(text, str):
            return text
    raise ValueError(f"{name}: expected a text or an image, found {part!r:.80}")


def _parts(message: Message) -> list[Any]:
    content = message.get("content")
    if isinstance(content, list):
        return content
    return [{"type": "text", "text": content}] if content else []


def _is_image(part: Any) -> bool:
    return isinstance(part, dict) and part.get("type") in KINDS


def _takes_next(part: Any) -> bool:
    """Return True for an image part without an image, which takes the next of the column."""
    return _is_image(part) and _value(part) is None


def _value(part: Mapping[str, Any]) -> Any:
    for name in FIELDS:
        if part.get(name) is not None:
            return part[name]
    return None


def _folder_of(where: str) -> Path:
    """Return the folder that paths of a row begin in: its file's, or for a user's task the working directory."""
    file = Path(where.rpartition(":")[0])
    if file.is_file():
        return file.parent
    return Path()


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
    if hasattr(value, "getexif"):  # an image of Pillow's
        return _opened(_png(value))
    if not isinstance(value, str) or not value:
        raise ValueError(f"expected {EXPECTED}, found {value!r:.80}")
    if value.startswith("data:"):
        return _opened(_of_data_url(value))
    if value.startswith(("http://", "https://")):
        raise ValueError(f"expected {EXPECTED}, because nothing is downloaded, found {value[:80]!r}")
    return image_at((folder / value.removeprefix("file://")).absolute())


def image_at(path: Path) -> RowImage:
    """Return the image in a file. Raise ValueError if it cannot be read."""
    try:
        state = path.stat()
        if not path.is_file():
            raise ValueError(f"expected a regular file, found {str(path)!r}")
        if state.st_size > MOST_BYTES:
            raise ValueError(f"expected at most {MOST_BYTES:,} bytes, found {state.st_size:,} in {str(path)!r}")
        return _of_file(path, state.st_mtime_ns, state.st_size, state.st_ino)
    except OSError as error:
        raise ValueError(f"expected an image that can be read, found {error}") from error


def _png(image: Any) -> bytes:
    file = BytesIO()
    image.save(file, "PNG")
    return file.getvalue()


def _of_data_url(url: str) -> bytes:
    head, _, data = url.partition(",")
    if not head.endswith(";base64"):
        raise ValueError(f"expected a data URL in base64, found {head[:40]!r}")
    try:
        return base64.b64decode(data, validate=True)
    except ValueError as error:  # binascii.Error too
        raise ValueError(f"expected a data URL in base64, found {error}") from error


@lru_cache(maxsize=2**16)  # the checks read the same files as the run, and rows may share one
def _of_file(path: Path, *state: int) -> RowImage:
    found = _opened(path.read_bytes(), f" in {str(path)!r}")
    return found._replace(source=path)


def _opened(data: bytes, place: str = "") -> RowImage:
    """Decode a whole image, so that a cut file is refused here."""
    from PIL import Image

    if len(data) > MOST_BYTES:
        raise ValueError(f"expected at most {MOST_BYTES:,} bytes, found {len(data):,}{place}")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", Image.DecompressionBombWarning)
            with Image.open(BytesIO(data), formats=FORMATS) as image:
                width, height = image.size
                pixels = width * height
                if pixels > MOST_PIXELS:
                    raise ValueError(f"expected at most {MOST_PIXELS:,} pixels, found {width} x {height}{place}")
                if getattr(image, "is_animated", False):
                    raise ValueError(f"expected a still image, found an animated {image.format}{place}")
                orientation = image.getexif().get(ORIENTATION, 1)
                if orientation >= TURNED:
                    width, height = height, width
                image.load()
    except Image.DecompressionBombError as error:
        raise ValueError(f"expected at most {MOST_PIXELS:,} pixels, found more{place}") from error
    except (OSError, SyntaxError, EOFError, MemoryError) as error:  # Pillow's own are OSErrors
        kinds = ", ".join(FORMATS)
        raise ValueError(f"expected a whole {kinds} image, found {type(error).__name__}{place}") from error
    name = hashlib.sha256(data).hexdigest()
    return RowImage(name, width, height, len(data), data)


def _with_cell(row: Mapping[str, Any], key: str, value: Any) -> dict[str, Any]:
    """Return a row with another value in a column, as row_formats.cell finds it."""
    if key in row or "." not in key:
        return {**row, key: value}
    head, _, rest = key.partition(".")
    inner = _with_cell(row[head], rest, value)
    return {**row, head: inner}
