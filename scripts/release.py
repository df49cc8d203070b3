#!/usr/bin/env python3
"""Build the source distribution and the wheel of a release.

    python scripts/release.py dist --repository https://github.com/OWNER/NAME --tag v0.1.0

The addresses of the repository and the links of README.md, which are relative, are written into the metadata. A tag is
refused unless it, CITATION.cff and CHANGELOG.md name the version of titan_rl/__init__.py. The exit code is 1 if an
index would refuse the metadata of a file. Needs the packages of the dev extra, or
`pip install 'build>=1.3' 'setuptools>=77'`: Python 3.11's own setuptools is older.
"""

import argparse
import os
import re
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Iterator
from pathlib import Path

from bundle import ROOT, copy_source
from packaging.metadata import Metadata
from packaging.utils import canonicalize_name, parse_sdist_filename, parse_wheel_filename

LINK = re.compile(r"(!?)\[([^\]]*)\]\((?![a-z]+:|#)([^)\s]+)\)")
URLS = """
[project.urls]
Repository = "{repository}"
Documentation = "{repository}/tree/{ref}/docs"
Changelog = "{repository}/blob/{ref}/CHANGELOG.md"
Issues = "{repository}/issues"
"""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path, help="folder for both files; must be empty or missing")
    parser.add_argument("--repository", required=True, metavar="URL", help="https address of the repository")
    parser.add_argument("--tag", help="tag of the release; default: none, and links lead to the branch main")
    a = parser.parse_args()
    if not re.fullmatch(r"https://[\w.-]+(/[\w.-]+)+", a.repository):
        parser.error(f"--repository: expected https://HOST/OWNER/NAME, found {a.repository!r}")
    if a.out.exists() and any(a.out.iterdir()):
        parser.error(f"expected an empty or missing folder, found {a.out} with files")
    problems = list(disagreements(a.tag)) if a.tag is not None else []
    if problems:
        parser.error("; ".join(problems))
    ref = a.tag or "main"
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        copy_source(folder)
        with (folder / "pyproject.toml").open("a") as file:
            file.write(URLS.format(repository=a.repository, ref=ref))
        readme = folder / "README.md"
        readme.write_text(absolute_links(readme.read_text(), a.repository, ref))
        command = [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(a.out.absolute()), str(folder)]
        code = subprocess.run(command, env=os.environ | {"SOURCE_DATE_EPOCH": date_of_commit()}).returncode
    refused = [f"{path.name}: {problem}" for path in a.out.glob("*") for problem in problems_of(path)]
    print(*refused, sep="\n", end="\n" if refused else "", file=sys.stderr)
    return code or min(len(refused), 1)


def problems_of(path: Path) -> Iterator[str]:
    """Yield what `twine check --strict` refuses in the metadata of a wheel or a source distribution, and a name or
    version that is not the file's."""
    try:
        found = Metadata.from_email(metadata_of(path))
    except ExceptionGroup as errors:
        yield from (str(error) for error in errors.exceptions)
        return
    if not (found.description or "").strip():
        yield "expected a description, found none"
    if (kind := (found.description_content_type or "").partition(";")[0]) != "text/markdown":
        yield f"description_content_type: expected text/markdown, found {kind or 'none'}"
    name, version, *_ = (parse_wheel_filename if path.suffix == ".whl" else parse_sdist_filename)(path.name)
    if (name, version) != (canonicalize_name(found.name), found.version):
        yield f"expected {name} {version}, as the file is named, found {found.name} {found.version}"


def metadata_of(path: Path) -> bytes:
    if path.suffix == ".whl":
        with zipfile.ZipFile(path) as wheel:
            (name,) = (each for each in wheel.namelist() if re.fullmatch(r"[^/]+\.dist-info/METADATA", each))
            return wheel.read(name)
    with tarfile.open(path) as source:
        (member,) = (each for each in source if re.fullmatch(r"[^/]+/PKG-INFO", each.name))
        file = source.extractfile(member)
        assert file
        return file.read()


def disagreements(tag: str) -> Iterator[str]:
    """Yield what does not name the version that is to be released."""
    version = found(r'^__version__ = "(.+)"$', "titan_rl/__init__.py")
    if tag != f"v{version}":
        yield f"--tag: expected v{version}, the version of titan_rl/__init__.py, found {tag}"
    if (cited := found(r"^version: (.+)$", "CITATION.cff")) != version:
        yield f"CITATION.cff: expected version {version}, found {cited}"
    if (heading := found(r"^## (.+)$", "CHANGELOG.md")) != version:
        yield f"CHANGELOG.md: expected the first heading {version}, found {heading}"


def found(pattern: str, file: str) -> str:
    match = re.search(pattern, (ROOT / file).read_text(), re.MULTILINE)
    return match[1] if match else "none"


def absolute_links(text: str, repository: str, ref: str) -> str:
    """Make relative links and pictures of a page lead to the repository: a package index has no other files."""
    return LINK.sub(lambda m: f"{m[1]}[{m[2]}]({repository}/{'raw' if m[1] else 'blob'}/{ref}/{m[3]})", text)


def date_of_commit() -> str:
    """Return the time that a wheel's files get: two builds of a commit are equal."""
    command = ["git", "-C", str(ROOT), "log", "-1", "--format=%ct"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):  # no git, or an unpacked archive
        return "315532800"  # 1980, where the calendar of zip files begins


if __name__ == "__main__":
    sys.exit(main())
