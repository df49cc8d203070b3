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
            "_MEM_FORMAT_ENCODING",
        )
    ),
    (f"{DCP}.filesystem", "_StorageInfo"),
    ("collections", "OrderedDict"),
    ("pathlib", "Path"),
    ("pathlib", "PosixPath"),
    ("torch", "Size"),
    ("torch.serialization", "_get_layout"),
}
DTYPE = re.compile(r"(bfloat|complex|float|u?int)\d+\w*|bool")


class _Empty(dict[Any, Any]):
    """Stands for an instance of any class."""

    def __init__(self, *_: object) -> None:
        super().__init__()

    def __hash__(self) -> int:  # type: ignore[override]
        return id(self)

    def __setstate__(self, state: object) -> None: ...


class _Names(pickle.Unpickler):
    def find_class(self, module_name: str, global_name: str, /) -> Any:
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
