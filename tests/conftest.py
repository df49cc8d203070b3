import gc
import signal
import sys
from collections.abc import Iterator

import pytest

from titan_rl.environment import prepare_environment

signal.signal(signal.SIGHUP, signal.SIG_DFL)  # nohup has it ignored, and a run would leave it so

prepare_environment()  # Monarch reads its environment when it is imported

import monarch.actor  # noqa: E402
from hypothesis import settings  # noqa: E402

from support.running import WHOLE, RunFiles, Runs, finished_once, shared_folder  # noqa: E402

pytest_plugins = ["support.budgets"]

gc.disable()  # until all test modules are imported: collections of the interpreter would find nothing


def pytest_collection_finish() -> None:
    """Exempt the imported libraries from later garbage collections, which take half a second each otherwise."""
    gc.freeze()
    gc.enable()


settings.register_profile("quick", deadline=None, max_examples=25)  # a busy machine is no failing property
# scripts/test --all draws the same examples every time, so that only changes make it fail. "quick" explores.
settings.register_profile("thorough", deadline=None, max_examples=100, derandomize=True)
settings.load_profile("quick")

# Meshes that a test drives itself have no Watch; Monarch's default hook would interrupt pytest. Calls still fail.
monarch.actor.unhandled_fault_hook = lambda failure: print(failure.report(), file=sys.stderr)


@pytest.fixture(scope="module")
def runs() -> Iterator[Runs]:
    runs = Runs()
    yield runs
    runs.end()


@pytest.fixture(scope="session")
def whole(tmp_path_factory: pytest.TempPathFactory) -> RunFiles:
    """The one uninterrupted run whose files many tests read. They leave its folder as it is."""
    return finished_once(shared_folder(tmp_path_factory), "whole", **WHOLE)
