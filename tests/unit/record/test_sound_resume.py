"""Where a run resumes if checkpoints are damaged, and its messages."""

import pickle
import shutil
from pathlib import Path

import pytest

from titan_rl.config.presets import preset
from titan_rl.config.sections import Config, CriticSection
from titan_rl.record.run_folder import Resume, sound_resume
from titan_rl.wire.checkpoint_sums import SUMS, SummedFile, write_sums
from titan_rl.wire.errors import RunError
from titan_rl.wire.snapshot import Snapshot

PPO = Config(algorithm=preset("ppo"), critic=CriticSection(lr=1e-3))


def saved(folder: Path, *steps: int) -> Path:
    for step in steps:
        path = folder / f"step-{step}"
        path.mkdir(parents=True)
        sums = {}
        for name in ("__0_0.distcp", ".metadata"):
            with (path / name).open("wb") as file:
                summed = SummedFile(file)
                summed.write(pickle.dumps(f"{folder.name} {step} {name}"))
            sums[name] = summed.sum
        write_sums(path, sums)
    return folder


def flip(folder: Path) -> None:
    data = (folder / "__0_0.distcp").read_bytes()
    (folder / "__0_0.distcp").write_bytes(data[:-1] + b"?")


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir() if path.is_dir())


def test_sound_checkpoints_are_resumed_without_a_word(tmp_path: Path) -> None:
    saved(tmp_path / "checkpoint", 2, 4)
    saved(tmp_path / "checkpoint/cold_start", 40)
    assert sound_resume(tmp_path, Config()) == (Resume(4, 40), [])
    assert sound_resume(tmp_path / "none", Config()) == (Resume(None, None), [])


def test_a_damaged_newest_one_falls_back_by_name_and_is_kept_aside(tmp_path: Path) -> None:
    checkpoints = saved(tmp_path / "checkpoint", 2, 4, 6)
    flip(checkpoints / "step-6")
    (checkpoints / "step-4/__0_0.distcp").unlink()
    assert sound_resume(tmp_path, Config(), dry=True)[0] == Resume(6, None), "a dry run reads no bytes"
    assert names(checkpoints) == ["step-2", "step-4", "step-6"]

    resume, notes = sound_resume(tmp_path, Config())
    assert resume == Resume(2, None)
    assert [note.partition(": ")[0] for note in notes] == [
        "the checkpoint of step 6 is damaged, and the checkpoint of step 2 is used instead",
        "the checkpoint of step 4 is damaged, and the checkpoint of step 2 is used instead",
    ]
    assert f"{checkpoints / 'step-6'}: __0_0.distcp: expected the checksum " in notes[0]
    assert notes[0].endswith("it was renamed to damaged-6.1")
    assert f"{checkpoints / 'step-4'}: __0_0.distcp is missing" in notes[1]
    assert names(checkpoints) == ["damaged-4.1", "damaged-6.1", "step-2"]
    assert sound_resume(tmp_path, Config()) == (Resume(2, None), [])


def test_a_dry_run_sees_what_sizes_tell_and_renames_nothing(tmp_path: Path) -> None:
    checkpoints = saved(tmp_path / "checkpoint", 2, 4)
    (checkpoints / "step-4/.metadata").write_bytes(b"")
    assert Resume.find(tmp_path, Config()).rl == 2
    resume, notes = sound_resume(tmp_path, Config(), dry=True)
    assert resume == Resume(2, None)
    assert len(notes) == 1
    assert "step-4: .metadata: expected 37 bytes, found 0" in notes[0]
    assert names(checkpoints) == ["step-2", "step-4"]


@pytest.mark.parametrize("model", ["checkpoint", "checkpoint/critic"])
def test_policy_and_critic_fall_back_as_one(tmp_path: Path, model: str) -> None:
    saved(tmp_path / "checkpoint/critic", 2, 4)
    saved(tmp_path / "checkpoint", 2, 4)
    flip(tmp_path / model / "step-4")
    resume, notes = sound_resume(tmp_path, PPO)
    assert resume == Resume(2, None)
    assert f"{tmp_path / model / 'step-4'}: " in notes[0]
    assert names(tmp_path / "checkpoint") == ["critic", "damaged-4.1", "step-2"]
    assert names(tmp_path / "checkpoint/critic") == ["damaged-4.1", "step-2"]


def test_a_run_with_damaged_checkpoints_only_never_starts_over(tmp_path: Path) -> None:
    checkpoints = saved(tmp_path / "checkpoint", 2, 4)
    saved(checkpoints / "cold_start", 40)
    for step in (2, 4):
        flip(checkpoints / f"step-{step}")
    for _ in range(2):  # the same command again
        with pytest.raises(RunError, match=f"every checkpoint in {checkpoints} is damaged") as error:
            sound_resume(tmp_path, Config())
        assert "step-2: __0_0.distcp: expected the checksum" in error.value.details
        assert "step-4: __0_0.distcp: expected the checksum" in error.value.details
        assert "--job.fresh" in error.value.details
        assert names(checkpoints) == ["cold_start", "step-2", "step-4"]
    shutil.rmtree(checkpoints / "step-2")
    shutil.rmtree(checkpoints / "step-4")
    flip(checkpoints / "cold_start/step-40")
    with pytest.raises(RunError, match=f"every checkpoint in {checkpoints / 'cold_start'} is damaged"):
        sound_resume(tmp_path, Config())


def test_a_snapshot_counts_more_than_a_damaged_checkpoint(tmp_path: Path) -> None:
    """In a process whose trainers died."""
    checkpoints = saved(tmp_path / "checkpoint", 2, 4)
    flip(checkpoints / "step-4")
    flip(checkpoints / "step-2")
    snapshot = Snapshot("rl", 3, "{}", 1, {})
    resume, notes = sound_resume(tmp_path, Config(), snapshot)
    assert resume == Resume(3, None, snapshot)
    assert len(notes) == 2
    assert "and a snapshot is used instead" in notes[0]


def test_a_checkpoint_of_an_earlier_version_is_resumed_with_a_note(tmp_path: Path) -> None:
    (saved(tmp_path / "checkpoint", 2) / "step-2" / SUMS).unlink()
    resume, notes = sound_resume(tmp_path, Config())
    assert resume == Resume(2, None)
    assert notes == ["the checkpoint of step 2 has no checksums: its bytes cannot be checked"]


@pytest.mark.parametrize("name", ["step-6.bad", "step-06", "step--6", "step-\u0666", "step-6 (copy)", f"step-{10**19}"])
def test_a_name_that_only_resembles_a_step_is_none(tmp_path: Path, name: str) -> None:
    checkpoints = saved(tmp_path / "checkpoint", 4, 6)
    (checkpoints / "step-6").rename(checkpoints / name)
    assert sound_resume(tmp_path, Config()) == (Resume(4, None), [])
