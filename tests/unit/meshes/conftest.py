from collections.abc import Iterator

import pytest

from support import fake_environments


@pytest.fixture
def ended_loops() -> Iterator[None]:
    """End the loops of ranks that the test has started: a rank would be killed."""
    yield
    fake_environments.close_loops()
