"""An endpoint that fails must fail its call and nothing else."""

from collections.abc import Awaitable, Callable
from functools import wraps
from typing import Concatenate, ParamSpec, TypeVar

from titan_rl.wire import failpoints

Self = TypeVar("Self")
P = ParamSpec("P")
T = TypeVar("T")


def fallible(
    method: Callable[Concatenate[Self, P], Awaitable[T]],
) -> Callable[Concatenate[Self, P], Awaitable[T]]:
    """Monarch answers a call with an Exception, but lets a BaseException end the actor; DCP's CheckpointException is
    one. So what is no Exception becomes one here, and the caller gets the remote traceback under the rank's name."""

    @wraps(method)
    async def answered(self: Self, *args: P.args, **kwargs: P.kwargs) -> T:
        try:
            await failpoints.reached(method.__name__)
            return await method(self, *args, **kwargs)
        except Exception:
            raise
        except BaseException as error:
            raise RuntimeError(f"{type(error).__name__}: {error}") from error

    return answered
