"""What docs/clusters.md promises of jobs on Slurm, on a real Slurm cluster of three hosts."""

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from support.real_slurm import RealSlurm, why_no_slurm

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def slurm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RealSlurm]:
    if why := why_no_slurm():
        pytest.skip(why)
    with ExitStack() as stack:
        yield RealSlurm(stack, tmp_path_factory.mktemp("slurm"))


@pytest.mark.parametrize("nodes", [1, 2, 3])
def test_a_job_finishes(slurm: RealSlurm, tmp_path: Path, nodes: int) -> None:
    run = slurm.launch(tmp_path / "run", f"--hosts.count={nodes}")
    assert run.finish() == 0, run.out
