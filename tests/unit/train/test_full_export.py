"""An export that meets a full disk."""

import asyncio
from pathlib import Path
from typing import Any

import pytest

from titan_rl.record.lines import Unwritable
from titan_rl.train.hf_folder import export_policy
from titan_rl.wire.errors import RankFailed

FULL = "Traceback\nOSError: [Errno 28] No space left on device"


@pytest.mark.parametrize(("details", "kind"), [(FULL, Unwritable), ("Traceback\nValueError: no", RankFailed)])
def test_a_full_disk_is_no_fault_of_a_rank(tmp_path: Path, details: str, kind: type[Exception]) -> None:
    class Trainers:
        async def export(self, folder: str) -> None:
            Path(folder, "model.safetensors").write_bytes(b"half of it")
            raise RankFailed("trainer[dp=0 tp=0] failed in export", details, rank="trainer[dp=0 tp=0]", kind="OSError")

    trainers: Any = Trainers()
    with pytest.raises(kind, match=f"^{tmp_path}/hf cannot be written: No space" if kind is Unwritable else "failed"):
        asyncio.run(export_policy(trainers, trainers, tmp_path / "hf"))  # the setup is not reached
    assert list(tmp_path.iterdir()) == [], "nothing half-written stays"
