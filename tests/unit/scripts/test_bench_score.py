"""What bench_score.py prints of the rows that it has measured."""

import pytest
from bench_score import TRL, rows_of_commit, summary


def row(way: str, seed: int, seconds: float, commit: str, reached: bool = True) -> dict[str, str]:
    given = {"way": way, "seed": str(seed), "seconds": str(seconds), "commit": commit}
    return given | {"score": "0.95", "reached": str(reached)}


ROWS = [
    row("titan_rl", 0, 100, "aaa111"),
    row(TRL, 0, 100, "aaa111"),
    row("titan_rl", 0, 20, "bbb222"),
    row("titan_rl", 1, 30, "bbb222"),
    row("titan_rl", 2, 600, "bbb222", reached=False),
    row(TRL, 0, 50, "bbb222"),
    row(TRL, 1, 50, "bbb222"),
    row(TRL, 2, 50, "bbb222"),
]


def test_ratios_are_of_one_commits_rows_and_of_each_seed() -> None:
    assert summary(rows_of_commit(ROWS, "bbb")) == [
        "titan_rl: 2 of 3 reached 0.95 after 25.0 (20.0 to 30.0) s",
        "TRL: 3 of 3 reached 0.95 after 50.0 (50.0 to 50.0) s",
        "titan_rl / TRL, by seed: 0.50 (0.40 to 0.60)",
    ]
    assert summary(rows_of_commit(ROWS, "aaa111"))[-1] == "titan_rl / TRL, by seed: 1.00 (1.00 to 1.00)"


def test_several_runs_of_a_seed_count_as_their_median() -> None:
    seconds = {"titan_rl": (10, 30, 14), TRL: (20, 40)}
    rows = [row(way, 0, each, "aaa111") for way, every in seconds.items() for each in every]
    assert summary(rows) == [
        "titan_rl: 3 of 3 reached 0.95 after 14.0 (10.0 to 30.0) s",
        "TRL: 2 of 2 reached 0.95 after 30.0 (20.0 to 40.0) s",
        "titan_rl / TRL, by seed: 0.47 (0.47 to 0.47)",
    ]


@pytest.mark.parametrize("commit", ["", "ccc"])
def test_a_commit_without_rows_is_refused_by_name(commit: str) -> None:
    with pytest.raises(SystemExit, match=rf"that has been measured \(aaa111, bbb222\), found '{commit}'"):
        rows_of_commit(ROWS, commit)
