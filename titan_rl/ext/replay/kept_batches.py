"""Keeps the samples of the last steps in RUN/batches, so that a step can be made again (titan_rl replay).

    step-N.npz    all samples end to end: tokens, mask, columns, side columns; and each sample's length and update

The files hold arrays only. A step is written before its updates are made: also one that fails can be made again.
"""

import io
import re
import zipfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from titan_rl.record.lines import must_write, replacing
from titan_rl.wire.side_columns import names_in, side_column
from titan_rl.wire.types import Sample

FOLDER = "batches"
OWN = {"update", "length", "prompt", "sequence", "tokens", "mask", "column"}  # other arrays are of side columns
FILE = re.compile(r"step-(\d+)\.npz")
Updates = Sequence[Sequence[Sample]]


class KeptBatches:
    def __init__(self, folder: Path, steps: int) -> None:
        """Keep the last `steps` steps of the run in `folder`."""
        self._folder, self._steps = folder / FOLDER, steps

    @property
    def steps(self) -> list[int]:
        """Return the steps that are kept."""
        if not self._folder.is_dir():
            return []
        return sorted(int(found[1]) for path in self._folder.iterdir() if (found := FILE.fullmatch(path.name)))

    def write(self, step: int, updates: Updates) -> None:
        """Write a step's updates, and delete older ones beyond the limit."""
        path = self._folder / f"step-{step}.npz"
        with must_write(path):
            self._folder.mkdir(exist_ok=True)
            buffer = io.BytesIO()
            np.savez(buffer, **_arrays(updates))
            with replacing(path) as file:
                file.write(buffer.getbuffer())
            for other in self.steps:
                if not step - self._steps < other <= step:  # later ones are of a history that was undone
                    (self._folder / f"step-{other}.npz").unlink()

    def read(self, step: int) -> list[list[Sample]]:
        """Return a step's updates. Raise ValueError if the file is damaged."""
        path = self._folder / f"step-{step}.npz"
        try:
            with np.load(path, allow_pickle=False) as found:
                return _updates({name: found[name] for name in found.files})
        except (ValueError, KeyError, IndexError, EOFError, zipfile.BadZipFile) as error:
            raise ValueError(f"{path}: expected the samples of a step, found {error}") from error


def _arrays(updates: Updates) -> dict[str, Any]:
    samples = [sample for update in updates for sample in update]
    arrays: dict[str, Any] = {
        "update": np.repeat(np.arange(len(updates)), [len(update) for update in updates]),
        "length": np.array([len(sample.tokens) for sample in samples], np.int64),
        "prompt": np.array([sample.prompt for sample in samples], np.int64),
        "sequence": np.array([sample.sequence for sample in samples], np.int64),
        "tokens": _joined([sample.tokens for sample in samples], np.int32),
        "mask": _joined([sample.mask for sample in samples], np.int8),
    }
    for name in samples[0].columns if samples else ():
        arrays[f"column_{name}"] = _joined([sample.columns[name] for sample in samples], np.float32)
    for name in names_in(samples):
        arrays |= side_column(name).arrays(samples)
    return arrays


def _joined(parts: Sequence[Any], dtype: Any) -> np.ndarray:
    return np.concatenate([np.asarray(part, dtype) for part in parts]) if parts else np.zeros(0, dtype)


def _updates(arrays: dict[str, np.ndarray]) -> list[list[Sample]]:
    ends = arrays["length"].cumsum()
    others = {name.partition("_")[0] for name in arrays} - OWN
    extras = {name: side_column(name).of_arrays(arrays) for name in others}
    columns = {name.removeprefix("column_"): values for name, values in arrays.items() if name.startswith("column_")}
    updates: list[list[Sample]] = [[] for _ in range(int(arrays["update"].max(initial=-1)) + 1)]
    for i, end in enumerate(ends):
        own = slice(end - arrays["length"][i], end)
        sample = Sample(
            arrays["tokens"][own],
            arrays["mask"][own],
            {name: values[own] for name, values in columns.items()},  # pyright: ignore[reportArgumentType]
            int(arrays["prompt"][i]),
            int(arrays["sequence"][i]),
            {name: values[i] for name, values in extras.items()},
        )
        updates[arrays["update"][i]].append(sample)
    return updates
