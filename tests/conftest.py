import signal
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from titan_rl.environment import prepare_environment

prepare_environment()  # Monarch reads its environment when it is imported

import monarch.actor  # noqa: E402
from hypothesis import settings  # noqa: E402

from support.running import Runs  # noqa: E402
from titan_rl.meshes.zygotes import KINDS, serving  # noqa: E402

settings.register_profile("tests", deadline=None)  # a busy machine is no failing property
settings.load_profile("tests")

# Meshes that a test drives itself have no Watch; Monarch's default hook would interrupt pytest. Calls still fail.
monarch.actor.unhandled_fault_hook = lambda failure: print(failure.report(), file=sys.stderr)


@pytest.fixture(scope="session", autouse=True)
def own_zygotes(request: pytest.FixtureRequest) -> Iterator[None]:
    """Start the zygotes of all runs and meshes of this session once, if it starts any."""
    if not any("system" in item.path.parts for item in request.session.items):
        yield
        return
    with tempfile.TemporaryDirectory(prefix="zygotes-") as folder, serving(Path(folder)) as zygotes:
        zygotes.keep(KINDS)
        yield


@pytest.fixture(scope="module")
def runs() -> Iterator[Runs]:
    runs = Runs()
    yield runs
    for run in runs.started:
        if run.process.poll() is None:
            run.process.send_signal(signal.SIGKILL)
            run.process.wait()
