"""Batches of the last steps are kept, and read back as they were."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from titan_rl.config.sections import Config
from titan_rl.ext.kept_sets.kept_sets import KeptSets
from titan_rl.ext.replay.kept_batches import KeptBatches
from titan_rl.record.run_log import RunLog
from titan_rl.tools import replay
from titan_rl.wire.types import Sample, entries


def sample(first: int, *, kept: bool = False) -> Sample:
    columns = {"behaviour": [0.0, -0.5, -1.25], "advantage": [0.5, 0.5, 0.5]}
    extras = {"kept": KeptSets.of([b"", b"", np.array([first, 7], "<u4").tobytes()])} if kept else {}
    return Sample([first, 8, 9], [0, 1, 1], columns, prompt=1, sequence=first, extras=extras)  # pyright: ignore[reportArgumentType]


def test_a_step_s_updates_are_read_back(tmp_path: Path) -> None:
    kept = KeptBatches(tmp_path, 2)
    for step in range(1, 5):
        kept.write(step, [[sample(1), sample(2, kept=True)], [sample(3)]])
    assert kept.steps == [3, 4]
    first, second = kept.read(4)
    assert [list(s.tokens) for s in (*first, *second)] == [[1, 8, 9], [2, 8, 9], [3, 8, 9]]
    assert [(s.prompt, s.sequence) for s in (*first, *second)] == [(1, 1), (1, 2), (1, 3)]
    assert list(first[0].columns["behaviour"]) == [0.0, -0.5, -1.25]
    assert [list(part) for part in first[1].extras["kept"].ids()] == [[0, 0, 2], [2, 7]]


def test_routes_are_read_back(tmp_path: Path) -> None:
    kept, routes = KeptBatches(tmp_path, 1), np.arange(12).astype(np.uint8).reshape(3, 2, 2)
    kept.write(
        1,
        [
            [replace(sample(1), extras={"routes": routes}), sample(2)],
            [replace(sample(3), extras={"routes": routes + 1})],
        ],
    )
    first, second = kept.read(1)
    found = [s.extras["routes"] for s in (*first, *second)]
    assert np.array_equal(found, [routes, np.full_like(routes, 255), routes + 1])


def test_top_tokens_are_read_back(tmp_path: Path) -> None:
    kept = KeptBatches(tmp_path, 1)
    tops = [entries(first + np.arange(4).reshape(2, 2), np.full((2, 2), -first)) for first in (1, 2, 3)]
    made = [replace(sample(i), extras={"top": top}) for i, top in enumerate(tops)]
    kept.write(1, [made[:2], made[2:]])
    found = [s.extras["top"] for update in kept.read(1) for s in update]
    assert all(np.array_equal(top, own) for top, own in zip(found, tops, strict=True))


def test_later_steps_of_an_undone_history_are_deleted(tmp_path: Path) -> None:
    kept = KeptBatches(tmp_path, 3)
    for step in (1, 2, 3, 4, 3):
        kept.write(step, [[sample(1)]])
    assert kept.steps == [2, 3]


@pytest.mark.parametrize("damage", [b"", b"garbage", b"PK\x03\x04 torn"])
def test_a_damaged_file_is_named(tmp_path: Path, damage: bytes) -> None:
    kept = KeptBatches(tmp_path, 1)
    kept.write(1, [[sample(1)]])
    (tmp_path / "batches" / "step-1.npz").write_bytes(damage)
    with pytest.raises(ValueError, match=r"batches/step-1.npz: expected the samples of a step"):
        kept.read(1)


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["nowhere"], "expected the dump folder of a run"),
        (["run"], "found none in run: it had record.batches = 0"),
        (["kept", "--step", "3"], "--step: expected a checkpoint before a kept step"),
        (["kept", "--optimizer.lr", "1"], "--optimizer.lr: expected a key of parallelism"),
        (["kept", "--parallelism.nonsense", "1"], "nonsense"),
    ],
)
def test_refuses_what_cannot_be_made_again(
    arguments: list[str],
    expected: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("run", "kept"):
        RunLog(tmp_path / name, "tiny", Config()).close()
    KeptBatches(tmp_path / "kept", 1).write(3, [[sample(1)]])
    with pytest.raises(SystemExit) as ended:
        replay.main(arguments)
    assert ended.value.code == 2
    assert expected in capsys.readouterr().err
