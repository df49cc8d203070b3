"""Runs of several seeds are compared as groups, paired by their seeds."""

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from titan_rl.tools import compare
from titan_rl.tools.inspect.recorded_run import RecordedRun
from titan_rl.tools.inspect.variants import Variant, mean_curve, mean_of, variants, welch


def write_run(path: Path, settings: dict[str, Any], scores: list[float]) -> Path:
    """Write a run with an evaluation after every step."""
    path.mkdir()
    tables: dict[str, dict[str, Any]] = {"training": {"steps": len(scores) - 1}, "task": {"eval_path": "test.jsonl"}}
    for key, value in settings.items():
        section, _, name = key.partition(".")
        tables.setdefault(section, {})[name] = value
    toml = (
        f"[{section}]\n" + "".join(f"{k} = {json.dumps(v)}\n" for k, v in t.items()) for section, t in tables.items()
    )
    (path / "config.toml").write_text("".join(toml))
    lines = [
        {"kind": "rl" if step else "eval", "step": step, "time": 100.0 + step, "eval/score": score, "time/step": 1.0}
        for step, score in enumerate(scores)
    ]
    (path / "metrics.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    return path


def compared(capsys: pytest.CaptureFixture[str], *argv: Any) -> dict[str, Any]:
    assert compare.main(["--json", *map(str, argv)]) == 0
    return json.loads(capsys.readouterr().out)["over_seeds"].get("heldout", {})


@pytest.mark.parametrize("case", range(4))
def test_generated_variants_are_paired_by_seed(case: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A gain of each seed, under effects of seeds that are larger: in any order of the folders."""
    rng = np.random.default_rng(case)
    names, seeds = ["a", "b", "c"][: 2 + case % 2], list(range(int(rng.integers(2, 5))))
    effects, gains = rng.normal(0.5, 0.2, len(seeds)), rng.normal(0.05, 0.01, (len(names), len(seeds)))
    at = [(k, seed) for k in range(len(names)) for seed in seeds]
    made = {
        (k, seed): write_run(
            tmp_path / f"{names[k]}{seed}",
            {"optimizer.lr": 0.1 * (k + 1), "debug.seed": seed},
            [float(effects[seed]), float(effects[seed] + k * gains[k, seed])],
        )
        for k, seed in at
    }
    order = [at[int(i)] for i in rng.permutation(len(at))]
    found = compared(capsys, *(made[each] for each in order))
    letters = ["".join(chr(65 + i) for i, each in enumerate(order) if each[0] == k) for k in range(len(names))]
    base = order[0][0]
    assert set(found["means"]) == set(letters)
    for k, name in enumerate(letters):
        last = found["means"][name]["last"]
        assert last["value"] == pytest.approx(float(np.mean(effects + k * gains[k])))
        assert last["low"] < last["value"] < last["high"]
        if k != base:
            difference = found[f"minus_{letters[base]}"][name]
            assert difference["pairs"] == len(seeds)
            expected = np.mean(k * gains[k] - base * gains[base])
            assert difference["last"]["value"] == pytest.approx(float(expected))
            assert difference["first"] == {"value": 0, "low": 0, "high": 0, "beyond_noise": False}
            assert difference["last"]["high"] - difference["last"]["low"] < last["high"] - last["low"]
    assert compare.main([str(made[each]) for each in order]) == 0
    out = capsys.readouterr().out
    assert f"mean of {letters[base]}" in out
    assert f"{letters[1 - base] if base < 2 else letters[0]} - {letters[base]}" in out
    assert f"paired, {len(seeds)} pairs of runs" in out


def test_seeds_that_do_not_match_and_repeated_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def run(name: str, lr: float, seed: int, score: float, **settings: Any) -> Path:
        return write_run(tmp_path / name, {"optimizer.lr": lr, "debug.seed": seed, **settings}, [0.0, score])

    first = [run(f"a{k}", 0.1, k, 0.5 + 0.01 * k) for k in range(3)]
    other = [run(f"b{k}", 0.2, k + 2, 0.7 + 0.01 * k) for k in range(3)]
    difference = compared(capsys, *first, *other)["minus_ABC"]["DEF"]
    assert difference["pairs"] == 0
    assert difference["last"]["value"] == pytest.approx(0.2)
    assert difference["last"]["beyond_noise"]
    alone = compared(capsys, *first, other[0])
    assert alone["means"]["D"]["last"] == {"value": 0.7, "low": None, "high": None}
    assert alone["minus_ABC"]["D"]["last"]["low"] is None
    assert compare.main([*map(str, first), str(other[0])]) == 0
    assert "interval unknown" in capsys.readouterr().out
    again = run("a0 again", 0.1, 0, 0.4)
    assert [each.name for each in variants([RecordedRun.read(each) for each in (*first, again)])] == ["ABC", "D"]
    assert compared(capsys, first[0], again) == {}
    (again / "config.toml").unlink()
    assert [each.name for each in variants([RecordedRun.read(each) for each in (again, *first)])] == ["A", "BCD"]


def test_a_key_groups_a_sweep(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Pairs agree in seed and rate."""
    folders = [
        write_run(
            tmp_path / f"{clip}{lr}{seed}",
            {"algorithm.clip": clip, "optimizer.lr": lr, "debug.seed": seed},
            [0.0, lr + 0.1 * seed + 0.05 * (clip == "sapo")],
        )
        for lr in (0.1, 0.2)
        for seed in (0, 1)
        for clip in ("ratio", "sapo")
    ]
    difference = compared(capsys, *folders, "--by", "algorithm.clip")["minus_ACEG"]["BDFH"]
    assert difference["pairs"] == 4
    assert difference["last"]["value"] == pytest.approx(0.05)
    assert difference["last"]["high"] == pytest.approx(0.05)
    assert set(compared(capsys, *folders)["means"]) == {"AC", "BD", "EG", "FH"}
    assert compare.main(["--by", "training.steps", *map(str, folders)]) == 2
    expected = "--by: expected a key that differs between the runs (algorithm.clip, optimizer.lr, debug.seed)"
    assert expected in capsys.readouterr().err


def test_intervals_hold_the_mean_nineteen_times_of_twenty() -> None:
    rng = np.random.default_rng(0)
    for n in (2, 3, 5, 12):
        draws = rng.normal(0.0, 1.0, (2, 1500, n))
        means = [mean_of(draw.tolist()) for draw in draws[0]]
        assert np.mean([mean.low <= 0 <= mean.high for mean in means]) == pytest.approx(0.95, abs=0.02)
        found = [welch(a.tolist(), b.tolist()) for a, b in zip(*draws, strict=True)]
        assert np.mean([each.low <= 0 <= each.high for each in found]) > 0.93
    assert math.isnan(mean_of([1.0]).low)
    assert not welch([1.0], [2.0, 2.0]).beyond_noise
    huge = [1e308, 1e308, -1e308]
    assert not welch(huge, [0.0, 1.0]).beyond_noise
    assert mean_curve(Variant({("0",): 0, ("1",): 1}), [[(1, 1e308)], [(1, 1e308)]]) == [(1, math.inf)]


def test_a_mean_curve_has_the_steps_of_all_seeds() -> None:
    pair = Variant({("0",): 0, ("1",): 2, ("2",): 3})
    assert mean_curve(pair, [[(1, 1.0), (2, 2.0)], [(1, 9.0)], [(1, 3.0)], []]) == [(1, 2.0)]
    assert mean_curve(pair, [[], [(1, 9.0)], [], []]) == []
