"""Reports every event of a run once, to the terminal and to the dump folder.

    step n ── step ──> its numbers ── soon, by a thread ──> lines, curves, terminal ── written ──> ledger

The lines of an RL step are made and written while the meshes work on the next step: before the ledger has
the next step as trained, and before a checkpoint that counts them.
"""

import asyncio
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from titan_rl.config.sections import Config
from titan_rl.record.evaluation import Evaluation, metrics_of
from titan_rl.record.lines import SelfClosing
from titan_rl.record.metrics import AFTER, ages_of, fit_metrics, step_metrics, step_times
from titan_rl.record.run_log import Kind, RunLog
from titan_rl.record.run_names import METRICS
from titan_rl.record.summary import summarize
from titan_rl.record.terminal import Progress, Terminal
from titan_rl.wire.parts import part
from titan_rl.wire.reports import Backlog, StepStats, SyncStats
from titan_rl.wire.spans import Clock
from titan_rl.wire.types import Group

LABELS = 16  # characters of the column left of samples
# Seconds: by then the controller has sent the calls with which the next step begins, and an engine prepares its first
# forward, which needs one core. The forward needs all of them.
SOON = 0.005

Written = tuple[int, int, int]  # a step, and the checksums of its lines in metrics.jsonl and rollouts.jsonl


class Watching(Protocol):
    """Reads the lines of metrics.jsonl as they are written, and warns of a run that does not learn."""

    @property
    def cause(self) -> str:
        """Return why the steps so far taught nothing, or ""."""
        ...

    @property
    def hint(self) -> str:
        """Return what explains a run without progress; "" if it progresses."""
        ...

    def step(self, line: Mapping[str, Any]) -> Sequence[str]: ...
    def restart(self, metrics: Path) -> None: ...
    def score(self, step: int, scores: Mapping[str, Any]) -> None: ...


class Unwatched:
    cause = hint = ""

    def __init__(self, config: Config) -> None: ...
    def step(self, line: Mapping[str, Any]) -> Sequence[str]:
        return ()

    def restart(self, metrics: Path) -> None: ...
    def score(self, step: int, scores: Mapping[str, Any]) -> None: ...


class Report(SelfClosing):
    def __init__(
        self, name: str, config: Config, folder: Path, terminal: Terminal, log: RunLog, clock: Clock, *, heldout: int
    ) -> None:
        """`heldout` is the number of problems in the held-out set."""
        self._name, self._config, self._folder, self._heldout = name, config, folder, heldout
        self._terminal, self._log, self._clock = terminal, log, clock
        self._progress: Progress | None = None
        self._watch: Watching = (part("warnings of rules") or Unwatched)(config)
        self._step, self._groups = 0, list[Group]()  # the last one
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="report")
        self._unwritten: Callable[[], Written] | None = None  # writes the last step
        self._lines: Future[Written] | None = None  # the last step's, until `written` returns them

    def ready(self, step: int, bad_rows: int = 0) -> None:
        """Report that all meshes are up: the seconds until now were start-up. `bad_rows` were left out of the data."""
        self._log.startup(step, self._clock.lap()["wall"], bad_rows)
        self._watch.restart(self._folder / METRICS)

    def rewind(self, step: int | None, cold_start_step: int | None) -> None:
        """Supersede the lines of later steps, which another attempt makes again."""
        self._log.rewind(step, cold_start_step)

    @contextmanager
    def fitting(self, name: str, start: int, last: int) -> Iterator[None]:
        with self._terminal.progress(name, last, done=start) as self._progress:
            yield

    def cold_start(self, step: int, stats: StepStats) -> None:
        self._log.cold_start(step, fit_metrics(stats, self._clock.lap()))
        self._advance(f"loss {stats.loss:.3f}")

    def fitted(self, step: int, stats: StepStats, evaluations: Sequence[Evaluation]) -> None:
        self._log.evaluations(step, evaluations)
        metrics = fit_metrics(stats, self._clock.lap(), scores=metrics_of(evaluations))
        self._log.fit(step, metrics)
        self._advance(f"loss {stats.loss:.3f}")
        self._show(f"at step {step}", evaluations)
        self._warn("fit", step, metrics)

    def step(
        self,
        step: int,
        groups: Sequence[Group],
        stats: StepStats,
        sync: SyncStats,
        evaluations: Sequence[Evaluation],
        *,
        dropped: Sequence[Group],
        backlog: Backlog,
    ) -> None:
        """Report an RL step, after `written` has returned the one before. Its lines are written soon, by a thread."""
        lap = self._clock.lap()
        self._step, self._groups = step, list(groups)

        def write() -> Written:
            scores = metrics_of(evaluations)
            metrics = step_metrics(
                step, groups, stats, sync, step_times(lap), dropped=dropped, backlog=backlog, scores=scores
            )
            self._log.evaluations(step, evaluations)
            metrics |= {f"time/{k}": lap[k] for k in AFTER if k in lap}
            if self._config.algorithm.overlong_filter:
                metrics["dropped/truncated"] = float(sum(r.truncated for group in groups for r in group.rollouts))
            ages = np.bincount(ages_of(step, groups), minlength=1).astype(float).tolist()
            checksums = self._log.step(step, metrics, {**stats.histograms, "policy_age/histogram": ages}, groups)
            self._terminal.step(step, self._config.training.steps, metrics)
            self._show(f"at step {step}", [each for each in evaluations if each.name])  # the step's line has the other
            self._warn("rl", step, metrics)
            return step, *checksums

        self._unwritten = write
        asyncio.get_running_loop().call_later(SOON, self._begin_writing)

    def written(self) -> Written | None:
        """Return the checksums of the reported step once all of its lines are written, or raise what kept them from
        being written. Return None if they were returned before."""
        self._finish()
        lines, self._lines = self._lines, None
        return lines.result() if lines is not None else None

    def to_disk(self) -> None:
        """Return when the lines of all reported steps are on disk."""
        self._finish()
        self._log.to_disk()

    def close(self) -> None:
        """Write the remaining lines. If that fails, the run has ended with an error before."""
        with suppress(Exception):
            self._finish()
        self._thread.shutdown()

    def _begin_writing(self) -> None:
        if self._unwritten is not None:
            self._lines, self._unwritten = self._thread.submit(self._unwritten), None

    def _finish(self) -> None:
        self._begin_writing()
        if self._lines is not None:
            self._lines.result()

    def cause(self) -> str:
        """Return why the steps so far taught nothing, as far as their metrics show it, or ""."""
        self._finish()
        return self._watch.cause

    def _warn(self, kind: Kind, step: int, metrics: Mapping[str, float]) -> None:
        for warning in self._watch.step({"kind": kind, "step": step, **metrics}):
            self._terminal.warn(warning)
            self._log.event("warning", warning)

    def _advance(self, note: str) -> None:
        assert self._progress is not None
        self._progress.advance(note=note)

    def before_cold_start(self, evaluations: Sequence[Evaluation]) -> None:
        self._log.evaluations(0, evaluations, kind="cold_start")
        self._log.cold_start(0, metrics_of(evaluations))
        self._show("of the initial weights", evaluations)

    def eval(self, step: int, evaluations: Sequence[Evaluation]) -> None:
        """Report an evaluation outside of this process's steps: at the start, or when no step is left to train."""
        self._log.evaluations(step, evaluations)
        scores = metrics_of(evaluations)
        self._log.eval(step, scores, self._clock.lap().get("eval", 0.0))
        self._watch.score(step, scores)
        self._show(f"at step {step}", evaluations)

    def _show(self, when: str, evaluations: Sequence[Evaluation]) -> None:
        for each in evaluations:
            if each.name:
                self._terminal.note(f"{each.name} {when}: {each}")
            else:
                self._terminal.eval(f"held-out score {when}", each.average.value, self._heldout)

    def done(self, *, finished: bool) -> None:
        """Write summary.json, and show it if the run is finished."""
        summary = summarize(self._folder, self._name, self._config)
        self._log.summary(summary, "finished" if finished else "stopped")
        if finished:
            hints, shown = [*self._log.hints, *filter(None, [self._watch.hint])], part("samples at the end")
            width = min(100, self._terminal.width - LABELS)
            samples = shown(self._folder, self._step, self._groups, width) if shown else []
            self._terminal.summary(summary, samples, self._folder, hints)
