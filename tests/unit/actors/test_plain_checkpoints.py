"""Loading a checkpoint executes nothing that someone has put into its files."""

import os
import pickle
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType, async_save, save

from titan_rl.actors.titan.private import end_checkpoint_process
from titan_rl.actors.titan.summed_writer import SummedWriter, load_checkpoint
from titan_rl.wire.checkpoint_sums import METADATA

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


class Planted:
    def __reduce__(self) -> Any:
        return os.mkdir, ("planted",)


def saved(folder: Path, step: object) -> Path:
    states = {"weights": torch.ones(3), "state": {"step": step, "betas": (0.9, 0.95), "controller": "{}"}}
    save(states, storage_writer=SummedWriter(str(folder)), no_dist=True)
    return folder


def empty() -> dict[str, Any]:
    return {"weights": torch.zeros(3), "state": {"step": 0, "betas": (), "controller": ""}}


def test_tensors_and_plain_values_are_loaded(tmp_path: Path) -> None:
    load_checkpoint(states := empty(), saved(tmp_path, 8))
    assert states["weights"].tolist() == [1.0] * 3
    assert states["state"]["step"] == 8


@pytest.mark.parametrize(
    ("in_metadata", "why"), [(False, "the value state.step is refused: .*mkdir"), (True, "it would call posix.mkdir")]
)
def test_a_planted_call_is_refused_by_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, in_metadata: bool, why: str
) -> None:
    monkeypatch.chdir(tmp_path)
    folder = saved(tmp_path / "step-8", 8 if in_metadata else Planted())
    if in_metadata:
        (folder / ".metadata").write_bytes(pickle.dumps(Planted()))
    with pytest.raises(CheckpointException) as error:
        load_checkpoint(empty(), folder)
    ((cause, _),) = error.value.failures.values()
    assert re.search(why, str(cause))
    assert not (tmp_path / "planted").exists()


def save_in_another_process(folder: str) -> None:
    """Save as async_mode "async_with_pinned_mem" does, and exit as a rank does."""
    torch.distributed.init_process_group("gloo", init_method=f"file://{folder}.peers", rank=0, world_size=1)
    saving: Any = async_save(
        {"weights": torch.ones(3)},
        storage_writer=SummedWriter(folder),
        async_checkpointer_type=AsyncCheckpointerType.PROCESS,
    )
    saving.result()
    end_checkpoint_process()
    os._exit(0)


def test_the_process_that_writes_checkpoints_ends_in_silence(tmp_path: Path) -> None:
    environment = os.environ | {"MASTER_ADDR": "127.0.0.1"}
    command = [sys.executable, __file__, str(tmp_path / "step-1")]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    assert (tmp_path / "step-1" / METADATA).exists()
    assert "Traceback" not in done.stderr
    assert "Received async checkpoint request" not in done.stderr


if __name__ == "__main__":
    save_in_another_process(sys.argv[1])
