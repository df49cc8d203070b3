"""TorchTitan's checkpoints, written with checksums (wire/checkpoint_sums.py), and read without executing anything.

each rank    write_data: sums its file while it writes it ──┐ gathered with DCP's own results
rank 0       finish: .metadata.tmp, checksums.json, and only then .metadata

DCP unpickles .metadata and every value that is no tensor. load_checkpoint refuses both if they name code.
"""

import io
import logging
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import futures
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.filesystem import FileSystem, FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import ReadItem, SavePlan, SavePlanner
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType, AsyncSaveResponse, async_save, save
from torch.distributed.checkpoint.storage import WriteResult
from torchtitan.components.checkpoint import MODEL, AsyncMode, CheckpointManager
from torchtitan.tools.utils import GarbageCollection

from titan_rl.actors.titan.private import FileWriter
from titan_rl.wire.checkpoint_pickle import foreign_content
from titan_rl.wire.checkpoint_sums import METADATA, FileSum, SummedFile, write_sums


class WrittenParts(list[WriteResult]):
    """What a rank wrote, as DCP gathers it, with the sums of its files."""

    sums: dict[str, FileSum]


class SummedFiles(FileSystem):
    def __init__(self) -> None:
        self.sums: dict[str, FileSum] = {}

    @contextmanager
    def create_stream(self, path: Any, mode: str) -> Iterator[Any]:
        with super().create_stream(path, mode) as stream:
            summed = SummedFile(stream)
            yield summed
        self.sums[Path(path).name] = summed.sum

    def rename(self, path: Any, new_path: Any) -> None:
        """Move .metadata into place, which makes the checkpoint count."""
        self.sums[METADATA] = self.sums.pop(Path(path).name)
        write_sums(Path(path).parent, self.sums, Path(path).parent.name)
        super().rename(path, new_path)


class SummedWriter(FileWriter):
    def __init__(self, folder: str) -> None:
        super().__init__(folder)
        self.fs = self._files = SummedFiles()

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Arrive in the process that writes checkpoints. DCP logs each request there to the terminal: mute that."""
        logging.getLogger().setLevel(logging.WARNING)
        vars(self).update(state)

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> futures.Future[list[WriteResult]]:
        parts = WrittenParts(super().write_data(plan, planner).value())
        parts.sums = self._files.sums
        written: futures.Future[list[WriteResult]] = futures.Future()
        written.set_result(parts)
        return written

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        for parts in results:
            assert isinstance(parts, WrittenParts)
            self._files.sums |= parts.sums
        super().finish(metadata, results)


class PlainMetadata(FileSystemReader):
    """DCP's reader. It unpickles a .metadata only if that holds nothing but DCP's own classes."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        path = Path(self.path) / METADATA
        if foreign := foreign_content(path):
            raise ValueError(f"{path} is refused: {foreign}")
        return super().read_metadata(*args, **kwargs)


def has_state(checkpoint: Path, name: str) -> bool:
    """Return True if a checkpoint has a state or a value of this name."""
    return name in PlainMetadata(checkpoint).read_metadata().state_dict_metadata


class PlainValues(DefaultLoadPlanner):
    """DCP's plan of a load. It unpickles a value that is no tensor only if torch's list of safe classes covers it."""

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        try:
            torch.load(value, weights_only=True)
        except Exception as error:
            why = " ".join(str(error).split())[:500]
            raise ValueError(f"the value {read_item.storage_index.fqn} is refused: {why}") from None
        value.seek(0)
        super().load_bytes(read_item, value)


def load_checkpoint(state_dict: dict[str, Any], folder: str | Path) -> None:
    """Load `state_dict` in place from a checkpoint of any mesh."""
    load(state_dict, storage_reader=PlainMetadata(folder), planner=PlainValues())


class SummedCheckpoints(CheckpointManager):
    """TorchTitan's manager with our writer. The controller decides when to save, what to load and what to delete."""

    @dataclass(kw_only=True, slots=True)
    class Config(CheckpointManager.Config):
        pass

    def dcp_save(
        self,
        state_dict: dict[str, Any],
        checkpoint_id: str,
        async_mode: AsyncMode,
        enable_garbage_collection: bool = False,
        to_hf: bool = False,
    ) -> Future[Any] | AsyncSaveResponse | None:
        writer, saving = SummedWriter(checkpoint_id), None
        if async_mode == AsyncMode.ASYNC:
            saving = async_save(state_dict, storage_writer=writer, process_group=self.pg)
        elif async_mode == AsyncMode.ASYNC_WITH_PINNED_MEM:
            saving = async_save(
                state_dict,
                storage_writer=writer,
                process_group=self.pg,
                async_checkpointer_type=AsyncCheckpointerType.PROCESS,
                async_stager=self.stager,
            )
        else:
            save(state_dict, storage_writer=writer)
        if enable_garbage_collection:
            GarbageCollection.collect("after a checkpoint")
        return saving

    def dcp_load(self, state_dict: dict[str, Any], checkpoint_id: str, from_hf: bool, from_quantized: bool) -> None:
        assert not from_hf, "model folders are read by TitanModel.read"
        load_checkpoint(state_dict, checkpoint_id)
        self.states[MODEL].load_state_dict(state_dict)
