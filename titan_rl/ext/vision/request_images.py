"""Reads the images of a server's requests. A file is deleted when the last request with its image ends.

messages ── each data URL ──> DIRECTORY/HASH, message with its hash ──> engines read it ──> deleted
"""

from collections import Counter, deque
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from threading import Lock

from titan_rl.ext.vision.image_tokens import Places
from titan_rl.ext.vision.row_images import in_messages
from titan_rl.ext.vision.turn_images import TurnImages
from titan_rl.text.template import Message


class ServedImages:
    """The images of the requests that one server has not answered yet."""

    def __init__(self, folder: Path, directory: Path) -> None:
        """`folder`: the model's. `directory`: the one that engines read."""
        self.turns, self._directory = TurnImages(folder, directory), directory
        self._readers = Counter[str]()  # requests, by the name of their image
        self._lock = Lock()

    @contextmanager
    def request(self) -> Iterator["RequestImages"]:
        """Yield the reader of one request."""
        images = RequestImages(self)
        try:
            yield images
        finally:
            self._release(images.names)

    def hold(self, names: Iterable[str]) -> None:
        """Let no other request delete these images."""
        with self._lock:
            self._readers.update(names)

    def _release(self, names: Iterable[str]) -> None:
        with self._lock:
            self._readers.subtract(names)
            for name in [name for name in names if not self._readers[name]]:
                del self._readers[name]
                (self._directory / name).unlink(missing_ok=True)


class RequestImages:
    """The images of one request, all of whose answers read the same messages."""

    def __init__(self, served: ServedImages) -> None:
        self.id, self.names = served.turns.id, frozenset[str]()
        self._served = served
        self._named: list[Message] | None = None

    def named(self, messages: Sequence[Message]) -> list[Message]:
        """Keep the images of the messages, and return the messages with their names. Raise ValueError for a bad
        image."""
        if self._named is None:
            self._named = self._read(messages)
        return self._named

    def expanded(self, tokens: Sequence[int], names: Sequence[str]) -> tuple[list[int], Places]:
        return self._served.turns.expanded(tokens, names)

    def _read(self, messages: Sequence[Message]) -> list[Message]:
        named, images = in_messages(messages, deque(), Path())
        self.names = frozenset(image.hash for image in images)
        self._served.hold(self.names)  # before they are written, or an ending request would delete them
        self._served.turns.keep(images)
        return named
