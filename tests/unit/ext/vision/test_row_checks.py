"""What a run whose rows have images refuses, by name and before the processor is asked."""

from dataclasses import replace
from pathlib import Path

import pytest

from titan_rl.config.presets import preset
from titan_rl.config.sections import Config, ModelSection, RecordSection
from titan_rl.ext.vision import image_tokens
from titan_rl.ext.vision.image_tokens import ImageText
from titan_rl.ext.vision.row_checks import image_problems
from titan_rl.tasks.examples import Example, RowImage
from titan_rl.text import tokenizer as characters
from titan_rl.text.tokenizer import TextTokenizer

ROWS = [Example("?", "1", where="rows.jsonl:3", images=(RowImage("a" * 64, 8, 8, 10, b""),))]
SEEING = Config(model=ModelSection(vision="frozen"))


@pytest.fixture
def reader(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> TextTokenizer:
    """Return a tokenizer whose processor has already answered."""
    characters.build(tmp_path)
    monkeypatch.setitem(image_tokens._known, str(tmp_path), ImageText("<image>", 9, {(8, 8): [9, 9]}))
    return TextTokenizer.load(tmp_path)


@pytest.mark.parametrize(
    ("config", "problem"),
    [
        (SEEING, ""),
        (Config(), 'model.vision: expected "frozen" for the images of rows.jsonl:3, found "none"'),
        (
            replace(SEEING, record=RecordSection(batches=2)),
            "record.batches: expected a run without kept",
        ),
        (
            replace(SEEING, algorithm=preset("sdpo")),
            "algorithm.teacher_context: expected a run whose",
        ),
        (replace(SEEING, algorithm=preset("dpo")), ""),
        (
            replace(SEEING, algorithm=preset("reward_model")),
            "algorithm.name: expected a run that trains no",
        ),
        (
            replace(SEEING, algorithm=preset("ppo")),
            "critic: expected none for the",
        ),
    ],
)
def test_what_does_not_know_images_is_refused(reader: TextTokenizer, config: Config, problem: str) -> None:
    found = list(image_problems(config, ROWS, reader))
    assert len(found) == bool(problem)
    assert all(each.startswith(problem) for each in found)
