"""docs/loops/first_loop.ipynb, as it is committed and as it runs."""

import base64
import json
from pathlib import Path
from typing import Any

import nbclient
import nbformat
import psutil
import pytest

from support.library_programs import assert_gone, environment, write_config

NOTEBOOK = Path(__file__).parents[2] / "docs/loops/first_loop.ipynb"
TINY = 'CONFIG, STEPS = "toy.toml", 2'
CHILDREN = "import psutil\nprint([child.pid for child in psutil.Process().children(recursive=True)])"
LARGEST = 40_000  # bytes of an image


@pytest.fixture
def book() -> Any:
    return nbformat.read(NOTEBOOK, as_version=4)


def outputs(cells: list[Any], kind: str) -> list[str]:
    """Return what cells show in one form, such as "text/html"."""
    shown = [output.get("data", {}) for cell in cells for output in cell.get("outputs", [])]
    return [data[kind] for data in shown if kind in data]


def assert_whole(cells: list[Any]) -> None:
    """Six groups, one plot, the scores at the end, and nothing else."""
    kinds = [output.output_type for cell in cells for output in cell.get("outputs", [])]
    assert kinds == ["display_data"] * 7 + ["stream"]
    tables = outputs(cells, "text/html")
    assert len(tables) == 6
    assert all(table.count("<tr>") == 5 for table in tables)
    assert "hf" in cells[-2].outputs[0].text


def test_the_committed_notebook_is_from_a_whole_run(book: Any) -> None:
    assert 6 <= len(book.cells) <= 14
    assert_whole(book.cells)
    code = [cell for cell in book.cells if cell.cell_type == "code"]
    assert [cell.execution_count for cell in code] == list(range(1, len(code) + 1)), "run once, from top to bottom"
    (image,) = outputs(book.cells, "image/png")
    assert len(base64.b64decode(image)) < LARGEST


def test_the_notebook_runs_and_leaves_no_process(book: Any, tmp_path: Path) -> None:
    write_config(tmp_path)
    (at,) = (at for at, cell in enumerate(book.cells) if "parameters" in cell.metadata.get("tags", []))
    book.cells[at].source = TINY
    probe = nbformat.v4.new_code_cell(CHILDREN)
    before_close = len(book.cells) - 2
    book.cells.insert(before_close, probe)
    resources = {"metadata": {"path": str(tmp_path)}}
    nbclient.NotebookClient(book, timeout=300, resources=resources).execute(env=environment())
    book.cells.remove(probe)
    assert_whole(book.cells)
    pids = json.loads(probe.outputs[0].text)
    assert pids
    assert_gone([psutil.Process(pid) for pid in pids if psutil.pid_exists(pid)])
    steps = [json.loads(line) for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in steps if line["kind"] == "rl"] == [1, 2]
