"""The lengths of a large data set are measured once; what a run refuses does not depend on the cache."""

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from support.checked_configs import config, edit, rows
from titan_rl.ext.row_lengths import length_cache, row_lengths
from titan_rl.preflight.checks import problems

GOOD = {"question": "1+1=", "answer": "2"}
LONG = GOOD | {"question": "1+" * 99}
REFUSED = GOOD | {"question": [{"role": "user", "content": ["x"]}]}  # by the chat template


@pytest.fixture
def measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Cache in an own folder from the first row on. The list gets the number of rows of each measurement."""
    monkeypatch.setenv("TITAN_RL_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(row_lengths, "CACHED_ROWS", 1)
    counts, measure = list[int](), row_lengths.lengths

    def counted(examples: Any, *args: Any, **options: Any) -> Any:
        def rows() -> Any:
            counts.extend([len(examples)] if examples else [])
            yield from measure(examples, *args, **options)

        return rows()

    monkeypatch.setattr(row_lengths, "lengths", counted)
    return counts


def found(tmp_path: Path, *lines: Any, task: str = "", more: str = "", folder: str = "") -> list[str]:
    path = rows(tmp_path / "train.jsonl", *lines)
    model = f'[model]\nhf_assets_path = "{folder}"\n' if folder else ""
    text = f'[eval]\nsize = 0\n{more}\n{model}[task]\nname = "jsonl"\npath = "{path}"\n{task}\n'
    return problems(config(tmp_path, text))


def entries(tmp_path: Path) -> list[Path]:
    return sorted((tmp_path / "cache" / length_cache.FOLDER).glob("*"))


@pytest.mark.parametrize(
    ("lines", "task", "refusals"),
    [
        ([GOOD, GOOD], "", []),
        ([GOOD, LONG, GOOD, LONG], "", ["train.jsonl:2: expected a prompt of at most"]),  # it counts the others
        ([GOOD, GOOD], 'template = "chat"', []),
        ([GOOD, LONG, LONG], 'template = "chat"', ["train.jsonl:2: expected a prompt of at most"]),
        (
            [GOOD, REFUSED, REFUSED],
            'template = "chat"',
            [f"train.jsonl:{line}: expected a prompt that the chat template" for line in (2, 3)],
        ),
    ],
)
def test_the_same_rows_are_refused_with_and_without_the_cache(
    tmp_path: Path, measured: list[int], lines: list[Any], task: str, refusals: list[str]
) -> None:
    first = found(tmp_path, *lines, task=task)
    assert len(first) == len(refusals)
    assert all(expected in line for line, expected in zip(first, refusals, strict=True))
    assert measured == [len(lines)]
    assert found(tmp_path, *lines, task=task) == first
    assert measured == [len(lines)]  # the second time, nothing was measured
    shutil.rmtree(tmp_path / "cache")
    assert found(tmp_path, *lines, task=task) == first


def test_whatever_decides_lengths_is_measured_anew(tmp_path: Path, measured: list[int], folder: Path) -> None:
    chat, own = 'template = "chat"', str(folder)
    changes: list[Callable[[], Any]] = [
        lambda: found(tmp_path, GOOD, LONG, folder=own),
        lambda: found(tmp_path, GOOD, GOOD, folder=own),
        lambda: found(tmp_path, "", GOOD, GOOD, folder=own),  # messages name the line
        lambda: found(tmp_path, GOOD, GOOD, task=chat, folder=own),
        lambda: found(tmp_path, GOOD, GOOD, task=f'{chat}\nsystem_prompt = "add"', folder=own),
        lambda: found(tmp_path, GOOD, GOOD, task=f"{chat}\nchat_template_kwargs = {{a = 1}}", folder=own),
        lambda: found(tmp_path, GOOD, GOOD, more="[cold_start]\nsteps = 1", folder=own),
        lambda: edit(folder / "tokenizer_config.json", pad_token="</s>"),
        lambda: found(tmp_path, GOOD, GOOD, folder=own),
        lambda: edit(folder / "tokenizer.json", normalizer={"type": "Lowercase"}),
        lambda: found(tmp_path, GOOD, GOOD, folder=own),
    ]
    for change in changes:
        change()
    assert len(measured) == len(entries(tmp_path)) == 9
    found(tmp_path, GOOD, GOOD, more="[training]\nseq_len = 64", folder=own)  # a limit decides no length
    assert len(measured) == 9


def test_a_template_that_writes_the_date_is_not_cached(tmp_path: Path, measured: list[int], folder: Path) -> None:
    dated = "{{ strftime_now('%d %b') }}{% for m in messages %}{{ m.content + eos_token }}{% endfor %}"
    edit(folder / "tokenizer_config.json", chat_template=dated)
    for _ in range(2):
        assert found(tmp_path, GOOD, task='template = "chat"', folder=str(folder)) == []
    assert measured == [1, 1]


DAMAGES: list[Callable[[Path], Any]] = [
    lambda entry: entry.write_bytes(b""),
    lambda entry: entry.write_bytes(entry.read_bytes()[:-3]),
    lambda entry: entry.write_bytes(entry.read_bytes().replace(b"[5,", b"[6,")),
    lambda entry: entry.write_bytes(entry.read_bytes().partition(b"\n")[0] + b"\nnot JSON"),
    lambda entry: (entry.unlink(), os.mkfifo(entry)),
    lambda entry: (entry.unlink(), entry.mkdir()),
    lambda entry: entry.parent.chmod(0o777),
    lambda entry: (shutil.rmtree(entry.parent), entry.parent.write_text("")),
]


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_or_foreign_entry_is_measured_anew(
    tmp_path: Path, measured: list[int], damage: Callable[[Path], Any]
) -> None:
    assert found(tmp_path, GOOD, GOOD) == []
    (entry,) = entries(tmp_path)
    assert entry.parent.stat().st_mode & 0o777 == 0o700
    damage(entry)
    assert found(tmp_path, GOOD, GOOD) == []
    assert measured == [2, 2]


def test_an_entry_under_the_name_of_another_is_measured_anew(tmp_path: Path, measured: list[int]) -> None:
    found(tmp_path, GOOD)
    found(tmp_path, LONG)
    one, other = entries(tmp_path)
    content = one.read_bytes(), other.read_bytes()
    one.write_bytes(content[1])
    other.write_bytes(content[0])
    assert found(tmp_path, GOOD) == []
    assert "expected a prompt of at most" in found(tmp_path, LONG)[0]
    assert measured == [1] * 4


def test_the_oldest_entries_are_removed(tmp_path: Path, measured: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    found(tmp_path, GOOD)
    (oldest,) = entries(tmp_path)
    os.utime(oldest, (1, 1))
    monkeypatch.setattr(length_cache, "MOST_BYTES", 2 * oldest.stat().st_size)
    found(tmp_path, GOOD | {"question": "1+2="})
    assert oldest in entries(tmp_path)
    found(tmp_path, GOOD | {"question": "1+3="})
    assert oldest not in entries(tmp_path)
    assert len(entries(tmp_path)) == 2
    monkeypatch.setattr(length_cache, "MOST_BYTES", 1)
    found(tmp_path, GOOD | {"question": "1+4="})
    assert len(entries(tmp_path)) == 2
