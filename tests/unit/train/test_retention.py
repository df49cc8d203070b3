"""What is left of checkpoints after any sequence of good, failing and killed saves: the learner's own save and purge on
real small files, written in the order in which actors/titan/summed_writer.py writes them."""

import asyncio
import os
import pickle
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from titan_rl.config.auto import resolved
from titan_rl.config.presets import preset
from titan_rl.config.sections import AlgorithmSection, CheckpointSection, Config, CriticSection, FaultSection
from titan_rl.record.checkpoints import Checkpoints
from titan_rl.record.run_folder import sound_resume
from titan_rl.train.learner import Learner
from titan_rl.wire.checkpoint_sums import SummedFile, write_sums
from titan_rl.wire.errors import RankFailed, RunError
from titan_rl.wire.spans import Clock

Outcome = Literal["good", "fails", "killed", "resumed"]
WRITES = 4  # per save of a rank
CALLS = ("unlink", "rmdir", "rename", "replace", "mkdir", "fsync")


RUNNER = asyncio.Runner()
MEMORY = "/dev/shm" if Path("/dev/shm").is_dir() else None  # for the folders: hundreds of runs in seconds


class Killed(BaseException):
    """The end of this process and of its ranks."""


class Disk:
    """Counts the calls that change the disk, and ends the process before one of them."""

    left: int | None = None

    def call(self) -> None:
        if self.left is not None:
            self.left -= 1
            if self.left < 0:
                raise Killed


DISK = Disk()


@contextmanager
def counted_calls() -> Iterator[None]:
    def counting(real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **keys: Any) -> Any:
            DISK.call()
            return None if real is fsync else real(*arguments, **keys)

        return call

    async def in_this_thread(work: Callable[..., Any], *arguments: Any) -> Any:
        return work(*arguments)

    fsync = os.fsync
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(asyncio, "to_thread", in_this_thread)
        for name in CALLS:
            patch.setattr(os, name, counting(getattr(os, name)))
        yield


class Ranks:
    """A mesh that writes checkpoints of a few bytes, in the background if it is asynchronous."""

    def __init__(self, folder: Path, background: bool, completed: Callable[[int], object]) -> None:
        self._folder, self._background, self._completed = folder, background, completed
        self._pending: tuple[int, int] | None = None
        self.writes = WRITES + 1  # after which the next save fails; it makes WRITES

    async def save(self, step: int, controller: str, *, on_disk: bool) -> None:
        await self.wait_for_saving()
        self._pending, self.writes = (step, self.writes), WRITES + 1
        if on_disk or not self._background:
            await self.wait_for_saving()

    async def wait_for_saving(self) -> None:
        if self._pending is not None:
            (step, writes), self._pending = self._pending, None
            self._write(step, writes)

    def _write(self, step: int, writes: int) -> None:
        """Write a checkpoint, or fail after this number of writes."""
        folder, sums = self._folder / f"step-{step}", {}
        os.makedirs(folder, exist_ok=True)
        with suppress(FileNotFoundError):
            os.unlink(folder / ".metadata")
        for name, text in (("__0_0.distcp", content(folder)), (".metadata.tmp", pickle.dumps("names"))):
            with (folder / name).open("wb") as file:
                summed = SummedFile(file)
                for half in (text[: len(text) // 2], text[len(text) // 2 :]):
                    DISK.call()
                    if writes == 0:
                        raise full()
                    writes -= 1
                    summed.write(half)
            sums[name.removesuffix(".tmp")] = summed.sum
        write_sums(folder, sums)
        if writes == 0:
            raise full()
        os.rename(folder / ".metadata.tmp", folder / ".metadata")
        self._completed(step)


def content(folder: Path) -> bytes:
    return f"{folder.parent.name} {folder.name}".encode() * 50


def full() -> RankFailed:
    return RankFailed("trainer[dp=0 tp=0] failed in save", "OSError: No space left", rank="trainer", kind="OSError")


class RunOnDisk:
    """A run that trains, saves, fails, dies and resumes."""

    def __init__(self, folder: Path, keep: int, critic: bool, background: bool) -> None:
        self.folder, self.keep = folder, keep
        names = ["checkpoint/critic", "checkpoint"] if critic else ["checkpoint"]
        self._places = [folder / name for name in names]
        self.config = Config(
            algorithm=preset("ppo") if critic else AlgorithmSection(),
            critic=CriticSection(lr=1e-3),
            checkpoint=CheckpointSection(keep_latest_k=keep, async_mode="async" if background else "disabled"),
            fault=FaultSection(max_failed_saves=2),
        )
        self._background = background
        self.completed: list[int] = []
        self.restart()

    def restart(self) -> None:
        resume, notes = sound_resume(self.folder, self.config)
        assert resume.rl == max(self.completed, default=None), "the newest whole step is resumed"
        assert not notes
        self.step = self._resumed_at = resume.rl or 0
        self.meshes = [Ranks(place, self._background, self._complete) for place in self._places]
        critic = self.meshes[0] if len(self.meshes) == 2 else None
        run: Any = SimpleNamespace(
            config=self.config,
            setup=SimpleNamespace(
                checkpoint_bytes=0,
                config=self.config,
                resolved=resolved(self.config, "cpu"),
                folder=self.folder,
                tokenizer=SimpleNamespace(pad=0),
            ),
            meshes=SimpleNamespace(trainers=self.meshes[-1], critic=critic),
            clock=Clock(),
            snapshots=None,
            incidents=SimpleNamespace(note=lambda text: None),
        )
        self.learner = Learner(run)

    def _complete(self, step: int) -> None:
        whole = all((place / f"step-{step}" / ".metadata").exists() for place in self._places)
        if whole and step not in self.completed:
            self.completed.append(step)

    async def save(self, outcome: Outcome, where: int, on_disk: bool, again: bool = False) -> None:
        """Save the next step, or the last one `again`: so does a stop that gives the next one up."""
        self.step += not again or self.step == self._resumed_at
        if outcome == "fails":
            self.meshes[where % len(self.meshes)].writes = where // 2 % (WRITES + 1)
        DISK.left = where if outcome == "killed" else None
        try:
            await self.learner.save(self.step, "{}", on_disk=on_disk)
            if outcome != "good":  # the save in the background may have failed
                await self.learner._last_saves_written()
        except (Killed, RunError):
            DISK.left = None
            self.restart()
        finally:
            DISK.left = None

    def lost(self) -> set[int]:
        kept = self.completed[-self.keep :] if self.keep else self.completed
        return {step for step in kept if not all(self._holds(place, step) for place in self._places)}

    def _holds(self, place: Path, step: int) -> bool:
        data = place / f"step-{step}" / "__0_0.distcp"
        return (data.parent / ".metadata").exists() and data.read_bytes() == content(data.parent)

    def on_disk(self) -> list[list[int]]:
        return [sorted(int(path.name[5:]) for path in place.glob("step-*")) for place in self._places]


EVENTS = st.tuples(
    st.sampled_from(["good", "good", "fails", "fails", "killed", "killed", "resumed"]),
    st.integers(0, 40),
    st.booleans(),
    st.booleans(),
)


@settings(max_examples=4 * settings().max_examples, derandomize=True, deadline=None, database=None)
@given(
    keep=st.integers(0, 4),
    critic=st.booleans(),
    background=st.booleans(),
    events=st.lists(EVENTS, min_size=1, max_size=8),
)
def test_no_interleaving_of_good_failing_and_killed_saves_loses_a_checkpoint(
    keep: int, critic: bool, background: bool, events: list[tuple[Outcome, int, bool, bool]]
) -> None:
    with tempfile.TemporaryDirectory(dir=MEMORY) as folder, counted_calls():
        run = RunOnDisk(Path(folder), keep, critic, background)
        for outcome, where, on_disk, again in events:
            if outcome == "resumed":
                run.restart()
            else:
                RUNNER.run(run.save(outcome, where, on_disk, again))
            assert not run.lost()
        run.restart()
        RUNNER.run(run.save("good", 0, True))
        RUNNER.run(run.save("good", 0, True))
        kept = run.completed[-keep:] if keep else run.completed
        assert run.on_disk() == [kept] * len(run.on_disk()), "nothing half-written is left"
        assert Checkpoints.of(run.folder, run.config).newest() == (run.step, {})
