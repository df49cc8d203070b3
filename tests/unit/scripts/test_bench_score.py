"""What bench_score.py prints of the rows that it has measured."""

import pytest
from bench_score import TRL, rows_of_commit, summary


def row(way: str, seconds: float, commit: str, reached: bool = True) -> dict[str, str]:
    return {"way": way, "seconds": str(seconds), "score": "0.95", "reached": str(reached), "commit": commit}


ROWS = [
    row("titan_rl", 100, "aaa111"),
    row(TRL, 100, "aaa111"),
    row("titan_rl", 20, "bbb222"),
    row("titan_rl", 30, "bbb222"),
    row("titan_rl", 600, "bbb222", reached=False),
    row(TRL, 50, "bbb222"),
]


def test_ratios_are_of_one_commits_rows() -> None:
    expected = ["titan_rl: 2 of 3 reached 0.95 after 25.0 s (20.0 to 30.0)", "TRL: 1 of 1 reached 0.95 after 50.0 s"]
    lines = summary(rows_of_commit(ROWS, "bbb"))
    assert [lines[0], lines[1].partition(" (")[0], lines[2]] == [*expected, "titan_rl / TRL: 0.50"]
    assert summary(rows_of_commit(ROWS, "aaa111"))[-1] == "titan_rl / TRL: 1.00"


@pytest.mark.parametrize("commit", ["", "ccc"])
def test_a_commit_without_rows_is_refused_by_name(commit: str) -> None:
    with pytest.raises(SystemExit, match=rf"that has been measured \(aaa111, bbb222\), found '{commit}'"):
        rows_of_commit(ROWS, commit)
