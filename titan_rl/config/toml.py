"""Read TOML files into a Config, and write a Config as TOML.

    find("grpo_llama") -> path    load(path, [("training.steps", "20")]) -> Config    to_toml(config) -> text

A file may name another one to start from: base = "grpo_llama" (a shipped config) or base = "../mine.toml" (relative to
the file). Reading does not stop at the first problem: one ConfigError lists all of them.
"""

import ast
import contextlib
import difflib
import functools
import inspect
import itertools
import json
import math
import os
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any, Literal, get_args, get_origin, get_type_hints

import tomli

from titan_rl.config.choices import NestedTables, Table, Tables
from titan_rl.config.foreign_names import VALUES, foreign_hint
from titan_rl.config.plain_files import bytes_of
from titan_rl.config.policies import NAME, POLICIES, of_flags, own_tables, shared
from titan_rl.config.presets import algorithm_of
from titan_rl.config.removed_keys import REMOVED, RENAMED, Renamed
from titan_rl.config.sections import Config

SCALARS = (bool, int, float, str)
SHIPPED = Path(__file__).parents[1] / "train_configs"
PLANNED = SHIPPED / "planned"
"""Configs that never ran on the hardware that they are for."""
VARIANTS = SHIPPED / "variants.toml"
"""Configs that differ from another one in a few keys: a table each. VARIANTS / NAME stands for one of them."""
CONFIG = "config.toml"
"""Name of the file that holds a run's config, in its dump folder."""
NO_CONFIG = "--config: expected a TOML file or a shipped config"
"""Begin of the message that refuses a config's name."""
MOST_BYTES = 2**20
"""Size of a TOML file, at most: a larger file is not a config."""
REMOVED_SECTIONS = dict.fromkeys(name.partition(".")[0] for name in REMOVED)


class ConfigError(Exception):
    """Everything that is wrong with a configuration, one line per problem."""

    def __init__(self, problems: Sequence[str]) -> None:
        super().__init__("\n".join(problems))
        self.problems = list(problems)


class EarlierRun(ConfigError):
    """A run's config has a removed key on which its files depend: this version cannot read them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Key:
    """One key of one section, as sections.py declares it."""

    type: Any  # bool, int, float, str, list[int], list[str], a table (choices.py), or a Literal of strings and booleans
    default: Any
    doc: str
    ge: float | None = None
    gt: float | None = None
    le: float | None = None
    lt: float | None = None
    own: bool = False  # the name of a user's function is a value, too
    named: Mapping[str, Any] = field(default_factory=dict)  # methods.py: the values, with their descriptions

    @property
    def choices(self) -> tuple[str | bool, ...]:
        return tuple(self.named) or (get_args(self.type) if get_origin(self.type) is Literal else ())

    @property
    def is_switch(self) -> bool:
        """Return whether the flag may stand without a value, for true."""
        return self.type is bool or True in self.choices

    @property
    def kind(self) -> str:
        return (
            " | ".join([*map(as_text, self.choices), *["package.module:function"] * self.own])
            or f"{inspect.formatannotation(self.type)} {self.range}".rstrip()
        )

    @property
    def range(self) -> str:
        if self.ge is not None and self.ge == self.le:
            return f"= {self.ge:g}"
        limits = ((">=", self.ge), (">", self.gt), ("<=", self.le), ("<", self.lt))
        digits = "d" if self.type is int else "g"
        return " and ".join(f"{sign} {limit:{digits}}" for sign, limit in limits if limit is not None)

    @property
    def expected(self) -> str:
        if self.choices:
            own = ', or your own "package.module:function"' if self.own else ""
            return "one of " + ", ".join(map(as_toml, self.choices)) + own
        nouns = {bool: "true or false", int: "an integer", float: "a number", str: "a string"}
        many = {
            list[int]: "a list of integers",
            list[str]: "a list of strings",
            Table: "a table of texts, numbers and booleans",
            Tables: "named tables of texts, numbers and booleans",
            NestedTables: "named tables of texts, numbers, booleans, and lists or tables of these",
        }
        return f"{(nouns | many)[self.type]} {self.range}".rstrip()

    def accepts(self, value: Any) -> bool:
        if self.own and ":" in str(value):
            return type(value) is str
        if self.choices:
            return any(type(value) is type(choice) and value == choice for choice in self.choices)  # 1 == True
        if get_origin(self.type) is list:
            return type(value) is list and all(type(item) in get_args(self.type) for item in value)
        if self.type == Table:
            return _is_table(value)
        if self.type == Tables:
            return type(value) is dict and all(map(_is_table, value.values()))
        if self.type == NestedTables:
            return type(value) is dict and all(type(each) is dict and _is_table(_flat(each)) for each in value.values())
        return (
            type(value) is self.type  # not isinstance: bool is a subclass of int
            and (self.type is not float or math.isfinite(value))
            and (self.ge is None or value >= self.ge)
            and (self.gt is None or value > self.gt)
            and (self.le is None or value <= self.le)
            and (self.lt is None or value < self.lt)
        )

    def parse(self, text: str) -> Any:
        """Parse a flag's text as this key's type. Text that does not parse stays text, which `accepts` refuses."""
        with contextlib.suppress(KeyError, ValueError, RecursionError):
            if self.is_switch and text not in self.choices:
                return {"true": True, "false": False}[text.lower()]
            if self.type in (int, float) and text.isascii():  # Python also reads the digits of other scripts
                return self.type(text)
            if self.type == list[str] and not text.lstrip().startswith("["):
                return [item.strip() for item in text.split(",") if item.strip()]
            if self.type in (Table, Tables, NestedTables):
                return tomli.loads(f"table = {text}")["table"]
            if get_origin(self.type) is list:
                return json.loads(text if text.lstrip().startswith("[") else f"[{text}]")
        return text


PATHS = ("job.dump_folder", "task.path", "task.eval_path", "task.chat_template", "hosts.tls", "environment.python")
PATHS += tuple(f"{section}.hf_assets_path" for section in ("model", "critic", "reward_model", "teacher"))
"""Keys in which "~" is the home folder. A shell does not replace it in --key=~/x."""


@functools.cache
def schema() -> dict[str, dict[str, Key]]:
    """Return every section and key, in the order of Config."""
    described = docs()
    return {
        section: {
            key.name: Key(
                type=key.type,
                default=getattr(kind(), key.name),
                doc=" ".join([described[section][key.name], *_summaries(key.metadata.get("named", {}))]),
                **key.metadata,
            )
            for key in fields(kind)
        }
        for section, kind in get_type_hints(Config).items()
    }


def _summaries(named: Mapping[str, Any]) -> list[str]:
    """Return one text of what the values of a key are, if they have summaries."""
    texts = [f'"{name}": {entry.summary}' for name, entry in named.items() if getattr(entry, "summary", "")]
    return ["; ".join(texts) + "."] if texts else []


def docs() -> dict[str, dict[str, str]]:
    """Map section -> key -> the string literal below the field, read from the source because Python discards it."""
    described: defaultdict[str, dict[str, str]] = defaultdict(dict)
    for section, kind in get_type_hints(Config).items():
        for declared in kind.__mro__[-2::-1]:  # without object; a section's own keys come last
            (node,) = ast.parse(inspect.getsource(declared)).body
            assert isinstance(node, ast.ClassDef)
            for pair in itertools.pairwise(node.body):
                match pair:
                    case ast.AnnAssign(target=ast.Name(id=key)), ast.Expr(value=ast.Constant(value=str(doc))):
                        described[section][key] = " ".join(doc.split())
    return dict(described)


def find(name: str) -> Path:
    """Return the file at that path, or the shipped config of that name. Of one in variants.toml, return its place."""
    bare = Path(name).name == name
    places = [folder / file for folder in (SHIPPED, PLANNED) for file in (name, f"{name}.toml")]
    for candidate in (Path(name), *(places if bare else ())):
        if os.path.isfile(candidate):  # unlike Path.is_file, never raises
            return candidate
    if bare and name.removesuffix(".toml") in variants():
        return VARIANTS / name.removesuffix(".toml")
    names, file = shipped(), Path(name, "config.toml")
    if name and os.path.isdir(name):
        hint = f"; did you mean {str(file)!r}?" if os.path.isfile(file) else ""
        found = f"the folder {as_toml(name)}{hint}"
    else:
        found = f"{as_toml(name)}{did_you_mean(Path(name).stem, names)}" if name else "none"
    raise ConfigError([f"{NO_CONFIG}, found {found}"])


def shipped() -> list[str]:
    """Return the names of all shipped configs."""
    files = (path.stem for path in SHIPPED.glob("*.toml") if path != VARIANTS)
    return sorted([*files, *variants(), *planned()])


@functools.cache
def variants() -> dict[str, dict[str, Any]]:
    """Return the tables of variants.toml."""
    return tomli.loads(VARIANTS.read_text(encoding="utf-8"))


def planned() -> list[str]:
    return sorted(path.stem for path in PLANNED.glob("*.toml"))


def load(
    path: Path,
    overrides: Sequence[tuple[str, str]] = (),
    *,
    gpus: bool = False,
    of_run: bool = False,
    notes: list[str] | None = None,
    policy: str = "",
) -> Config:
    """Read a file over its base, its preset and the defaults, then apply the overrides ("training.steps", "20"). A file
    that names no job.dump_folder writes to outputs/NAME, its own name.

    gpus: this machine has some, which decides keys of a preset (presets.py). of_run: the file is in a run's folder, and
    may be of an earlier version: its removed keys have no effect. notes: gets a line for each key without an effect,
    and for each renamed key of a file of the user's. policy: return the config of one of the file's policies
    (policies.py), with its keys over the shared ones; "": the shared ones alone.
    """
    problems: list[str] = []
    ignored: list[str] = []
    renamed: dict[str, Renamed] = {}  # by label
    values: defaultdict[str, dict[str, Any]] = defaultdict(dict)

    def valid(section: str, name: str, key: Key, value: Any, label: str) -> Any:
        """Return the value in the type of the key, or None after noting a problem."""
        if key.type is float and type(value) is int:
            value = as_float(value)
        if not key.accepts(value):
            elsewhere = VALUES.get((section, name, str(value)))
            hint = f"; {elsewhere}" if elsewhere else did_you_mean(str(value), map(as_text, key.choices))
            problems.append(f"{label}: expected {key.expected}, found {_shown(value)}{hint}")
            return None
        if unusual := _unwritable(value):
            problems.append(f"{label}: expected text that UTF-8 can encode, without NUL, found {unusual}")
            return None
        return os.path.expanduser(value) if f"{section}.{name}" in PATHS and value.startswith("~") else value

    def put(section: str, name: str, value: Any, label: str, *, text: bool = False, own: bool = False) -> bool:
        """Take a value, or a flag's text. Return False if there is no such key. `own`: the policy's alone."""
        if own and name in schema().get(section, {}) and shared(section, name):
            problems.append(f"{label}: all policies of a run share this key: set it in [{section}]")
            return True
        new, removed = RENAMED.get(f"{section}.{name}"), REMOVED.get(f"{section}.{name}")
        like, _, of = (new.like if new else f"{section}.{name}").partition(".")
        if key := schema().get(like, {}).get(of):
            value = valid(section, name, key, key.parse(value) if text else value, label)
            if value is not None:
                now = new.becomes(value, values[section]) if new else {name: value}
                values[section] |= now
                renamed.update({label: new} if new and now else {})
        elif removed and not removed.is_default(value):
            if not of_run:
                return False
            if removed.decides_files:
                raise EarlierRun([f"{label}: {_unknown(section, name)}"])
            ignored.append(f"{section}.{name} = {_shown(value)}, of an earlier version, has no effect")
        return bool(key or removed)

    flags, of_policy = of_flags(overrides, ""), list[tuple[str, str, dict[str, Any]]]()
    names_folder = any(flag == "job.dump_folder" for flag, _ in flags)
    for file, section, table in _tables(path, problems):
        if section == POLICIES and not of_run:
            of_policy += own_tables(file, table, policy, problems)
            continue
        if section not in (schema() | REMOVED_SECTIONS) or not isinstance(table, dict):
            problems.append(f"{file}: {_misplaced(section, table)}")
            continue
        names_folder |= (file, section) == (path.name, "job") and "dump_folder" in table
        for name, value in table.items():
            if not put(section, name, value, f"{file}: [{section}] {name}"):
                problems.append(f"{file}: {_unknown(section, name)}")
    for label, section, table in of_policy:
        for name, value in table.items():
            if not put(section, name, value, f"{label} {name}", own=True):
                problems.append(f"{label}: {_unknown(section, name)}")
    for own, given in ((False, flags), (True, of_flags(overrides, policy) if policy else [])):
        for flag, text in given:
            section, _, name = flag.partition(".")
            label = f"--{POLICIES}.{policy}.{flag}" if own else f"--{flag}"
            if not put(section, name, text, label, text=True, own=own):
                problems.append(f"{label}: {_unknown(section, name)}")
    if not names_folder:  # a base's folder belongs to another experiment
        values["job"]["dump_folder"] = f"./outputs/{path.stem}"
    if policy:
        values["job"]["dump_folder"] = f"{values['job']['dump_folder']}/{POLICIES}/{policy}"
    if problems:
        raise ConfigError(problems)
    if notes is not None:
        notes += ignored
        for label, new in renamed.items() if not of_run else ():
            now = (f"{new.section}.{name} = {as_toml(values[new.section][name])}" for name in new.names)
            notes.append(f"{label}: its name is now {' and '.join(now)}")
    own = values.pop("algorithm", {})
    config = Config(**{section: kind(**values[section]) for section, kind in get_type_hints(Config).items()})
    return replace(config, algorithm=algorithm_of(own, config, gpus=gpus))


def policies_of(path: Path) -> list[str]:
    """Return the names of a file's policies, in order; none if it trains one policy. A file that cannot be read has
    none: `load` refuses it."""
    tables = [table for _, section, table in _tables(path, []) if section == POLICIES and isinstance(table, dict)]
    return list(dict.fromkeys(name for table in tables for name in table))


def problems_of_names(names: Sequence[str], overrides: Sequence[tuple[str, str]]) -> Iterator[str]:
    """Yield a problem for each bad name of a policy, and for each flag of an unknown policy."""
    for name in names:
        if not NAME.fullmatch(name):
            yield f"[{POLICIES}.{name[:80]}]: expected a name of at most 40 letters a to z, digits and _"
    for flag, _ in overrides:
        section, _, rest = flag.partition(".")
        if section == POLICIES and (name := rest.partition(".")[0]) not in names:
            yield f"--{flag}: the config has no policy {name!r}{did_you_mean(name, names)}"


def load_of_run(folder: Path, overrides: Sequence[tuple[str, str]] = (), notes: list[str] | None = None) -> Config:
    """Read the config of the run in a folder, which may be of an earlier version."""
    if (folder / CONFIG).is_file() and b"[" not in bytes_of(folder / CONFIG):  # else the defaults would be its settings
        raise ConfigError([f"{CONFIG}: expected every key of a run, found none"])
    return load(folder / CONFIG, overrides, of_run=True, notes=notes)


def to_toml(config: Config) -> str:
    """Write every key of a resolved config with its docs; `load` reads it back to an equal Config."""
    blocks = []
    for section, keys in schema().items():
        lines = [f"{name} = {as_toml(getattr(getattr(config, section), name))}" for name in keys]
        width = max(map(len, lines))
        commented = [f"{line:<{width}}  # {key.doc}" for line, key in zip(lines, keys.values(), strict=True)]
        blocks.append("\n".join([f"[{section}]", *commented]))
    return "\n\n".join(blocks) + "\n"


def as_text(choice: str | bool) -> str:
    """Write a choice as a flag's text: strings without quotes."""
    return choice if isinstance(choice, str) else as_toml(choice)


def as_toml(value: Any) -> str:
    """Write a value as JSON, which is also TOML for every type that a key can have, once DEL is escaped and tables are
    written as TOML has them."""
    if isinstance(value, dict):
        return "{" + ", ".join(f"{as_toml(str(key))} = {as_toml(item)}" for key, item in value.items()) + "}"
    text = json.dumps(value, ensure_ascii=False, default=str).replace("\x7f", "\\u007f")
    return text.encode(errors="backslashreplace").decode()  # what no encoding has, such as a byte of another encoding


def as_float(value: int) -> float:
    """Return an integer as a float: inf, which no key accepts, if it is too large for one."""
    return float(value) if value.bit_length() < 1024 else math.inf


def did_you_mean(word: str, names: Iterable[str], form: str = "{!r}") -> str:
    """Return the end of a message that refuses a name, if a similar valid name exists."""
    nearest = difflib.get_close_matches(word[:100], list(names), n=1, cutoff=0.5)
    return f"; did you mean {form.format(nearest[0])}?" if nearest else ""


def _is_table(value: Any) -> bool:
    return type(value) is dict and all(
        type(item) in SCALARS and math.isfinite(item if type(item) is float else 0) for item in value.values()
    )


def _flat(table: dict[str, Any]) -> dict[Any, Any]:
    """Return a table with the values of the tables and lists in it."""
    flat = dict[Any, Any]()
    for key, value in table.items():
        inner = value if type(value) is dict else dict(enumerate(value)) if type(value) is list else {None: value}
        flat |= {(key, name): item for name, item in inner.items()}
    return flat


def _tables(path: Path, problems: list[str], above: tuple[Path, ...] = ()) -> Iterator[tuple[str, str, Any]]:
    """Yield (file name, section, its keys): first the keys of its base, so that the file's own keys win."""
    tables = _read(path, problems)
    base = tables.pop("base", None)
    chain = (*above, path.resolve())
    if base is not None:
        places = (SHIPPED / f"{base}.toml", PLANNED / f"{base}.toml")
        candidates = (path.parent / base, *places) if isinstance(base, str) else ()
        found = next((candidate for candidate in candidates if os.path.isfile(candidate)), None)
        if found is None and isinstance(base, str) and base in variants():
            found = VARIANTS / base
        if found is None:
            hint = did_you_mean(str(base), shipped())
            expected = "the name of a shipped config, or a path relative to this file"
            problems.append(f"{path.name}: base: expected {expected}, found {_shown(base)}{hint}")
        elif found.resolve() in chain:
            ring = " -> ".join(file.name for file in (*chain, found))
            problems.append(f"{path.name}: base: expected a file that does not start from this one, found {ring}")
        else:
            yield from _tables(found, problems, chain)
    yield from ((path.name, section, table) for section, table in tables.items())


def _unwritable(value: Any) -> str:
    """Return the part of a string, or of strings in a list or a table, that no file or path can hold, or ""."""
    if isinstance(value, dict):
        return next(filter(None, map(_unwritable, [*value, *value.values()])), "")
    texts = value if isinstance(value, list) else [value]
    odd = (c for text in texts if isinstance(text, str) for c in text if c == "\0" or "\ud800" <= c <= "\udfff")
    return next((f"U+{ord(c):04X} in {_shown(value)}" for c in odd), "")


def _read(path: Path, problems: list[str]) -> dict[str, Any]:
    if path.parent == VARIANTS:
        return dict(variants()[path.name])
    if path.resolve() == VARIANTS.resolve():
        names = ", ".join(variants())
        problems.append(f"{path.name}: expected the name of a table in it, one of {names}, found the file itself")
        return {}
    try:
        if path.exists() and not (path.is_file() or path.is_dir()):  # a FIFO or a device may have no end
            raise ValueError("something else")
        if (size := path.stat().st_size) > MOST_BYTES:
            raise ValueError(f"{size} bytes, of at most {MOST_BYTES}")
        text = path.read_text(encoding="utf-8")
        if text.startswith("\ufeff"):
            raise ValueError("a byte order mark: save it as UTF-8 without one")
        return tomli.loads(text)
    except tomli.TOMLDecodeError as error:
        line = error.doc.split("\n")[error.lineno - 1].strip()
        problems.append(f"{path.name}:{error.lineno}:{error.colno}: {error.msg}: {line}")
    except (OSError, ValueError, RecursionError) as error:  # not UTF-8, or nested too deeply for Python
        problems.append(f"{path.name}: expected a TOML file, found {error}")
    return {}


def _homes(name: str) -> str:
    return ", ".join(f"[{section}]" for section, keys in schema().items() if name in keys)


def _misplaced(section: str, table: Any) -> str:
    """Describe a top-level entry that is not one of our sections."""
    if section in schema():
        return f"[{section}]: expected a table, found {_shown(table)}"
    if homes := _homes(section):
        return f"{section!r} is outside a section; it is a key of {homes}"
    return _unknown(section, "")


def _unknown(section: str, name: str) -> str:
    if removed := REMOVED.get(f"{section}.{name}"):
        return f"[{section}] has no key {name!r} any more; {removed.advice}"
    if section not in schema():
        hint = foreign_hint(f"{section}.{name}") or foreign_hint(section)
        return f"there is no section [{section}]" + (hint or did_you_mean(section, schema(), "[{}]"))
    if homes := _homes(name):
        return f"[{section}] has no key {name!r}; it is a key of {homes}"
    near = did_you_mean(name, schema()[section])
    return f"[{section}] has no key {name!r}{near or foreign_hint(name)}"


def _shown(value: Any) -> str:
    text = as_toml(value)
    return text if len(text) <= 80 else f"{text[:77]}..."
