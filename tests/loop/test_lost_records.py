"""Notes of a resume on a folder that lost something since the run wrote it."""

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from support.running import WHOLE, RunFiles, Runs
from titan_rl.config.toml import load
from titan_rl.record.missing_records import RunRecords
from titan_rl.record.run_folder import Resume, sound_resume
from titan_rl.tools.inspect.audit_rules import audit


def remove(*names: str) -> Callable[[Path], None]:
    def lose(folder: Path) -> None:
        for name in names:
            path = folder / name
            shutil.rmtree(path) if path.is_dir() else path.unlink()

    return lose


def halve(name: str) -> Callable[[Path], None]:
    def lose(folder: Path) -> None:
        lines = (folder / name).read_bytes().splitlines(keepends=True)
        (folder / name).write_bytes(b"".join(lines[: len(lines) // 2]))

    return lose


def copied(folder: Path) -> None:
    shutil.rmtree(folder / "checkpoint/step-8")
    shutil.copytree(folder / "checkpoint/step-6", folder / "checkpoint/step-8")


def linked(folder: Path) -> None:
    shutil.rmtree(folder / "checkpoint/step-8")
    (folder / "checkpoint/step-8").symlink_to("step-6")


@pytest.mark.parametrize(
    ("lose", "resumes_at", "note"),
    [
        (remove("checkpoint/step-8"), 6, "the checkpoint of step 8, which the ledger saved, is missing or not whole"),
        (remove("checkpoint/step-8/.metadata"), 6, "the checkpoint of step 8, which the ledger saved, is missing"),
        (
            remove("checkpoint/step-8", "checkpoint/step-6", "checkpoint/step-4"),
            None,
            "is missing or not whole: the steps after the cold start are trained again",
        ),
        (remove("checkpoint/step-8/checksums.json"), 6, "step-8: checksums.json is missing, which this run writes"),
        (
            lambda folder: other_run("checkpoint/step-8")(folder),
            6,
            "the checkpoint of step 8 is damaged, and the checkpoint of step 6 is used instead",
        ),
        (copied, 6, "step-8: it was written as step-6"),
        (linked, 6, "step-8: it is a link"),
        (remove("ledger.jsonl"), 8, "ledger.jsonl is missing, and the run resumes from step 8"),
        (halve("ledger.jsonl"), 8, "ledger.jsonl ends at step "),
        (remove("metrics.jsonl"), 8, "metrics.jsonl is missing, and the run resumes from step 8"),
        (halve("metrics.jsonl"), 8, "metrics.jsonl ends at step "),
        (remove("rollouts.jsonl"), 8, "rollouts.jsonl is missing, and the run resumes from step 8"),
        (halve("rollouts.jsonl"), 8, "rollouts.jsonl ends at step "),
    ],
)
def test_what_a_folder_lost_is_named_before_anything_is_trained(
    whole: RunFiles, tmp_path: Path, lose: Callable[[Path], None], resumes_at: int | None, note: str
) -> None:
    folder = shutil.copytree(whole.folder, tmp_path / "run")
    config = load(folder / "config.toml")
    assert RunRecords.of(folder).missing(config, Resume(8, None)) == []
    lose(folder)
    resume, notes = sound_resume(folder, config)
    assert resume.rl == resumes_at
    notes += RunRecords.of(folder).missing(config, resume)
    assert any(note in each for each in notes), notes


def evaluations(change: Callable[[str], str], name: str = "evaluations.jsonl") -> Callable[[Path], None]:
    def forge(folder: Path) -> None:
        path = folder / name
        path.write_text("".join(change(line) for line in path.read_text().splitlines(keepends=True)))

    return forge


def other_run(part: str) -> Callable[[Path], None]:
    """Put a part of another run of the same shape in the place of this run's."""

    def forge(folder: Path) -> None:
        path = folder / part / "checksums.json"
        path.write_text(json.dumps({**json.loads(path.read_text()), "run": "0123456789abcdef"}))

    return forge


def summary(**values: float) -> Callable[[Path], None]:
    def forge(folder: Path) -> None:
        path = folder / "summary.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | values))

    return forge


@pytest.mark.parametrize(
    ("change", "finding"),
    [
        (remove("evaluations.jsonl"), "evaluations.jsonl has no evaluation of step 8"),
        (evaluations(lambda line: line.replace("[0.0]", "[1.0]")), "evaluations.jsonl: step 8 has the score 1, "),
        (
            evaluations(lambda line: line.replace('"step":6', '"step":5')),
            "an evaluation of step 5, which metrics.jsonl",
        ),
        (
            evaluations(lambda line: line.replace('"reward":0.0', '"reward":1.0'), "evaluation_answers.jsonl"),
            "sample 0 has the reward 1.0, 0.0 in evaluations.jsonl",
        ),
        (
            evaluations(lambda line: line.replace('"step":6', '"step":5'), "evaluation_answers.jsonl"),
            "answers of step 5, of which evaluations.jsonl has no evaluation",
        ),
        (
            evaluations(lambda line: line.replace('"text":"', '"text":"8', 1), "evaluation_answers.jsonl"),
            "the answers are not as the run wrote them",
        ),
        (other_run("hf"), "hf: another run wrote it"),
        (other_run("checkpoint/step-8"), "step-8: another run wrote it"),
        (summary(final_eval=1.0), "summary.json: final_eval is 1.0, "),
        (summary(steps=3), "summary.json: 3 steps, the ledger has 8"),
        (remove("checkpoint/step-8"), "the ledger saved step 8, of which checkpoint has no whole checkpoint"),
        (lambda folder: os.truncate(folder / "checkpoint/step-8/__0_0.distcp", 9), "step-8: __0_0.distcp: expected"),
    ],
)
def test_the_audit_names_forged_scores_and_lost_checkpoints(
    whole: RunFiles, tmp_path: Path, change: Callable[[Path], object], finding: str
) -> None:
    folder = shutil.copytree(whole.folder, tmp_path / "run")
    assert audit(folder)[0] == []
    change(folder)
    assert any(finding in problem for problem in audit(folder)[0]), audit(folder)[0]


def test_the_plan_of_a_resumed_run_has_the_note(runs: Runs, whole: RunFiles, tmp_path: Path) -> None:
    folder = shutil.copytree(whole.folder, tmp_path / "run")
    remove("rollouts.jsonl")(folder)
    out = " ".join(runs.finish(folder, **{**WHOLE, "training__steps": 9}).finish().split())
    assert "rollouts.jsonl is missing, and the run resumes from step 8: records of its steps are lost" in out


def test_a_run_whose_folder_is_removed_ends_by_name(runs: Runs, tmp_path: Path) -> None:
    run = runs.start(tmp_path / "run", cold_start__steps=8, training__steps=100_000, algorithm__max_dead_steps=0)
    run.wait_for_step(1)
    run.folder.rename(tmp_path / "elsewhere")
    out = " ".join(run.finish(60).split())
    assert run.code == 1, out
    assert f"{tmp_path / 'run'} was removed or renamed while the run wrote to it" in out
    assert "Traceback" not in out
    assert not run.processes()
