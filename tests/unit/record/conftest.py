from collections.abc import Iterator
from pathlib import Path

import pytest

from support.written_runs import WrittenRun, config
from titan_rl.tools.inspect.audit_rules import audit


@pytest.fixture(scope="module")
def fast_disk() -> Iterator[None]:
    """For tests in which no power is cut."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("os.fsync", lambda fd: None)
        yield


@pytest.fixture(scope="module")
def finished(fast_disk: None, tmp_path_factory: pytest.TempPathFactory) -> Path:
    run = WrittenRun(tmp_path_factory.mktemp("finished") / "run")
    run.life(config())
    assert audit(run.folder)[0] == []
    return run.folder


@pytest.fixture(scope="module")
def resumed(fast_disk: None, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Stopped after step 4, and resumed with a lag."""
    run = WrittenRun(tmp_path_factory.mktemp("resumed") / "run")
    run.life(config(max_staleness_steps=1), last=4)
    run.life(config(max_staleness_steps=2))
    assert audit(run.folder)[0] == []
    return run.folder


@pytest.fixture(scope="module")
def replaced(fast_disk: None, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Dynamic sampling replaced groups, and the reward failed on prompt 2."""
    run = WrittenRun(tmp_path_factory.mktemp("replaced") / "run")
    run.life(config(dynamic_sampling=True), failing={2: 2})
    assert audit(run.folder)[0] == []
    return run.folder
