"""A learner with meshes that only count and write empty checkpoints."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

from titan_rl.config.auto import resolved
from titan_rl.config.sections import Config
from titan_rl.train.learner import Learner
from titan_rl.wire.spans import Clock
from titan_rl.wire.types import Batch


def learner_of(folder: Path, config: Config, trainers: Any, *, critic: Any = None) -> tuple[Learner, list[str]]:
    """Return a learner, and its notes."""
    notes: list[str] = []
    run: Any = SimpleNamespace(
        config=config,
        setup=SimpleNamespace(
            config=config,
            resolved=resolved(config, "cpu"),
            folder=folder,
            tokenizer=SimpleNamespace(pad=0),
            checkpoint_bytes=0,
        ),
        meshes=SimpleNamespace(
            trainers=trainers,
            critic=critic,
            reward_model=None,
            reference=None,
            teacher=None,
        ),
        clock=Clock(),
        snapshots=SimpleNamespace(forget=lambda but: None),
        incidents=SimpleNamespace(note=notes.append),
    )
    return Learner(run), notes


class Mesh:
    """Ranks that train nothing. `broken` is what their next verbs raise."""

    dp = 1

    def __init__(self, folder: Path, name: str = "trainer") -> None:
        self.folder, self.name = folder, name
        self.broken: Exception | None = None
        self.updates: list[tuple[int, int]] = []
        self.waited: list[bool] = []  # by save, until it was on disk

    def _check(self) -> None:
        if self.broken is not None:
            raise self.broken

    async def begin_phase(self, phase: str, at: Any) -> tuple[int, str]:
        return at, "{}"

    async def accumulate(self, part: list[Batch]) -> None:
        self._check()

    async def update(self, whole: Batch, divisor: float) -> str:
        self.updates.append((whole.tokens, int(divisor)))
        return "stats"

    async def save(self, step: int, controller: str = "", *, on_disk: bool = False) -> None:
        self.waited.append(on_disk)
        folder = self.folder / f"step-{step}"
        folder.mkdir(parents=True, exist_ok=True)
        self._check()
        (folder / ".metadata").write_text("whole")
