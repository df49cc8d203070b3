"""What is sent to many is pickled once."""

import pickle
from dataclasses import dataclass
from typing import Any

from titan_rl.wire.manifest import Manifest, PickledOnce, Publication


@dataclass
class Noted:
    pickled: list[int]

    def __reduce__(self) -> tuple[Any, ...]:
        self.pickled.append(1)
        return Noted, ([],)


def test_a_list_is_pickled_for_the_first_reader_and_arrives_plain() -> None:
    pickled: list[int] = []
    shared = PickledOnce([Noted(pickled), Noted(pickled)])
    for _ in range(5):
        arrived = pickle.loads(pickle.dumps(("connect", shared)))[1]
        assert type(arrived) is list
        assert arrived == [Noted([]), Noted([])]
    assert len(pickled) == 2
    assert pickle.loads(pickle.dumps(PickledOnce([]))) == []


def test_the_manifests_of_a_reader_are_shared_by_its_replicas() -> None:
    packed = [{reader: Manifest.of(3, 1, 0, rank, ()) for reader in range(2)} for rank in range(4)]
    publication = Publication(3, 0, packed, 0.0)
    found = publication.of(1)
    assert isinstance(found, PickledOnce)
    assert found == [runs[1] for runs in packed]
    assert publication.of(1) is found
