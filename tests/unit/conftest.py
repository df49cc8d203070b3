import asyncio
import inspect

import pytest

from titan_rl.meshes import deaths
from titan_rl.text import tokenizer as characters
from titan_rl.text.tokenizer import TextTokenizer


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Run an async test in a new event loop. `timeout` in pyproject.toml ends one that hangs."""
    if not inspect.iscoroutinefunction(pyfuncitem.obj):
        return None
    names = inspect.signature(pyfuncitem.obj).parameters
    asyncio.run(pyfuncitem.obj(**{name: pyfuncitem.funcargs[name] for name in names}))
    return True


@pytest.fixture
def no_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Forget the ranks that other tests of this process have spawned under the same names."""
    for name in ("_local", "_remote", "_awaited", "_generations", "_killed", "_ends", "_waiting"):
        monkeypatch.setattr(deaths, name, type(getattr(deaths, name))())


@pytest.fixture(scope="session")
def text(tmp_path_factory: pytest.TempPathFactory) -> TextTokenizer:
    """The built-in tokenizer: a token is a character."""
    folder = tmp_path_factory.mktemp("tokenizer")
    characters.build(folder)
    return TextTokenizer.load(folder)
