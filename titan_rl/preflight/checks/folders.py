"""Checks of where a run writes: its dump folder, and a run there that it resumes."""

import os
import tempfile
from collections.abc import Iterator
from dataclasses import fields, replace
from pathlib import Path

import titan_rl
from titan_rl.config.changes import valued
from titan_rl.config.sections import Config, TaskSection
from titan_rl.config.toml import PATHS, ConfigError, EarlierRun, as_toml, load_of_run
from titan_rl.preflight.refusal import problem
from titan_rl.preflight.shapes import shape_of
from titan_rl.record.checkpoints import Checkpoints
from titan_rl.record.run_names import FILES, FOLDERS
from titan_rl.wire.checkpoint_sums import FOLDER as CHECKPOINTS
from titan_rl.wire.model_shape import ModelShape

PATTERN = set("*?[")
OPERATION = ("reward_workers", "reward_seconds", "reward_memory_mb", "grader", "bad_rows", "eval_path", "eval_reward")
EXPERIMENT = (
    *(f"task.{field.name}" for field in fields(TaskSection) if field.name not in OPERATION),
    *(f"algorithm.{name}" for name in ("name", "advantage", "normalize", "credit", "ratio", "clip", "kl_in")),
    *("algorithm.teacher_weights", "algorithm.teacher_context", "teacher.template"),
    *("model.hf_assets_path", "model.vision", "environment.name", "environment.args"),
    *("reward_model.hf_assets_path", "teacher.hf_assets_path"),
)
"""Keys with whose values a run is another experiment. Others, such as rates and limits, may change at a resume."""


def check_folders(config: Config) -> Iterator[str]:
    name = config.job.dump_folder
    if not name.strip() or "://" in name or Path(name).absolute() in (Path("/"), Path(os.path.expanduser("~"))):
        yield f"job.dump_folder: expected the name of a folder on this machine, found {as_toml(name)}"
        return
    try:
        folder = Path(name).absolute()
        if pattern := sorted(PATTERN & set(str(folder))):
            found = f"which torch's safetensors writer takes for a pattern, found {as_toml(str(folder))}"
            yield f"job.dump_folder: expected a path without {' '.join(pattern)}, {found}"
            return
        if found := unwritable(folder):
            yield f"job.dump_folder: expected a folder that can be written, found {found}"
            return
        yield from _check_inputs(config, folder.resolve())
        if wrong := next((path for path in (folder / name for name in FOLDERS) if _is_file(path)), None):
            yield f"job.dump_folder: expected a folder at {wrong}, found a file"
        if wrong := next((path for path in own_files(folder) if os.path.lexists(path) and not path.is_file()), None):
            found = "a folder" if wrong.is_dir() else "something else: remove it"
            yield f"job.dump_folder: expected a file at {wrong}, found {found}"
    except (OSError, RuntimeError, ValueError) as error:  # too long, a loop of links
        yield f"job.dump_folder: expected the name of a folder, found {as_toml(name[:80])} ({error})"


def _check_inputs(config: Config, folder: Path) -> Iterator[str]:
    """Yield what the run reads and would overwrite or move away."""
    code = Path(titan_rl.__file__).resolve().parent
    if code in (folder, *folder.parents) or folder == code.parent:
        yield f"job.dump_folder: expected a folder outside this program's own code, found {as_toml(str(folder))}"
        return
    for key, name in _inputs(config):
        path = Path(name).resolve()
        why = ""
        if path == folder:
            why = "because a run writes there"
        elif folder in path.parents:
            first = path.relative_to(folder).parts[0]
            written = first in (*FILES, *FOLDERS)
            why = "because a run writes there" if written else "which job.fresh moves away" if config.job.fresh else ""
        if why:
            expected = f"a folder without {key} = {as_toml(name)}, {why}"
            yield f"job.dump_folder: expected {expected}, found {as_toml(str(folder))}"


def _inputs(config: Config) -> Iterator[tuple[str, str]]:
    """Yield the key and the path of every file and folder that the run reads, except the Hub's cache."""
    named = [(key, valued(config, key)) for key in PATHS if key != "job.dump_folder"]
    named += [(f"task.sources.{name}.path", table.get("path")) for name, table in config.task.sources.items()]
    named += [(f"eval.sets.{name}.path", table.get("path")) for name, table in config.eval.sets.items()]
    yield from ((key, path) for key, path in named if isinstance(path, str) and path and os.path.exists(path))


def own_files(folder: Path) -> list[Path]:
    """Return the files that a run opens. To open a FIFO waits for ever, and a device may have no end."""
    names = [*FILES, *(f"{name.removesuffix('.jsonl')}.superseded.jsonl" for name in FILES if ".jsonl" in name)]
    return [folder / name for name in names]


def _is_file(path: Path) -> bool:
    return os.path.lexists(path) and not path.is_dir()


def unwritable(folder: Path) -> str:
    """Return why files cannot be written to a folder that may not exist yet, or ""."""
    for part in (*reversed(folder.parents), folder):
        if len(os.fsencode(part.name)) > 255:
            return f"a name of {len(os.fsencode(part.name))} bytes in {str(folder)[:40]}..., of at most 255"
        if _is_file(part):
            return f"a link that leads to no folder at {part}" if part.is_symlink() else f"a file at {part}"
        if not os.path.lexists(part):
            break
    if len(os.fsencode(folder)) > 3500:  # the longest file of a run needs the rest of 4096
        return f"a path of {len(os.fsencode(folder))} bytes, of at most 3500"
    there = next(path for path in (folder, *folder.parents) if path.is_dir())
    try:
        with tempfile.TemporaryDirectory(prefix=".titan_rl-", dir=there) as probe:
            (Path(probe) / "file").write_bytes(b"x")
    except OSError as error:
        return f"{there}: {error.strerror or error}"
    return ""


def check_resume(config: Config, shape: ModelShape | None) -> Iterator[str]:
    """Refuse changes that a resumed run cannot make: the order of its prompts and the model in its checkpoint."""
    folder = Path(config.job.dump_folder)
    if config.job.fresh or not any(folder.glob("**/.metadata")):
        return
    try:
        before = load_of_run(folder)
    except EarlierRun as error:
        yield f"{folder}: {error} (or --job.fresh to start from scratch)"
        return
    except (ConfigError, OSError):
        return  # written by a later version: loading the checkpoint will tell
    if not any((folder / CHECKPOINTS).glob("**/.metadata")):
        return
    try:
        had = shape_of(before.model)
    except ValueError:
        return  # its model folder is gone: loading the checkpoint finds out
    hint = f"as in the run in {folder} (or --job.fresh to start from scratch)"
    if not config.checkpoint.enable:
        yield problem(config, "checkpoint.enable", f"true, {hint}")
    if not config.job.resume_changed:
        for key in EXPERIMENT:
            if (was := valued(before, key)) != (now := valued(config, key)):
                yield (
                    f"{key}: expected {as_toml(was)}, as in the run in {folder}, found {as_toml(now)}: choose another "
                    "job.dump_folder, or continue that run with --job.resume_changed"
                )
    sums = config.task.name == before.task.name != "jsonl"  # eval.size decides which of them are training examples
    for key in ("debug.seed", *(["task.name"] if config.job.resume_changed else []), *(["eval.size"] if sums else [])):
        if (was := valued(before, key)) != valued(config, key):
            yield problem(config, key, f"{as_toml(was)}, {hint}")
    for key in ("rank", "alpha", "targets", "base_dtype"):  # the checkpoint has adapters alone
        if (was := getattr(before.lora, key)) != getattr(config.lora, key) and was != "auto":
            yield problem(config, f"lora.{key}", f"{as_toml(was)}, {hint}")
    if shape is not None and replace(had, head=shape.head) != shape:
        yield f"[model]: expected the same shape {hint}, found another"
    policy, *others = Checkpoints.of(folder, config).folders
    if config.algorithm.averages and not before.algorithm.averages and Checkpoints((policy,)).whole_steps():
        yield problem(config, "algorithm.teacher_weights", f"a teacher without an average, {hint}")
    if others and Checkpoints((policy,)).whole_steps() and not Checkpoints.of(folder, config).whole_steps():
        yield problem(config, "algorithm.name", f"an algorithm without a critic, {hint}")
