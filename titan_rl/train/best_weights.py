"""Keeps the weights with the highest value of eval.keep_best: best/step-N, a Hugging Face folder.

    an evaluation ── higher than all before ──> best/step-N is written ── renamed ──> the older one deleted

So a whole folder exists at every moment, even if a process is killed. Retention of checkpoints does not know best/. A
resumed run reads from it which value it has to exceed.
"""

import json
import os
import shutil
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from titan_rl.config.plain_files import text_of
from titan_rl.record.evaluation import Evaluation, metrics_of
from titan_rl.train.hf_folder import card_of, export_policy
from titan_rl.train.run_parts import RunParts
from titan_rl.wire.errors import DeadlinePassed, RankDied, RunError

FOLDER = "best"
MEASURED = "evaluation.json"
"""The file in best/step-N with the step, the metric, and all metrics of the evaluation."""


@dataclass(frozen=True, slots=True)
class Best:
    """A folder with weights, and their value of the metric."""

    folder: Path
    step: int
    metric: str
    value: float


class BestWeights:
    """Compares evaluations, and has the trainers write the best weights."""

    def __init__(self, run: RunParts) -> None:
        self._run, self._metric = run, run.config.eval.keep_best
        self._best = None
        if self._metric:
            self._best = tidy(run.setup.folder / FOLDER, self._metric)

    async def offer(self, step: int, evaluations: Sequence[Evaluation]) -> None:
        """Write the trainers' weights, which made step `step`, if these evaluations are better than all before. A write
        that fails is a warning: the older folder stays."""
        metrics = metrics_of(evaluations)
        value = metrics.get(self._metric)
        if value is None or (self._best is not None and value <= self._best.value):
            return
        terminal, before = self._run.terminal, self._best
        scratch = self._run.setup.folder / f".{FOLDER}.partial"
        final = free_name(self._run.setup.folder / FOLDER / f"step-{step}")
        try:
            with self._run.clock("save"):
                setup = self._run.setup
                card = card_of(setup, step=str(step), scores=metrics)
                await export_policy(setup, self._run.meshes.trainers, scratch, card=card)
                measured = {"step": step, "metric": self._metric, "value": value, "metrics": metrics}
                (scratch / MEASURED).write_text(json.dumps(measured, indent=2) + "\n")
                place(scratch, final)
        except (RankDied, DeadlinePassed):
            raise
        except (OSError, RunError) as error:
            consequence = f"{before.folder} stays the best" if before else "there is no best yet"
            terminal.warn(f"the best weights, of step {step}, cannot be written: {error}; {consequence}")
            return
        finally:
            shutil.rmtree(scratch, ignore_errors=True)
        self._best = Best(final, step, self._metric, value)
        if before is not None:
            shutil.rmtree(before.folder, ignore_errors=True)
        exceeded = f" (before: {before.value:.4g}, of step {before.step})" if before else ""
        terminal.note(f"kept {final}: {self._metric} {value:.4g}{exceeded}")


def place(written: Path, final: Path) -> None:
    """Bring a written folder to the disk, then give it its name."""
    for path in (*written.iterdir(), written):
        fd = os.open(path, os.O_RDONLY)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)
    final.parent.mkdir(exist_ok=True)
    written.rename(final)


def free_name(folder: Path) -> Path:
    """Return the folder, or its first variant that does not exist: a run that resumed before a step may make it again,
    and better."""
    names = (folder, *(folder.with_name(f"{folder.name}.{k}") for k in range(1, 10_000)))
    return next(path for path in names if not path.exists())


def best_folders(folder: Path) -> list[Best]:
    """Return the folders in best/, the best first: one, or two if a process was killed between writing the new one and
    deleting the old one."""
    bests = []
    for path in folder.glob(f"step-*/{MEASURED}"):
        with suppress(OSError, ValueError, KeyError, TypeError):
            text = json.loads(text_of(path))
            bests.append(Best(path.parent, int(text["step"]), str(text["metric"]), float(text["value"])))
    return sorted(bests, key=lambda best: (-best.value, best.step))


def tidy(folder: Path, metric: str) -> Best | None:
    """Return the best weights that an earlier process wrote by this metric, and delete its worse ones. Folders of
    another metric stay, since values of different metrics cannot be compared."""
    bests = [best for best in best_folders(folder) if best.metric == metric]
    for best in bests[1:]:
        shutil.rmtree(best.folder, ignore_errors=True)
    return bests[0] if bests else None
