"""Reads what W&B stores offline: a log of blocks, as LevelDB has them, of protobuf records."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from wandb.proto import wandb_internal_pb2

HEADER, BLOCK = 7, 32768
WHOLE, FIRST, LAST = 1, 2, 4  # parts of a record


def records(folder: Path) -> Iterator[Any]:
    """Yield the records of all offline runs in a folder, oldest run first."""
    for path in sorted(folder.glob("wandb/offline-run-*/*.wandb")):
        data, at, parts = path.read_bytes(), HEADER, b""
        while at + HEADER <= len(data):
            if BLOCK - at % BLOCK < HEADER:  # the rest of a block is padding
                at += BLOCK - at % BLOCK
                continue
            size, part = int.from_bytes(data[at + 4 : at + 6], "little"), data[at + 6]
            parts = (b"" if part in (WHOLE, FIRST) else parts) + data[at + HEADER : at + HEADER + size]
            at += HEADER + size
            if part in (WHOLE, LAST):
                record = wandb_internal_pb2.Record()  # pyright: ignore[reportAttributeAccessIssue]
                record.ParseFromString(parts)
                yield record


def history(folder: Path) -> list[dict[str, Any]]:
    """Return the points that were logged, in order."""
    return [
        {item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in record.history.item}
        for record in records(folder)
        if record.WhichOneof("record_type") == "history"
    ]
