"""One rank's part of a snapshot: written, restored, and refused where it does not fit."""

import os
import threading
from collections.abc import Iterator
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from support.cudart import as_on_a_gpu
from titan_rl.ext.snapshots.ranks import state_copy
from titan_rl.ext.snapshots.ranks.state_copy import RankState, StateCopy
from titan_rl.ext.snapshots.snapshot_parts import KEPT, WRITING, head
from titan_rl.wire.snapshot import SnapshotPart

PARTS = 5


class Values:
    """A Stateful of plain values."""

    def __init__(self, **values: Any) -> None:
        self.values = values

    def state_dict(self) -> dict[str, Any]:
        return dict(self.values)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.values = state_dict


@pytest.fixture
def part() -> Iterator[SnapshotPart]:
    fd = os.memfd_create("titan_rl test")
    yield SnapshotPart(f"/proc/{os.getpid()}/fd/{fd}", 1)
    os.close(fd)


def stamp(part: SnapshotPart) -> int:
    return head(int(part.path.rpartition("/")[2]))[0]


def test_values_of_every_kind_come_back_as_they_were(part: SnapshotPart) -> None:
    kinds = {
        "float32": torch.randn(3, 5),
        "transposed": torch.randn(4, 3).t(),
        "float16": torch.randn(7).half(),
        "flags": torch.tensor([True, False, True]),
        "scalar": torch.tensor(3.5),
        "empty": torch.empty(0, 4),
        "nan": torch.tensor([float("nan"), float("-inf"), -0.0]),
    }
    values = {"lr": 0.1 + 0.2, "betas": (0.9, 0.95), "off": None, "on": True, "text": '{"é": [1]}', "inf": float("inf")}
    state = Values(**kinds, **values)
    copies = StateCopy({"state": state})
    assert copies.begin(part) == sum(t.nbytes for t in kinds.values())
    copies.wait()
    new = Values(
        **{name: torch.zeros_like(t) for name, t in kinds.items()}, **{**values, "lr": 0.0, "betas": (0.0, 0.0)}
    )
    StateCopy({"state": new}).restore(part)
    for name, tensor in kinds.items():
        assert new.values[name].numpy(force=True).tobytes() == tensor.numpy(force=True).tobytes(), name
    assert {name: new.values[name] for name in values} == values
    copies.close()


def test_another_layout_is_refused_by_the_name_of_the_tensor(part: SnapshotPart) -> None:
    copies = StateCopy({"model": Values(weight=torch.ones(3, 4), bias=torch.ones(3))})
    copies.begin(part)
    copies.wait()
    with pytest.raises(RuntimeError, match=r"expected model/weight as \['torch.float32', 3, 2\].*, 3, 4\]: a snapshot"):
        StateCopy({"model": Values(weight=torch.ones(3, 2), bias=torch.ones(3))}).restore(part)
    with pytest.raises(RuntimeError, match="expected model/bias as no tensor"):
        StateCopy({"model": Values(weight=torch.ones(3, 4))}).restore(part)
    copies.close()


def test_a_snapshot_that_fails_says_so_and_is_none(part: SnapshotPart, capfd: pytest.CaptureFixture[str]) -> None:
    copies = StateCopy({"state": Values(weights=torch.ones(2), other=object())})
    copies.begin(part)
    copies.wait()
    assert "a snapshot failed: TypeError: Object of type object is not JSON serializable" in capfd.readouterr().err
    with pytest.raises(RuntimeError, match="expected snapshot 1, found the stamp 0"):
        StateCopy({"state": Values(weights=torch.ones(2), other=None)}).restore(part)
    copies.close()


@pytest.mark.parametrize("refused", [False, True])
def test_memory_is_pinned_while_the_next_step_runs(
    monkeypatch: pytest.MonkeyPatch, part: SnapshotPart, refused: bool, capfd: pytest.CaptureFixture[str]
) -> None:
    """`begin` returns before the driver has found a page, and `wait` after the copy."""
    free, pinned = threading.Event(), list[int]()

    def pin(memory: torch.Tensor) -> None:
        assert free.wait(60)
        pinned.append(memory.nbytes)
        if refused:
            raise RuntimeError("no memory")

    stream = SimpleNamespace(wait_stream=lambda other: None, synchronize=lambda: None)
    monkeypatch.setattr(torch.cuda, "Stream", lambda: stream)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: stream)
    monkeypatch.setattr(torch.cuda, "stream", lambda _: nullcontext())
    monkeypatch.setattr(state_copy, "pin", pin)
    monkeypatch.setattr(RankState, "on_gpu", True)
    copies = StateCopy({"state": Values(w=torch.arange(5000.0))})
    assert copies.begin(part) == 20_000
    assert not pinned
    assert stamp(part) == WRITING
    free.set()
    copies.wait()
    assert len(pinned) == 1
    assert ("a snapshot failed: RuntimeError: no memory" in capfd.readouterr().err) == refused
    assert stamp(part) == (WRITING if refused else part.serial)
    copies.close()


def test_snapshots_keep_the_pins_of_the_parts_in_use(monkeypatch: pytest.MonkeyPatch) -> None:
    cudart = as_on_a_gpu(monkeypatch)
    files = [os.memfd_create("titan_rl test") for _ in range(PARTS)]
    parts = [SnapshotPart(f"/proc/{os.getpid()}/fd/{fd}", 1) for fd in files]
    for part in parts:
        copies = StateCopy({"state": Values(w=torch.arange(5000.0))})
        copies.begin(part)
        copies.close()
    monkeypatch.setattr(RankState, "on_gpu", True)
    monkeypatch.setattr(torch.Tensor, "is_pinned", lambda memory: memory.data_ptr() in cudart.held)
    copies = StateCopy({"state": Values(w=torch.arange(5000.0))})
    for part in (*parts, *parts[-KEPT:]):
        copies.restore(part)
        assert 1 <= len(cudart.held) <= state_copy.KEPT
    copies.close()
    assert not cudart.held
    cudart.check()
    assert not cudart.wrong
    for fd in files:
        os.close(fd)
