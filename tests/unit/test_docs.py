"""Every link, key, program and file that a document or a message names exists, and the documents stay few."""

import re
import tomllib
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from titan_rl.config.foreign_names import KEYS as FOREIGN
from titan_rl.config.removed_keys import REMOVED, RENAMED
from titan_rl.config.toml import schema

ROOT = Path(__file__).parents[2]
PAGES = sorted(p for folder in ("*.md", "docs/**/*.md", "tests/**/*.md") for p in ROOT.glob(folder))
USERS_PAGES = [p for p in PAGES if p.parent in (ROOT, ROOT / "docs")]
SOURCES = [
    *(
        p
        for name in ("titan_rl", "actors", "meshes", "kernels", "scripts", "tests")
        for p in (ROOT / name).rglob("*.py")
    ),
    *(p for p in (ROOT / "scripts").iterdir() if p.is_file() and not p.suffix),
    *(ROOT / "train_configs").rglob("*.toml"),
    ROOT / "pyproject.toml",
]
MOST_PAGES = 16
FENCE = re.compile(r"^( *)```(\w*)\n(.*?)^ *```", re.DOTALL | re.MULTILINE)
LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
KEY = re.compile(r"^(?:--)?([a-z_]+)\.([a-z_0-9]+)(?:$|[ =]|\.(?!_))")
FILES = ("json", "jsonl", "md", "py", "toml", "txt")  # `metrics.jsonl` is a file, not a key of [metrics]
VERL_COLUMNS = ("reward_model.ground_truth",)


def name_of(page: Path) -> str:
    return str(page.relative_to(ROOT))


@cache
def prose(page: Path) -> str:
    """Return the page without its fenced blocks."""
    return FENCE.sub("", page.read_text(encoding="utf-8"))


@cache
def anchors(page: Path) -> set[str]:
    """Return the anchors that GitHub makes of the page's headings."""
    titles = re.findall(r"^#+ +(.+)$", prose(page), re.MULTILINE)
    plain = (re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", title).lower() for title in titles)
    return {re.sub(r"[^\w\- ]", "", title).strip().replace(" ", "-") for title in plain}


def keys_of(page: Path) -> Iterator[str]:
    """Yield what looks like a config key: words in backticks, and flags in blocks of commands."""
    yield from (match[0] for word in re.findall(r"`([^`\n]+)`", prose(page)) if (match := KEY.match(word)))
    for _, language, text in FENCE.findall(page.read_text(encoding="utf-8")):
        if language in ("", "bash", "sh"):
            yield from re.findall(r"--[a-z_]+\.[a-z_0-9]+", text)


def exists(section: str, key: str) -> bool:
    full = f"{section}.{key}"
    return key in schema()[section] or full in (*REMOVED, *RENAMED, *FOREIGN, *VERL_COLUMNS)


def test_there_are_few_pages() -> None:
    pages = [p.name for p in (ROOT / "docs").glob("*.md")]
    assert len(pages) <= MOST_PAGES, pages


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_links_lead_somewhere(page: Path) -> None:
    dead = []
    for link in LINK.findall(prose(page)):
        if "://" in link or link.startswith("mailto:"):
            continue
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        if not target.exists() or (anchor and anchor not in anchors(target)):
            dead.append(link)
    assert not dead


@pytest.mark.parametrize("page", USERS_PAGES, ids=name_of)
def test_keys_exist(page: Path) -> None:
    unknown = []
    for word in keys_of(page):
        section, key, *_ = re.split(r"[. =]", word.removeprefix("--"))
        if section in schema() and key not in FILES and not exists(section, key):
            unknown.append(word)
    assert not unknown


@pytest.mark.parametrize("page", USERS_PAGES, ids=name_of)
def test_toml_blocks_have_keys_that_exist(page: Path) -> None:
    unknown = []
    for indent, language, text in FENCE.findall(page.read_text(encoding="utf-8")):
        if language != "toml":
            continue
        for section, table in tomllib.loads(re.sub(f"^{indent}", "", text, flags=re.MULTILINE)).items():
            if isinstance(table, dict):
                unknown += [f"{section}.{key}" for key in table if section not in schema() or not exists(section, key)]
            elif section != "base":
                unknown.append(section)
    assert not unknown


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_programs_and_files_exist(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    modules = {module.replace(".", "/") for module in re.findall(r"python -m (titan_rl(?:\.\w+)*)", text)}
    paths = set(re.findall(r"(?<![\w/-])((?:scripts|tests|actors|meshes|kernels|titan_rl)/[\w/]+(?:\.\w+)?)", text))
    missing = [m for m in modules if not any((ROOT / place).is_file() for place in (f"{m}.py", f"{m}/__main__.py"))]
    missing += [path for path in paths if not (ROOT / path).exists() and not list(ROOT.glob(f"{path}*"))]
    assert not missing


def test_the_pages_that_the_source_names_exist() -> None:
    missing = {
        f"{name_of(source)}: {page}"
        for source in SOURCES
        for page in re.findall(r"\bdocs/[\w/]+\.\w+", source.read_text(encoding="utf-8"))
        if not (ROOT / page).exists()
    }
    assert not missing
