import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from titan_rl.meshes.zygotes import KINDS, serving
from titan_rl.wire.gpus import visible_gpus


@pytest.fixture(scope="session", autouse=True)
def session_zygotes() -> Iterator[None]:
    """Fork the ranks of all system tests from two processes that the session keeps: a run starts in seconds."""
    if visible_gpus():  # ranks of CUDA start cold
        yield
        return
    with tempfile.TemporaryDirectory(prefix="zygotes-") as folder, serving(Path(folder)) as zygotes:
        zygotes.keep(KINDS)
        yield
