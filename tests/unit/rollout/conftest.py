from pathlib import Path

import pytest

from titan_rl.text import tokenizer as characters
from titan_rl.text.tokenizer import TextTokenizer


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> TextTokenizer:
    folder: Path = tmp_path_factory.mktemp("tokenizer")
    characters.build(folder)
    return TextTokenizer.load(folder)
