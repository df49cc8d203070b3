"""Finds the files that a path of the config names: a file, a folder of files, or a data set in the Hub's local cache.

    train.jsonl    part.parquet    folder/    hf:openai/gsm8k:main:train

Nothing is downloaded.
"""

import os
import re
from pathlib import Path
from typing import NamedTuple

from titan_rl.config.toml import did_you_mean
from titan_rl.environment import cache_home

HUB = "hf:"
SUFFIXES = (".jsonl", ".parquet")
PART = re.compile(r"-(\d{5})-of-(\d{5})")
EXPECTED = "expected a JSONL or Parquet file"


class FileState(NamedTuple):
    """A file, and the values that change when it does."""

    path: Path
    modified: int
    size: int
    inode: int


def row_files(name: str, key: str) -> tuple[FileState, ...]:
    """Return the files of the path `name`, in the order in which they are read. `key` is the config's."""
    try:
        if name.startswith(HUB):
            paths = _of_hub(name, key)
        elif name and Path(name).is_dir():
            paths = _of_folder(Path(name), key)
        else:
            paths = [Path(name)]
        found = "no regular file" if name and paths[0].exists() else "none"
        states = [FileState(p, s.st_mtime_ns, s.st_size, s.st_ino) for p in paths if p.is_file() for s in [p.stat()]]
    except (OSError, ValueError) as error:  # a name too long, a loop of links, NUL
        if str(error).startswith(key):
            raise
        found, states, paths = str(error), [], [Path()]
    if len(states) < len(paths):
        hint = "; eval.size = 0 disables evaluation" if key == "task.eval_path" else ""
        raise FileNotFoundError(f"{key}: {EXPECTED}, found {found} at {name!r}{hint}")
    return tuple(states)


def _of_folder(folder: Path, key: str) -> list[Path]:
    found = [path for path in sorted(folder.iterdir()) if _has_rows(path)]
    if not found:
        raise FileNotFoundError(f"{key}: expected *.jsonl or *.parquet files in the folder {str(folder)!r}, found none")
    return found


def _has_rows(path: Path) -> bool:
    return path.suffix in SUFFIXES and not path.name.startswith((".", "_"))


def _of_hub(name: str, key: str) -> list[Path]:
    """Return the files of "hf:owner/name", "hf:owner/name:split" or "hf:owner/name:config:split" in the local cache."""
    repository, *parts = name.removeprefix(HUB).split(":")
    if repository.count("/") != 1 or len(parts) > 2 or not all((*repository.split("/"), *parts)):
        raise ValueError(f'{key}: expected "hf:owner/name", with ":split" or ":config:split" behind it, found {name!r}')
    folder = hub_cache() / f"datasets--{repository.replace('/', '--')}"
    ref, fetch = folder / "refs" / "main", f"`hf download {repository} --repo-type dataset`"
    snapshot = folder / "snapshots" / (ref.read_text().strip() if ref.is_file() else "none")
    files = [path.relative_to(snapshot) for path in sorted(snapshot.rglob("*")) if _has_rows(path) and path.is_file()]
    if not files:
        raise FileNotFoundError(f"{key}: expected {repository} in {hub_cache()}, found none: fetch it with {fetch}")
    chosen = [path for path in files if all(part in _words(path) for part in parts)]
    several = len({path.parent if parts else _split(path) for path in chosen}) > 1
    if not chosen or several:
        listed = ", ".join(map(str, files[:10])) + (", ..." if len(files) > 10 else "")
        wanted = f'":config:split" behind hf:{repository} that names some of its files'
        hint = did_you_mean(parts[-1], {word for path in files for word in _words(path)}) if parts else ""
        raise FileNotFoundError(f"{key}: expected {wanted}, found {name!r} and the files {listed}{hint}")
    _refuse_gaps(chosen, key, fetch)
    return [snapshot / path for path in chosen]


def hub_cache() -> Path:
    """Return the folder in which huggingface_hub keeps repositories."""
    home = os.environ.get("HF_HOME") or cache_home() / "huggingface"
    return Path(os.path.expanduser(os.environ.get("HF_HUB_CACHE") or Path(home, "hub")))


def _split(path: Path) -> Path:
    """Return a file's path without the number of its part."""
    return path.with_name(PART.sub("", path.stem))


def _words(path: Path) -> set[str]:
    """Return the names that a file may be found by: its folders, and its own name up to the number of a part."""
    stem = _split(path).name
    return {*path.parts[:-1], stem, *re.split(r"[-._]", stem)}


def _refuse_gaps(chosen: list[Path], key: str, fetch: str) -> None:
    """Raise FileNotFoundError unless all parts of a split are there: a download may have been interrupted."""
    there = {str(path) for path in chosen}
    for path in chosen:
        if part := PART.search(path.name):
            names = (f"-{number:05d}-of-{part[2]}" for number in range(int(part[2])))
            missing = [name for name in names if str(path).replace(part[0], name) not in there]
            if missing:
                raise FileNotFoundError(f"{key}: expected all parts of {path}, found no {missing[0]}: run {fetch}")
