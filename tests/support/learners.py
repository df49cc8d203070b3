"""A learner without a run: its meshes are the test's."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

from titan_rl.config.auto import resolved
from titan_rl.config.sections import Config
from titan_rl.train.learner import Learner
from titan_rl.wire.spans import Clock


def learner_of(folder: Path, config: Config, trainers: Any, *, critic: Any = None) -> tuple[Learner, list[str]]:
    """Return a learner, and what it notes."""
    notes: list[str] = []
    run: Any = SimpleNamespace(
        config=config,
        setup=SimpleNamespace(
            config=config, resolved=resolved(config, "cpu"), folder=folder, tokenizer=SimpleNamespace(pad=0)
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
