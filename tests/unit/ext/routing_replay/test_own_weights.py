"""Routes count for the weights that sampled."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

from support.counting_meshes import Mesh, learner_of
from titan_rl.config.auto import on_device
from titan_rl.config.sections import Config, TrainingSection
from titan_rl.wire.types import Batch, Sample

SAMPLE = Sample([1] * 21, [0] + [1] * 20, {"behaviour": [-0.5] * 21, "advantage": [-0.5] * 21})


async def test_only_the_policys_own_weights_replay_routes(tmp_path: Path) -> None:
    """Not the critic, and not the weights that the trainers' ranks hold for the reference."""
    trainers, critic, scored = Mesh(tmp_path), Mesh(tmp_path, "critic"), list[tuple[str, bool]]()

    def noted(mesh: Mesh) -> Callable[..., Any]:
        async def scores(
            batches: list[Batch], temperature: float, frozen_role: str, top: int
        ) -> tuple[list[Any], list[int]]:
            rows = [rows for batch in batches for rows in batch.microbatches]
            scored.append((frozen_role or mesh.name, all("routes" in r.extras for r in rows)))
            return [[r.mask for r in batch.microbatches] for batch in batches], [0]

        return scores

    trainers.scores, critic.scores = noted(trainers), noted(critic)  # type: ignore[attr-defined]
    config = on_device(Config(training=TrainingSection(seq_len=64, local_batch_size=1)), "cpu")
    learns, _ = learner_of(tmp_path, config, trainers, critic=critic)
    pack = learns.packer.update

    def with_routes(*arguments: Any, **named: Any) -> list[Batch]:
        (batch,) = pack(*arguments, **named)
        (rows,) = batch.microbatches
        routes = np.zeros((*rows.tokens.shape, 2, 2), np.int16)
        return [replace(batch, microbatches=[replace(rows, extras={"routes": routes})])]

    learns.packer = SimpleNamespace(update=with_routes)  # type: ignore[assignment]
    for mesh, frozen_role in ((trainers, ""), (trainers, "reference"), (critic, "")):
        await learns.scores([SAMPLE], mesh, frozen_role)  # type: ignore[arg-type]
    assert scored == [("trainer", True), ("reference", False), ("critic", False)]
