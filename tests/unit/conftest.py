import pytest

from titan_rl.meshes import deaths


@pytest.fixture
def no_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Forget the ranks that other tests of this process have spawned under the same names."""
    for name in ("_followed", "_away", "_awaited", "_lives", "_meant", "_ends", "_waiting"):
        monkeypatch.setattr(deaths, name, type(getattr(deaths, name))())
