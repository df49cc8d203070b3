"""Runs whose files are written by the real stream, ledger and log, without engines and trainers."""

import asyncio
import pickle
import re
import shutil
import tempfile
from collections.abc import Mapping
from contextlib import aclosing
from functools import cache
from pathlib import Path
from typing import Any

from support.rollout_streams import Failing, additions
from titan_rl.config.sections import (
    AlgorithmSection,
    CheckpointSection,
    Config,
    FaultSection,
    MetricsSection,
    RolloutSection,
    TrainingSection,
)
from titan_rl.record.ledger import Ledger, bounds_of
from titan_rl.record.metrics import step_metrics
from titan_rl.record.run_log import RunLog
from titan_rl.rollout.sampling import StreamSettings
from titan_rl.rollout.stream import RolloutStream
from titan_rl.tasks.prompts import PromptSource
from titan_rl.text import tokenizer as characters
from titan_rl.text.tokenizer import TextTokenizer
from titan_rl.wire.reports import StepStats, SyncStats
from titan_rl.wire.sessions import Driver
from titan_rl.wire.spans import Clock
from titan_rl.wire.types import Completion, Request, Sampling

TIMES: dict[str, float] = dict.fromkeys(
    ("time/step", "time/generate", "time/judge", "time/train", "time/sync", "time/wait"), 1.0
)


class Killed(Exception):
    """The process ended at once."""


class Rewound(Exception):
    """The run rewinds within its process."""


class Drifting:
    """Samples two or three tokens a sample, the last one from the version that is served when it is sampled."""

    def __init__(self, version: int, dynamic: bool) -> None:
        self.version, self._dynamic = version, dynamic

    async def generate(self, request: Request) -> list[Completion]:
        id, first = int(re.split(r"[-@.]", request.id)[1]), self.version
        for _ in range(id * 7 % 5):
            await asyncio.sleep(0)
        flat = self._dynamic and id % 4 == 1

        def completion(k: int) -> Completion:
            n = 2 if flat else 2 + (id + k) % 2
            tokens = [8] * n if flat else [8 + (id + k) % 2, *(9 + (id * 3 + k + i) % 8 for i in range(n - 1))]
            return Completion(tokens, [-0.5 - 0.01 * k] * n, [first] * (n - 1) + [self.version], "stop")

        return [completion(k) for k in range(len(request.seeds))]


async def first_token(prompt: Any, rollouts: Any) -> list[float]:
    return [float(r.text.startswith("1")) + 0.25 * (len(r.text) == 3) for r in rollouts]


@cache
def tokenizer() -> TextTokenizer:
    folder = Path(tempfile.mkdtemp(prefix="tokenizer-"))
    characters.build(folder)
    return TextTokenizer.load(folder)


def config(**keys: Any) -> Config:
    """A small run; keys as in sections: steps=4, dynamic_sampling=True, interval=2, stream_groups=1."""
    names = ("max_staleness_steps", "overtake_steps", "groups_per_step", "group_size")
    rollout: dict[str, Any] = {"groups_per_step": 2, "group_size": 2} | {key: keys[key] for key in names if key in keys}
    return Config(
        rollout=RolloutSection(**rollout),
        training=TrainingSection(steps=keys.get("steps", 8), stream_groups=keys.get("stream_groups", 0)),
        algorithm=AlgorithmSection(dynamic_sampling=keys.get("dynamic_sampling", False)),
        checkpoint=CheckpointSection(interval=keys.get("interval", 2), keep_latest_k=2),
        fault=FaultSection(snapshot_interval=keys.get("snapshot_interval", 1)),
        metrics=MetricsSection(trackers=[]),
    )


class WrittenRun:
    """A run folder, and what a checkpoint of each step holds."""

    def __init__(self, folder: Path, driver: Driver | None = None) -> None:
        self.folder, self.driver = folder, driver
        self.cuts: dict[int, dict[str, Any]] = {}  # by step, of checkpoints
        self.snapshot: tuple[int, dict[str, Any]] | None = None  # this process's
        self.warnings: list[str] = []

    def life(
        self,
        config: Config,
        *,
        last: int | None = None,
        kill: tuple[int, str] | None = None,
        rewind: int | None = None,
        failing: Mapping[int, int] | None = None,
    ) -> None:
        """Be one process: resume, make steps up to `last` and save that one. It is killed at a moment of a step, or
        rewinds once after a step."""
        self.snapshot, attempt = None, 1
        try:
            while True:
                try:
                    asyncio.run(self._attempt(config, attempt, last, kill, rewind, failing or {}))
                    return
                except Rewound:
                    attempt, rewind = attempt + 1, None
        except Killed:
            return

    def whole_steps(self) -> list[int]:
        return sorted(int(path.name[5:]) for path in (self.folder / "checkpoint").glob("step-*"))

    async def _attempt(
        self, config: Config, attempt: int, last: int | None, kill: tuple[int, str] | None, rewind: int | None,
        failing: Mapping[int, int],
    ) -> None:  # fmt: skip
        at = max(self.whole_steps(), default=None)
        start, cut = (0, {}) if at is None else (at, self.cuts[at])
        if self.snapshot is not None and self.snapshot[0] > start:
            start, cut = self.snapshot
        end, kill_step, moment = last or config.training.steps, *(kill or (-1, ""))
        log = RunLog(self.folder, "written", config, resume_step=start or at, warn=self.warnings.append)
        log.startup(start, 0.1)
        if kill_step == start and moment == "starting":
            raise Killed
        ledger, prompts = Ledger(self.folder, self.warnings.append), PromptSource(additions(), tokenizer(), seed=3)
        ledger.begun(start, cut.get("next", 0), cut.get("open", ()), attempt=attempt, bounds=bounds_of(config))
        if start:
            prompts.load_state_dict(cut)
        engine = Drifting(start, config.algorithm.dynamic_sampling)
        n, size = config.rollout.groups_per_step, config.training.stream_groups
        judge = Failing(dict(failing)) if failing else first_token
        settings = StreamSettings(
            algorithm=config.algorithm, rollout=config.rollout, sampling=Sampling(4), seed=7, first=start + 1,
            groups=(config.training.steps - start) * n, attempt=attempt, driver=self.driver,
        )  # fmt: skip
        stream = RolloutStream(settings, engine, prompts, judge, tokenizer().decode, Clock(), ledger)

        written: list[tuple[int, tuple[int, int]]] = []

        def logged() -> None:  # as late as a run may: before the next step is trained, and before a checkpoint
            while written:
                stream.logged(*written.pop())

        def maybe_die(step: int, now: str) -> None:
            if (step, now) == (kill_step, moment):
                ledger._file._pending.clear()  # what no flush has handed to the system
                raise Killed

        with log:
            async with aclosing(stream):
                stream.admit(n * (config.rollout.steps_ahead + 1))
                for step in range(start + 1, end + 1):
                    if size:
                        groups = [g async for part in stream.parts(n, step, size) for g in part]
                        groups.sort(key=lambda group: group.prompt.id)
                    else:
                        groups = await stream.take(n, step)
                    maybe_die(step, "sampled")
                    logged()
                    stream.trained(step, groups)
                    maybe_die(step, "trained")
                    engine.version = step
                    stream.admit(n)
                    stats = StepStats(0.5, 1.0, 0.1, sum(r.sampled for g in groups for r in g.rollouts), 1.0)
                    stats.metrics.update({"logprob_gap/mean": 0.0, "logprob_gap/max": 0.0})
                    metrics = step_metrics(step, groups, stats, SyncStats(step), TIMES, dropped=stream.dropped)
                    written.append((step, log.step(step, metrics, {}, groups)))
                    maybe_die(step, "reported")
                    if config.fault.snapshot_interval and step % config.fault.snapshot_interval == 0:
                        self.snapshot = step, stream.cut()
                    if step == end or step % config.checkpoint.interval == 0:
                        log.to_disk()
                        logged()
                        self.cuts[step] = stream.saved(step)
                        maybe_die(step, "saving")
                        self._checkpoint(step)
                    if step == rewind:
                        logged()
                        raise Rewound
            log.summary({"steps": end})

    def _checkpoint(self, step: int) -> None:
        folder = self.folder / "checkpoint" / f"step-{step}"
        folder.mkdir(parents=True, exist_ok=True)
        (folder / ".metadata").write_bytes(pickle.dumps("whole"))
        for old in self.whole_steps()[:-2]:
            shutil.rmtree(folder.with_name(f"step-{old}"))
