"""scripts/recipes.py writes docs/recipes.md as it is. Its runs are made by hand."""

import csv
import random
import statistics
from pathlib import Path

import pytest
import recipes
from recipes import PAGE, STORIES, cells, interval, kept, page

from titan_rl.config.toml import planned, shipped, variants


def test_the_page_is_what_the_rows_make() -> None:
    assert PAGE.read_text(encoding="utf-8") == page(), "run scripts/recipes.py"


def test_every_config_is_in_one_story() -> None:
    names = [name for story in STORIES.values() for name in story]
    assert sorted(names) == sorted({*shipped()} - {*variants(), *planned()})


def test_runs_of_recipes_csv_replace_earlier_ones(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = kept()["calc_llama"][recipes.SCORE]
    ran_on = {"machine": "2 x CPU", "commit": "0123456789ab", "load": "1.0"}
    seeds = random.Random(5).sample(range(9), 3)
    rows = [
        {
            "config": "calc_llama",
            "seed": str(seed),
            "curve": f"0:0.5000 4:0.{seed}000",
            "wall_s": "60",
            "audit": "clean",
            "why": "no problem",
            **ran_on,
        }
        for seed in seeds
    ]
    with (tmp_path / "recipes.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, rows[0])
        writer.writeheader()
        writer.writerows(rows)
    monkeypatch.setattr(recipes, "ROWS", tmp_path / "recipes.csv")
    found = kept()["calc_llama"][recipes.SCORE]
    assert (found, len(before)) == (rows, 3)
    row = cells("calc_llama", recipes.SCORE, found)
    mean = statistics.fmean(seed / 10 for seed in seeds)
    assert row[2:4] == ["0.500", interval([seed / 10 for seed in seeds])]
    assert row[3].startswith(f"{mean:.3f} ± ")
    assert row[5:] == [" ".join(map(str, sorted(seeds))), "60 (1)", "2 x CPU, 01234567", "clean", "no problem"]


def test_intervals_over_seeds_hold_the_mean_as_often_as_they_say() -> None:
    draw = random.Random(0)
    held = 0
    for _ in range(2000):
        mean, half = map(float, interval([draw.gauss(5, 1) for _ in range(draw.randint(2, 6))]).split(" ± "))
        held += abs(mean - 5) <= half
    assert 0.935 < held / 2000 < 0.965
    assert interval([0.25]) == "0.250"
