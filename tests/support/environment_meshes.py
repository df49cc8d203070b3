"""A started environment mesh, and sessions whose policy is scripted."""

import asyncio
import os
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import monarch.actor
from monarch.actor import this_host

from support.played import EOS, LIMITS, encoded, prompt_of
from titan_rl.config.sections import FaultSection
from titan_rl.ext.agents.environment_mesh import EnvironmentMesh, EnvironmentPolicy
from titan_rl.ext.agents.environment_rank import EnvironmentSettings
from titan_rl.ext.agents.episode_loop import LoopSettings
from titan_rl.ext.agents.episodes import Limits
from titan_rl.record.incidents import Incidents
from titan_rl.text import tokenizer as characters
from titan_rl.wire.types import Completion, ImagePlace, Prompt

TESTS = str(Path(__file__).parents[1])


@dataclass(eq=False)
class Scripted:
    """A session whose policy samples 8 in every turn, after `seconds`."""

    prompt: Prompt
    seconds: float = 0.01
    asked: list[list[int]] = field(default_factory=list)
    order: list[tuple[int, int]] = field(default_factory=list)  # shared: (prompt, turn) as they are asked

    @property
    def id(self) -> str:
        return f"rollout-{self.prompt.id}"

    @property
    def seed(self) -> int:
        return self.prompt.id

    async def sample(
        self,
        tokens: Sequence[int],
        *,
        max_new_tokens: int | None = None,
        seat: str = "",
        images: Sequence[ImagePlace] = (),
    ) -> Completion:
        self.order.append((self.prompt.id, len(self.asked)))
        self.asked.append(list(tokens))
        await asyncio.sleep(self.seconds)
        return Completion([*encoded("8"), EOS], [0.0, 0.0], [0, 0], "stop")


def scripted(rows: Sequence[dict[str, Any]], seconds: float = 0.01) -> list[Scripted]:
    order: list[tuple[int, int]] = []
    return [Scripted(prompt_of("7=", row, id), seconds, order=order) for id, row in enumerate(rows)]


@asynccontextmanager
async def environments(
    name: str,
    folder: Path,
    *,
    processes: int = 2,
    concurrency: int = 64,
    limits: Limits = LIMITS,
    lockstep: bool = False,
    restarts: int = 3,
    hang_seconds: float = 60,
) -> AsyncIterator[tuple[EnvironmentMesh, list[str]]]:
    """Yield a mesh and its messages about incidents."""
    monarch.actor.unhandled_fault_hook = lambda _: None
    characters.build(folder)
    said: list[str] = []
    incidents = Incidents(folder, FaultSection(max_restarts=restarts), said.append)
    settings = EnvironmentSettings(LoopSettings(name, concurrency, limits), folder)
    policy = EnvironmentPolicy(processes, hang_seconds=hang_seconds, lockstep=lockstep, incidents=incidents)
    path = os.pathsep.join([TESTS, os.getcwd()])
    mesh = await EnvironmentMesh.spawn(this_host(), settings, policy, {"PYTHONPATH": path})
    try:
        yield mesh, said
    finally:
        await mesh.close()
