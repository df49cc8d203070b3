import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest


@pytest.fixture
def sockets() -> Iterator[Path]:
    """A folder whose path is short enough for the kernel."""
    with tempfile.TemporaryDirectory(prefix="titan_rl-test-") as folder:
        yield Path(folder)
