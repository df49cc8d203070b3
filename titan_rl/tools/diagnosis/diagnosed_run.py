"""Reads what the rules need from a run's folder, and applies them."""

from dataclasses import dataclass
from pathlib import Path

from titan_rl.config.sections import Config
from titan_rl.record.run_names import ROLLOUTS
from titan_rl.tools.diagnosis.answer_facts import AnswerFacts
from titan_rl.tools.diagnosis.history import MetricsHistory
from titan_rl.tools.diagnosis.ranking import Diagnosis, diagnose
from titan_rl.tools.inspect.reward_audit import JudgedSample, suspicions
from titan_rl.tools.inspect.run_files import RunFiles

MOST_BYTES = 2**28  # rollouts that are read, in about 15 s: the last steps of a larger file


@dataclass(frozen=True, slots=True)
class DiagnosedRun:
    history: MetricsHistory
    diagnosis: Diagnosis
    notes: tuple[str, ...]  # what could not be read

    @classmethod
    def of(cls, run: Path) -> "DiagnosedRun":
        """Diagnose the run in a folder, which may be active, finished or crashed."""
        files, notes = RunFiles(run), list[str]()
        config, why = files.config_or_why()
        if config is None:
            notes.append(f"config.toml cannot be read, so keys are assumed to have their defaults: {why.strip()}")
        begin = files.reward_cut()
        if begin:
            notes.append(f"only the steps after step {begin} are examined: the reward was another one up to there")
        lines = (line for line in files.metrics() if line["kind"] == "startup" or line["step"] > begin or not begin)
        history = MetricsHistory(lines, config or Config(), _answers(files, notes, begin))
        return cls(history, diagnose(history), tuple(notes))


def _answers(files: RunFiles, notes: list[str], begin: int) -> AnswerFacts | None:
    """Return what the rules need of the samples after step `begin`, or None if there are none."""
    if not (files / ROLLOUTS).is_file():
        return None
    try:
        samples = files.samples()
    except OSError as error:
        notes.append(f"{ROLLOUTS} cannot be read: {error}")
        return None
    steps = [step for step in samples.steps if step > begin or not begin]
    if not steps:
        return None
    size = (files / ROLLOUTS).stat().st_size
    if size > MOST_BYTES:
        steps = steps[-max(1, len(steps) * MOST_BYTES // size) :]
        notes.append(f"samples: of steps {steps[0]} to {steps[-1]} only, because {ROLLOUTS} has {size / 2**30:.1f} GiB")
    facts, rewarded = AnswerFacts(), list[JudgedSample]()
    for step in steps:
        for sample in samples.of_step(step):
            facts.add(sample)
            if sample.reward is not None:
                rewarded.append(JudgedSample.of(sample, sample.reward))
    facts.close_step()
    facts.suspicions = suspicions(rewarded)
    if samples.damaged:
        notes.append(f"samples: {samples.damaged} damaged lines of {ROLLOUTS} are left out")
    return facts if facts.count else None
