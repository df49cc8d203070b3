"""The store of snapshots under any course of events: whole ones stay whole, and torn ones are never restored."""

import asyncio
import os
from typing import Any, cast

from hypothesis import given, settings
from hypothesis import strategies as st

from titan_rl.ext.snapshots.snapshot_parts import HEAD, WRITING
from titan_rl.ext.snapshots.snapshot_store import SnapshotStore
from titan_rl.meshes.model_mesh import ModelMesh
from titan_rl.wire.snapshot import Snapshot


class Ranks:
    """A mesh whose ranks copy their state, which is the step, when `finish` is called: late, never, or too late."""

    def __init__(self, name: str, count: int) -> None:
        self.name, self.dp, self.row_ranks, self.near = name, count, 1, True
        self.copying: list[tuple[int, int, int]] = []  # (memory, serial, step)

    async def snapshot(self, snapshot: Snapshot) -> list[int]:
        for part in snapshot.parts(self.name):
            self.copying.append((os.open(part.path, os.O_RDWR), part.serial, snapshot.step))
            os.pwrite(self.copying[-1][0], HEAD.pack(WRITING, 0, 0), 0)
        return [8] * self.dp

    def finish(self, *, rank: int | None = None, serial: int | None = None) -> None:
        for at, (fd, own, step) in list(enumerate(self.copying))[::-1]:
            if rank in (None, at) and serial in (None, own):
                os.pwrite(fd, step.to_bytes(8, "little"), HEAD.size)
                os.pwrite(fd, HEAD.pack(own, 0, 0), 0)
                os.close(fd)
                del self.copying[at]


EVENTS = st.one_of(
    st.tuples(st.just("take"), st.sampled_from(["cold_start", "rl"])),
    st.tuples(st.just("finish"), st.sampled_from(["newest", "all", 0, 1, 2])),
    st.tuples(st.just("rewind"), st.just(None)),
)


@given(st.lists(EVENTS, max_size=20))
@settings(max_examples=3 * settings().max_examples)
def test_a_whole_snapshot_stays_whole(events: list[tuple[str, Any]]) -> None:
    """Ranks finish in any order, even copies of snapshots that were dropped long ago."""
    meshes = Ranks("trainer", 2), Ranks("critic", 1)
    snapshots, step = SnapshotStore(cast(ModelMesh, meshes[0]), cast(ModelMesh, meshes[1])), 0
    for event, what in events:
        before = snapshots.newest()
        if event == "take":
            step += 1
            asyncio.run(snapshots.take(what, step, str(step)))
        elif event == "finish":
            for mesh in meshes:
                mesh.finish(rank=what if isinstance(what, int) else None, serial=step if what == "newest" else None)
        elif before is not None:
            snapshots.forget(but=before)
        newest = snapshots.newest()
        if before is not None:
            assert newest is not None
            assert newest.serial >= before.serial
        if newest is not None:
            assert set(newest.paths) == ({"trainer", "critic"} if newest.phase == "rl" else {"trainer"})
            assert newest.controller == str(newest.step)
            for path in (path for paths in newest.paths.values() for path in paths):
                with open(path, "rb") as part:
                    assert int.from_bytes(os.pread(part.fileno(), 8, HEAD.size), "little") == newest.step
    snapshots.forget()
    for mesh in meshes:
        mesh.finish()


def test_an_older_snapshot_can_be_gone_back_to() -> None:
    policy = Ranks("trainer", 2)
    snapshots = SnapshotStore(cast(ModelMesh, policy), None)
    for step in (5, 10):
        asyncio.run(snapshots.take("rl", step, "{}"))
        policy.finish()
    newest, older = snapshots.newest(), snapshots.newest(before=10)
    assert newest is not None
    assert older is not None
    assert (newest.step, older.step) == (10, 5)
    assert snapshots.newest(before=5) is None
    snapshots.forget(but=older)
    assert snapshots.newest() is older
    asyncio.run(snapshots.take("rl", 6, "{}"))
    assert snapshots.newest() is older  # not yet
    policy.finish()
    assert [found.step for found in (snapshots.newest(), snapshots.newest(before=6)) if found] == [6, 5]
    snapshots.forget()


def test_trainers_that_move_away_have_no_snapshots_and_a_note() -> None:
    policy, said = Ranks("trainer", 2), list[str]()
    snapshots = SnapshotStore(cast(ModelMesh, policy), None, said.append)
    asyncio.run(snapshots.take("rl", 5, "{}"))
    policy.finish()
    asyncio.run(snapshots.bring())
    assert snapshots.newest() is not None
    assert said == []
    policy.near = False
    asyncio.run(snapshots.bring())
    asyncio.run(snapshots.take("rl", 6, "{}"))
    assert snapshots.newest() is None
    assert ["steps since the last checkpoint" in line for line in said] == [True]
