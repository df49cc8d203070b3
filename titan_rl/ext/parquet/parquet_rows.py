"""Reads the rows of Parquet files as if they were JSONL files."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

MOST_ROWS = 2**24  # a file of a few kilobytes can have more than any memory holds
BATCH = 1024  # rows that are in memory as Arrow has them


def parquet_rows(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the place of each row (rows count from 1) and the row. Raise ValueError if the file cannot be read."""
    import pyarrow  # 0.2 s, which most runs do not need
    import pyarrow.parquet

    try:
        with pyarrow.parquet.ParquetFile(path) as file:
            names = file.schema_arrow.names
            if twice := next((name for name in names if names.count(name) > 1), ""):
                raise ValueError(f"the column {twice!r} twice")
            if (count := file.metadata.num_rows) > MOST_ROWS:
                raise ValueError(f"{count:,} rows, of at most {MOST_ROWS:,}")
            number = 0
            for batch in file.iter_batches(BATCH):
                for row in batch.to_pylist():
                    number += 1
                    yield f"{path}:{number}", {name: _as_json(value) for name, value in row.items()}
    except (pyarrow.ArrowException, ValueError) as error:  # UnicodeDecodeError too
        raise ValueError(f"expected a Parquet file that can be read, found {error} in {path}") from error


def _as_json(value: Any) -> Any:
    """Return a value as JSON has it. Arrow gives each message of a column the keys of all others, without a value."""
    if isinstance(value, list):
        return [_as_json(item) for item in value]
    if isinstance(value, dict):
        found = {key: _as_json(item) for key, item in value.items()}
        message = {"role", "content"} <= found.keys()
        return {k: v for k, v in found.items() if not (message and v is None and k != "content")}
    return value
