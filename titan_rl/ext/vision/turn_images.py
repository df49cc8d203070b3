"""Reads the images of observations, in the process that plays an episode.

    observation ── each image: file, data URL, bytes or PIL's ──> RUN/images/HASH, message with its hash
    tokens with one token for each image ──> tokens with the processor's, and where each image begins

The processor is imported here: an environment may show an image of any size at any time.
"""

from collections import deque
from collections.abc import Sequence
from pathlib import Path
from threading import Lock
from typing import Any

from titan_rl.ext.vision.image_tokens import ImageProcessor, Places, Size, expand
from titan_rl.ext.vision.kept_images import keep
from titan_rl.ext.vision.row_images import image_at, in_messages
from titan_rl.tasks.examples import RowImage
from titan_rl.text.template import Message

MOST_SIZES = 2**16  # that a process remembers, of images
HASH = 64  # characters of an image's name


class TurnImages:
    """The images of the episodes of one process. Threads may share it."""

    def __init__(self, folder: Path, directory: Path) -> None:
        """`folder`: the model's. `directory`: of the run's images."""
        self._processor, self._directory = ImageProcessor(str(folder)), directory
        self.id = self._processor.id
        self._sizes = dict[str, Size]()  # by name
        self._tokens = dict[Size, list[int]]()
        self._lock = Lock()  # tokenizers refuse two threads at once

    def named(self, messages: Sequence[Message]) -> list[Message]:
        """Keep the images of messages, and return the messages with their names. Raise ValueError for a bad image."""
        known = [self._with_paths(message) for message in messages]
        named, images = in_messages(known, deque(), Path())
        self.keep(images)
        return named

    def keep(self, images: Sequence[RowImage]) -> None:
        """Write the images that the directory lacks."""
        keep(images, self._directory)
        if len(self._sizes) > MOST_SIZES:
            self._sizes.clear()
        for image in images:
            self._sizes[image.hash] = size = (image.width, image.height)
            self._tokens_of(size)

    def expanded(self, tokens: Sequence[int], names: Sequence[str]) -> tuple[list[int], Places]:
        """Return tokens that have one token for each image as the model reads them. Raise ValueError if they stand for
        another number of images."""
        found = list(tokens).count(self.id)
        if found != len(names):
            expected = f"{len(names)} {self._processor.token}, one for each image"
            raise ValueError(f"expected {expected}, found {found} in the rendered observation")
        written = [self._tokens_of(self._size(name)) for name in names]
        return expand(tokens, self.id, zip(names, written, strict=True))

    def _size(self, name: str) -> Size:
        if name not in self._sizes:
            image = image_at(self._directory / name)
            self._sizes[name] = image.width, image.height
        return self._sizes[name]

    def _tokens_of(self, size: Size) -> list[int]:
        with self._lock:
            if size not in self._tokens:
                self._tokens[size] = self._processor.tokens(size)
            return self._tokens[size]

    def _with_paths(self, message: Message) -> Message:
        """Return a message with paths in place of names of the run's images, which an earlier message may have."""
        content = message.get("content")
        if not isinstance(content, list):
            return message
        return {**message, "content": list(map(self._with_path, content))}

    def _with_path(self, part: Any) -> Any:
        name = part.get("image") if isinstance(part, dict) else None
        if not isinstance(name, str) or len(name) != HASH:
            return part
        path = self._directory / name
        return {**part, "image": str(path)} if path.is_file() else part
