import json
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from support.running import RunFiles, finished_once, shared_folder
from titan_rl.meshes.starter import KINDS, starter
from titan_rl.wire.gpus import visible_gpus
from titan_rl.wire.model_shape import ModelShape, shape_of_folder


@pytest.fixture(scope="session", autouse=True)
def session_fork_servers() -> Iterator[None]:
    """Fork the ranks of all system tests from two processes that the session keeps: a run starts in seconds."""
    if visible_gpus():  # ranks of CUDA start cold
        yield
        return
    with tempfile.TemporaryDirectory(prefix="forks-") as folder, starter().serving(Path(folder)) as servers:
        servers.keep(KINDS)
        yield


@pytest.fixture(scope="session")
def learnt(tmp_path_factory: pytest.TempPathFactory) -> RunFiles:
    """A run whose score is neither 0 nor 1, and differs between its checkpoints. It has a second evaluation set, and
    keeps its best weights. Tests leave its folder as it is."""
    folder = tmp_path_factory.mktemp("learnt")
    sums = [(a, b) for a in range(90, 98) for b in (90, 91)]
    rows = [{"question": f"{a:02d}+{b:02d}=", "answer": f"{a + b:03d}"[::-1]} for a, b in sums]
    (folder / "hard.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    hard = f'{{hard = {{path = "{folder}/hard.jsonl", samples = 4, temperature = 1.0}}}}'
    keys: dict[str, Any] = {"training__steps": 4, "checkpoint__interval": 2, "eval__interval": 2}
    keys |= {"eval__sets": hard, "eval__keep_best": "eval/score"}
    return finished_once(shared_folder(tmp_path_factory), "learnt", small=False, **keys)


@pytest.fixture(scope="module")
def folder(model: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The Hugging Face folder of the test module's `model`."""
    folder: Path = tmp_path_factory.mktemp("model")
    model.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def shape(folder: Path) -> ModelShape:
    return shape_of_folder(str(folder), "model")
