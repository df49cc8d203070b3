"""Tasks of several policies: one that fails lets the others save, unless a rank has failed."""

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from titan_rl.ext.policies.session import together
from titan_rl.wire.errors import RankDied, RunError


class Stops:
    """Counts requests to stop."""

    def __init__(self) -> None:
        self.requested = asyncio.Event()

    async def leave(self) -> None:
        self.requested.set()


def outcome(first: Callable[[], Any]) -> tuple[list[str], BaseException | None]:
    """Return what the second policy did while the first ended as given, and the error."""
    done: list[str] = []

    async def work() -> None:
        stops: Any = Stops()

        async def failing() -> None:
            await asyncio.sleep(0)
            first()

        async def other() -> None:
            try:
                await asyncio.wait_for(stops.requested.wait(), 0.05)
            except TimeoutError:
                done.append("finished")
            except asyncio.CancelledError:
                done.append("cancelled")
                raise
            else:
                done.append("saved")

        await together({"a": failing(), "b": other()}, stops)

    try:
        asyncio.run(work())
    except Exception as error:
        return done, error
    return done, None


def raising(error: Exception) -> Callable[[], Any]:
    def first() -> None:
        raise error

    return first


@pytest.mark.parametrize(
    ("error", "then"),
    [
        (RunError("no group has a reward"), "saved"),
        (ValueError("a bug"), "saved"),
        (RankDied("trainer[dp=0 tp=0]", "was killed"), "cancelled"),
    ],
)
def test_a_failure_ends_the_run(error: Exception, then: str) -> None:
    assert outcome(raising(error)) == ([then], error)


def test_a_policy_that_ends_lets_the_others_finish() -> None:
    assert outcome(lambda: None) == (["finished"], None)
