"""A list that is sent to many processes and pickled for the first of them only.

Every replica of the generators reads from every trainer rank, and gets the same lists of where and what. Pickling them
anew for each replica would cost the controller the product of both numbers."""

import pickle
from collections.abc import Iterable
from typing import Any, TypeVar

T = TypeVar("T")


class PickledOnce(list[T]):
    """Do not change it, or what it contains. It arrives as a plain list."""

    def __init__(self, values: Iterable[T]) -> None:
        super().__init__(values)
        self._pickled: bytes | None = None

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        if self._pickled is None:
            self._pickled = pickle.dumps(list(self), protocol=pickle.HIGHEST_PROTOCOL)
        return pickle.loads, (self._pickled,)
