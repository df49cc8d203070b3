import pytest

from titan_rl.text.tokenizer import TextTokenizer


@pytest.fixture(scope="session")
def tokenizer(text: TextTokenizer) -> TextTokenizer:
    return text
