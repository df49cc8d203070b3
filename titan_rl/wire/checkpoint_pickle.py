"""Finds the calls that unpickling a checkpoint's .metadata would make. DCP unpickles it, and a pickle can call any
function.

The classes of DCP's own metadata are the only ones that a save writes. Everything else is refused by name before DCP
reads the file. No class is imported here: the pickle is read with an empty class in the place of each.
"""

import pickle
import re
from pathlib import Path
from typing import Any

DCP = "torch.distributed.checkpoint"
WRITTEN = {
    *(
        (f"{DCP}.metadata", name)
        for name in (
            "BytesStorageMetadata",
            "ChunkStorageMetadata",
            "Metadata",
            "MetadataIndex",
            "StorageMeta",
            "TensorProperties",
            "TensorStorageMetadata",
        )
    ),
    (f"{DCP}.filesystem", "_StorageInfo"),
    ("collections", "OrderedDict"),
    ("pathlib", "Path"),
    ("pathlib", "PosixPath"),
    ("torch", "Size"),
    ("torch.serialization", "_get_layout"),
}
ENUM = (f"{DCP}.metadata", "_MEM_FORMAT_ENCODING")
GETATTR = {("builtins", "getattr"), ("__builtin__", "getattr")}  # the latter up to protocol 2
MEMBER = re.compile(r"[A-Z][A-Z_]*")
DTYPE = re.compile(r"(bfloat|complex|float|u?int)\d+\w*|bool")


class _Empty(dict[Any, Any]):
    """Stands for an instance of any class."""

    def __init__(self, *_: object) -> None:
        super().__init__()

    def __hash__(self) -> int:  # type: ignore[override]
        return id(self)

    def __setstate__(self, state: object) -> None: ...


class _Enum(_Empty):
    """Stands for the only enum of DCP's metadata."""


def _member(owner: object, name: object) -> _Empty:
    """Stand for getattr, by which Python 3.11.0 to 3.11.3 pickle a member of an enum: it may read nothing else."""
    if owner is not _Enum or not isinstance(name, str) or not MEMBER.fullmatch(name):
        raise pickle.UnpicklingError(f"it would read the attribute {name!r}, which no checkpoint needs")
    return _Empty()


class _Names(pickle.Unpickler):
    def find_class(self, module_name: str, global_name: str, /) -> Any:
        if (module_name, global_name) == ENUM:
            return _Enum
        if (module_name, global_name) in GETATTR:
            return _member
        dtype = module_name == "torch" and DTYPE.fullmatch(global_name)
        if not dtype and (module_name, global_name) not in WRITTEN:
            raise pickle.UnpicklingError(f"it would call {module_name}.{global_name}, which no checkpoint needs")
        return _Empty


def foreign_content(path: Path) -> str:
    """Return why DCP must not unpickle a file; "" if it holds only what DCP writes."""
    if not path.is_file():  # to open a FIFO would wait for a writer
        return "it is no file"
    try:
        with path.open("rb") as file:
            _Names(file).load()
    except OSError as error:
        return error.strerror or str(error)
    except Exception as error:  # a damaged pickle raises almost anything
        return " ".join(f"{error or type(error).__name__}".split())[:200]
    return ""
