"""Checks of a folder's safetensors files against a model's shape, by their headers alone."""

import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from titan_rl.wire.model_shape import ModelShape

FLOATS = ("F64", "F32", "BF16", "F16")
MOST_NAMED = 5  # tensors of a kind that a message names


class Header(NamedTuple):
    """A tensor as its file's header describes it."""

    file: str
    dtype: str
    shape: tuple[int, ...]


def check_weights(folder: Path, key: str, shape: ModelShape | None = None, *, head: bool = True) -> Iterator[str]:
    """Check that the safetensors files are whole and that an index agrees with them. With a `shape`, check that they
    have its tensors, with its output head if `head`. Other tensors are not looked for."""
    paths = sorted(folder.glob("*.safetensors"))
    index = folder / "model.safetensors.index.json"
    if index.exists():
        listed = _listed(index)
        if isinstance(listed, str):
            yield f"{key}: expected a weight_map in {index}, found {listed}"
            return
        if missing := sorted({file for file in listed.values() if not (folder / file).is_file()}):
            yield f"{key}: expected every file listed in {index}, found no {', '.join(missing)}"
            return
    else:
        listed = None
        if not paths:
            yield f"{key}: expected *.safetensors in {folder}, found none"
            return
    tensors: dict[str, Header] = {}
    unreadable = False
    for path in paths:  # all of the folder's, as they are loaded whatever the index says
        found = _headers(path)
        unreadable |= isinstance(found, str)
        if isinstance(found, str):
            yield f"{key}: expected a whole safetensors file at {path}, found {found}"
            continue
        if twice := sorted(found.keys() & tensors.keys()):
            other = tensors[twice[0]].file
            yield f"{key}: expected each tensor in one file of {folder}, found {twice[0]} in {other} and {path.name}"
        tensors |= found
    if unreadable:
        return
    if listed is not None and (lost := [name for name, file in listed.items() if _file(tensors, name) != file]):
        yield f"{key}: expected the tensors listed in {index}, found no {lost[0]} in {listed[lost[0]]}"
        return
    if shape is not None:
        yield from _check_tensors(tensors, folder, key, shape, head)


def _check_tensors(
    tensors: Mapping[str, Header], folder: Path, key: str, shape: ModelShape, head: bool
) -> Iterator[str]:
    expected = shape.hf_tensors(head=head)
    if (own := shape.hf_head_weight) in expected and own not in tensors:
        why = "because tie_word_embeddings is false" if shape.head == "lm" else "the head of a reward model"
        yield f"{key}: expected {own} in the weights of {folder}, {why}, found none"
    if missing := [name for name in expected if name not in tensors and name != own]:
        named = ", ".join(missing[:MOST_NAMED]) + (", ..." if len(missing) > MOST_NAMED else "")
        yield f"{key}: expected the {len(expected)} tensors of {folder / 'config.json'}, found no {named}"
    there = {name: tensors[name] for name in expected if name in tensors}
    sizes = [f"{list(t.shape)} of {n} (not {list(expected[n])})" for n, t in there.items() if t.shape != expected[n]]
    if sizes:
        more = f", and {len(sizes) - 1} other tensors" if len(sizes) > 1 else ""
        yield f"{key}: expected the sizes of {folder / 'config.json'} in the weights, found {sizes[0]}{more}"
    if odd := [f"{t.dtype} of {name}" for name, t in there.items() if t.dtype not in FLOATS]:
        yield f"{key}: expected weights in one of {', '.join(FLOATS)} in {folder}, found {odd[0]}"


def _file(tensors: Mapping[str, Header], name: str) -> str:
    return tensors[name].file if name in tensors else ""


def _listed(index: Path) -> dict[str, str] | str:
    """Return an index's weight_map (tensor -> file), or what is there instead."""
    try:
        found = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
    except (OSError, KeyError, TypeError, ValueError, RecursionError) as error:
        return repr(error)
    if not isinstance(found, dict) or not found:
        return json.dumps(found)[:80]
    if odd := [name for name, file in found.items() if not isinstance(file, str) or Path(file).name != file]:
        return f"{odd[0]} in {json.dumps(found[odd[0]])[:80]}, which is no file of the folder"
    if odd := [file for file in found.values() if not re.search(r"\d", file)]:  # TorchTitan reads the number
        return f"{odd[0]}, a file without a number (if the folder has no other, delete the index)"
    return found


def _headers(path: Path) -> dict[str, Header] | str:
    """Return the tensors of a safetensors file, or why it cannot be read. Nothing but its header is."""
    from safetensors import safe_open

    opened: Any = safe_open
    try:
        with path.open("rb"), opened(str(path), framework="np") as file:
            slices = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118 (it is no dict)
            return {n: Header(path.name, s.get_dtype(), tuple(s.get_shape())) for n, s in slices.items()}
    except Exception as error:  # SafetensorError, OSError
        return str(error)
