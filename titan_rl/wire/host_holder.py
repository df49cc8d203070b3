"""Which run has a host: a file in the folder of the host's worker, which that run's agent locks and keeps current."""

import json
import time
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

RUN = "run"  # the file's name


class Holder(NamedTuple):
    """The run that has a host. Times are of the host's monotonic clock."""

    run: str
    again: float  # its controller has asked again by then, if it is alive
    ends: float  # its agent ends it then, if the controller does not ask again

    @property
    def silent(self) -> bool:
        return time.monotonic() > self.again

    @property
    def how_silent(self) -> str:
        return "is silent" if self.silent else "may be silent"


def holder_in(folder: Path) -> Holder:
    """Return which run has the host of the worker whose folder this is."""
    with suppress(OSError, ValueError, KeyError, TypeError):
        found = json.loads((folder / RUN).read_text())
        return Holder(str(found["run"]), float(found["again"]), float(found["ends"]))
    return Holder("another run", 0.0, 0.0)
