"""TensorBoard curves of one event folder, written without torch."""

import os
import socket
import time
from collections.abc import Mapping, Sequence
from itertools import count
from pathlib import Path

from tensorboard.compat.proto.event_pb2 import Event, SessionLog  # pyright: ignore[reportAttributeAccessIssue]
from tensorboard.compat.proto.summary_pb2 import (
    HistogramProto,  # pyright: ignore[reportAttributeAccessIssue]
    Summary,  # pyright: ignore[reportAttributeAccessIssue]
    SummaryMetadata,  # pyright: ignore[reportAttributeAccessIssue]
)
from tensorboard.compat.proto.tensor_pb2 import TensorProto  # pyright: ignore[reportAttributeAccessIssue]
from tensorboard.compat.proto.tensor_shape_pb2 import (
    TensorShapeProto,  # pyright: ignore[reportAttributeAccessIssue]
)
from tensorboard.compat.proto.types_pb2 import DT_STRING  # pyright: ignore[reportAttributeAccessIssue]
from tensorboard.summary.writer.record_writer import RecordWriter

from titan_rl.record.metric_docs import DOCS
from titan_rl.wire.types import RATIO_EDGES

_files = count()  # event files that this process has opened


class Curves:
    """Scalars, histograms and texts.

    The START event removes the points that an earlier process wrote from `first` on.
    """

    def __init__(self, folder: Path, first: int) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        # TensorBoard reads files in the order of their names.
        name = f"events.out.tfevents.{int(time.time()):010d}.{socket.gethostname()}.{os.getpid()}.{next(_files):04d}"
        self._file = (folder / name).open("wb")
        self._records = RecordWriter(self._file)
        self._described: set[str] = set()
        self._add(Event(wall_time=time.time(), file_version="brain.Event:2"))
        start = SessionLog(status=SessionLog.START)
        self._add(Event(wall_time=time.time(), step=first, session_log=start))

    def write(self, step: int, scalars: Mapping[str, float], histograms: Mapping[str, Sequence[float]]) -> None:
        values = [Summary.Value(tag=t, simple_value=v, metadata=self._metadata(t)) for t, v in scalars.items()]
        values += [Summary.Value(tag=tag, histo=histogram(tag, counts)) for tag, counts in histograms.items()]
        self._add(Event(wall_time=time.time(), step=step, summary=Summary(value=values)))
        self._records.flush()

    def text(self, tag: str, step: int, markdown: str) -> None:
        shape = TensorShapeProto(dim=[TensorShapeProto.Dim(size=1)])
        tensor = TensorProto(dtype=DT_STRING, tensor_shape=shape, string_val=[markdown.encode()])
        kind = SummaryMetadata(plugin_data=SummaryMetadata.PluginData(plugin_name="text"))
        value = Summary.Value(tag=f"{tag}/text_summary", metadata=kind, tensor=tensor)
        self._add(Event(wall_time=time.time(), step=step, summary=Summary(value=[value])))
        self._records.flush()

    def close(self) -> None:
        self._records.close()

    def _add(self, event: Event) -> None:
        self._records.write(event.SerializeToString())

    def _metadata(self, tag: str) -> SummaryMetadata | None:
        """Return the tag's description for its first point, and None for later ones."""
        if tag not in DOCS or tag in self._described:
            return None
        self._described.add(tag)
        return SummaryMetadata(summary_description=DOCS[tag])


def histogram(tag: str, counts: Sequence[float]) -> HistogramProto:
    """Return TensorBoard's histogram of `counts`."""
    edges = edges_of(tag, counts)
    return HistogramProto(min=edges[0], max=edges[-1], num=sum(counts), bucket_limit=edges[1:], bucket=counts)


def edges_of(tag: str, counts: Sequence[float]) -> list[float]:
    """Return the edges of a histogram's buckets.

    The buckets of ratios are between RATIO_EDGES; the last has no end and is drawn up to twice its start. The buckets
    of ages are centered on the whole numbers from 0 on.
    """
    if tag == "ratio/histogram":
        return [*RATIO_EDGES[:-1], 2 * RATIO_EDGES[-2]]
    return [k - 0.5 for k in range(len(counts) + 1)]
