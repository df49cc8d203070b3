"""Rows that a run leaves out are in its files."""

import json
from pathlib import Path

from titan_rl.config.sections import Config
from titan_rl.record.ledger import Ledger, bounds_of, events
from titan_rl.record.run_history import History
from titan_rl.record.run_log import RunLog
from titan_rl.record.summary import summarize


def test_the_number_of_bad_rows_is_in_the_summary_and_in_the_ledger(tmp_path: Path) -> None:
    with RunLog(tmp_path, "test", Config()) as log:
        log.startup(0, 1.0, 3)
    assert summarize(tmp_path, "test", Config())["bad_rows"] == 3
    with RunLog(tmp_path, "test", Config(), resume_step=0) as log:  # the file has been mended
        log.startup(0, 1.0)
    assert summarize(tmp_path, "test", Config())["bad_rows"] == 0
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [line.get("bad_rows") for line in lines] == [3, None]

    with Ledger(tmp_path) as ledger:
        ledger.begun(0, 0, (), bounds=bounds_of(Config()), bad_rows=3)
    (begun,) = events(tmp_path)
    assert begun["bad_rows"] == 3
    assert History.of(tmp_path).problems == []
