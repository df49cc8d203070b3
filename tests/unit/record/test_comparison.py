"""Runs are compared by what their folders hold, also of other versions and of crashed runs."""

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from support.written_runs import WrittenRun, config
from titan_rl.record.scores import estimate
from titan_rl.tools import compare
from titan_rl.tools.inspect import comparison
from titan_rl.tools.inspect.plots import Curve, Range, plot, sparkline
from titan_rl.tools.inspect.recorded_run import NoRun, RecordedRun, current_names
from titan_rl.tools.inspect.score_differences import independent_difference, paired_difference

DATA = """[task]
eval_path = "test.jsonl"
[training]
steps = 4
"""


def folder_of(
    path: Path, scores: Mapping[int, list[float]], toml: str = DATA, *, rewards: bool = True, time_of: float = 10.0
) -> Path:
    """Write a run with an evaluation at some steps: every problem's reward."""
    path.mkdir()
    (path / "config.toml").write_text(toml)
    lines: list[dict[str, Any]] = [{"kind": "startup", "step": 0, "time": 100.0, "time/startup": 5.0}]
    evaluations = []
    for step in range(max(scores) + 1):
        kind = {"kind": "rl" if step else "eval", "step": step, "time": 100.0 + time_of * step}
        line = kind | ({"reward/mean": 0.1 * step, "time/step": time_of, "entropy": 1.0} if step else {})
        if step in scores:
            line["eval/score"] = sum(scores[step]) / len(scores[step])
            found = {str(problem): [reward] for problem, reward in enumerate(scores[step])}
            evaluations.append(kind | {"kind": "eval", "set": "heldout", "rewards": found})
        lines.append(line)
    (path / "metrics.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    if rewards:
        (path / "evaluations.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in evaluations))
    return path


def data_of(capsys: pytest.CaptureFixture[str], *argv: Any) -> dict[str, Any]:
    assert compare.main(["--json", *map(str, argv)]) == 0
    return json.loads(capsys.readouterr().out)


def test_a_difference_over_the_same_problems_is_paired(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    hard = [0.0] * 10 + [1.0] * 10
    a = folder_of(tmp_path / "a", {0: hard, 4: hard})
    b = folder_of(tmp_path / "b", {0: hard, 2: [1.0] * 8 + hard[8:]}, DATA.replace("4", "2"))
    found = data_of(capsys, a, b)
    moments = found["scores"]["heldout"]["minus_A"]["B"]
    assert moments["first"] == {"value": 0, "low": 0, "high": 0, "paired": True, "beyond_noise": False}
    assert moments["last"]["value"] == pytest.approx(0.4)
    assert moments["last"]["paired"]
    assert moments["last"]["beyond_noise"]
    assert "same step" not in moments  # the first step is the last one that both evaluated
    assert found["settings"] == {"training.steps": {"A": "4", "B": "2"}}
    assert found["reached"] == {
        "set": "heldout",
        "score": 0.5,
        "at": {"A": {"step": 0, "seconds": 5.0}, "B": {"step": 0, "seconds": 5.0}},
    }
    c = folder_of(tmp_path / "c", {0: hard, 2: hard, 4: hard})
    same = data_of(capsys, b, c)["scores"]["heldout"]["minus_A"]["B"]["same step"]
    assert same["value"] == pytest.approx(-0.4)  # at step 2
    later = data_of(capsys, a, b, "--score", "0.8")["reached"]["at"]
    assert later == {"A": None, "B": {"step": 2, "seconds": 25.0}}


@pytest.mark.parametrize(
    ("toml", "rewards"),
    [(DATA.replace("test.jsonl", "other.jsonl"), True), (DATA, False)],
    ids=["other problems", "rewards that were not stored"],
)
def test_other_problems_are_not_paired(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], toml: str, rewards: bool
) -> None:
    a = folder_of(tmp_path / "a", {4: [0.0, 1.0] * 8})
    b = folder_of(tmp_path / "b", {4: [1.0] * 16}, toml, rewards=rewards)
    last = data_of(capsys, a, b)["scores"]["heldout"]["minus_A"]["B"]["last"]
    assert last is None if not rewards else not last["paired"]


def test_a_few_changed_problems_are_noise() -> None:
    first = [0.0] * 10
    assert not paired_difference(first, [1.0] * 5 + [0.0] * 5).beyond_noise
    assert paired_difference(first, [1.0] * 8 + [0.0] * 2).beyond_noise
    assert not paired_difference(first, first).beyond_noise


def test_independent_scores_differ_by_newcombe() -> None:
    """Newcombe (1998), method 10: 56 of 70 and 48 of 80 differ by 0.2, from 0.0524 to 0.3339."""
    found = independent_difference(estimate([1.0] * 48 + [0.0] * 32), estimate([1.0] * 56 + [0.0] * 14))
    assert (found.value, found.low, found.high) == pytest.approx((0.2, 0.0524, 0.3339), abs=1e-4)


def test_keys_of_other_versions(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    old = 'rollout = { lag = 1 }\noptimizer = { name = "AdamW", future = 3 }\n[training]\nsteps = 4\n'
    a, b = (
        folder_of(tmp_path / "a", {4: [1.0]}, "[training]\nsteps = 4\n"),
        folder_of(tmp_path / "b", {4: [1.0]}, old),
    )
    assert data_of(capsys, a, b)["settings"] == {
        "rollout.max_staleness_steps": {"A": "0", "B": "1"},  # renamed
        "optimizer.future": {"A": None, "B": "3"},
    }
    assert current_names({"optimizer": {"name": "Muon"}}) == {"optimizer.name": "Muon"}  # removed, with a meaning


def test_different_tasks_come_first(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    a = folder_of(tmp_path / "a", {4: [1.0]})
    b = folder_of(tmp_path / "b", {4: [1.0]}, DATA + '[debug]\nseed = 3\n[optimizer]\nlr = "odd"\n')
    c = folder_of(tmp_path / "c", {4: [1.0]}, DATA.replace("test.jsonl", "x"))
    assert compare.main([str(a), str(b)]) == 0
    assert capsys.readouterr().out.startswith("A  ")
    assert compare.main([str(a), str(b), str(c)]) == 0
    first = capsys.readouterr().out.splitlines()[0]
    assert first.startswith("warning  these runs have different tasks (task.eval_path)")


def test_a_crashed_run_and_a_damaged_one(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    a, b = folder_of(tmp_path / "a", {4: [1.0]}), folder_of(tmp_path / "b", {2: [0.0]})
    with (b / "metrics.jsonl").open("a") as file:
        file.write('{"kind": "rl", "step": null, "time": 1}\n{"kind": "rl", "step": 3, "time": "soon"}\nnonsense\n')
        file.write('{"kind": "rl", "step": 98, "time": 150, "reward/mean": 1e308, "entropy": true}\n')
        file.write('{"kind": "rl", "step": 99, "time": 160, "reward/mean": -1e308, "time/step": "slow"}\n')
        file.write('{"kind": "rl", "step": 100, "time": 170, "reward/mean": null, "entropy": "low", "eval/low": null')
    (b / "evaluations.jsonl").write_text(
        '{"set": 4}\n[]\n{"kind": "eval", "step": 1, "set": "x", "rewards": {"0": []}}\n'
    )
    (b / "config.toml").write_text('[eval]\nsets = 3\n[training]\nsteps = "many"\n[task]\n"\\u001b[2J" = 1\n')
    assert compare.main([str(a), str(b)]) == 0
    assert "\x1b" not in capsys.readouterr().out
    (b / "config.toml").unlink()
    found = data_of(capsys, a, b)
    assert found["warnings"] == ["the settings of B are unknown: it has no config.toml"]
    assert found["runs"]["B"]["step"] == 98  # the later lines have text as times
    assert compare.main([str(a), str(b)]) == 0


def test_the_same_prompts_side_by_side(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name in "ab":
        WrittenRun(tmp_path / name).life(config(steps=4), last=4 if name == "a" else 2)
    found = data_of(capsys, tmp_path / "a", tmp_path / "b", "--samples", "1")
    (prompt,) = found["samples"]
    assert prompt["step"] == 2
    assert prompt["samples"]["A"] == prompt["samples"]["B"]
    assert len(prompt["samples"]["A"]) == 2
    assert found["runs"]["B"]["state"] == "not finished, step 2 of 4"
    assert compare.main([str(tmp_path / "a"), str(tmp_path / "b"), "--samples", "1"]) == 0
    assert "samples of the same prompts at step 2" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("names", "problem"),
    [
        (["a"], "expected 2 to 26 folders of runs, found 1"),
        (["a", "gone"], "found no folder"),
        (["a", "empty"], "found none in"),
        (["a", "begun"], "found no step in"),
        (["a", "../{}/a"], "which are the same one"),
    ],
)
def test_folders_that_cannot_be_compared(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], names: list[str], problem: str
) -> None:
    folder_of(tmp_path / "a", {1: [1.0]})
    (tmp_path / "empty").mkdir()
    (tmp_path / "begun").mkdir()
    line = {"kind": "startup", "step": 0, "time": 1.0, "time/startup": 1.0}
    (tmp_path / "begun/metrics.jsonl").write_text(json.dumps(line) + "\n")
    assert compare.main([str(tmp_path / name.format(tmp_path.name)) for name in names]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("titan_rl compare: RUN: ")
    assert captured.err.count("\n") == 1
    assert problem in captured.err


def test_eight_runs_share_their_values(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folders = [
        folder_of(tmp_path / str(k), {4: [1.0]}, DATA + f"[optimizer]\nlr = {0.1 if k % 2 else 0.2}\n")
        for k in range(8)
    ]
    assert compare.main([str(folder) for folder in folders]) == 0
    out = capsys.readouterr().out
    assert "A C E G: 0.2" in out
    assert "B D F H: 0.1" in out
    with pytest.raises(NoRun):
        compare.read([*folders] * 4)


def test_plots_tell_runs_apart_without_colour() -> None:
    up = Curve("A", "cyan", [(0, 0.0), (5, math.nan), (10, 1.0)])
    down = Curve("B", "yellow", [(0, 1.0), (5, 0.0)])
    for braille in (True, False):
        lines = [line.plain for line in plot([up, down], width=30, height=6, braille=braille)]
        assert len(lines) == 8
        assert lines[0].startswith("1 ")
        assert lines[0].endswith("A")
        assert {"A", "B"} <= set("".join(lines))
        assert lines[-1].split() == ["0", "10"]
        assert max(map(len, lines)) == 30
    assert plot([Curve("A", "cyan", [])], width=30, height=6) == []
    assert plot([Curve("A", "cyan", [(3, 0.5)])], width=30, height=6)  # one point has no range
    bars = sparkline(down, Range(0, 10), Range(0, 1), width=10).plain
    assert (bars[0], bars[-1], len(bars)) == ("█", "▁", 6)  # it ends where the run ends


def test_a_run_that_resumed_counts_no_time_between_processes(tmp_path: Path) -> None:
    a = folder_of(tmp_path / "a", {2: [1.0]})
    with (a / "metrics.jsonl").open("a") as file:
        file.write('{"kind": "startup", "step": 2, "time": 900.0, "time/startup": 5.0}\n')
        file.write('{"kind": "rl", "step": 3, "time": 910.0, "eval/score": 1.0}\n')
    run = RecordedRun.read(a)
    assert run.seconds[3] == 5 + 20 + 5 + 10
    assert comparison.reached([run, run], 1.0) is not None
