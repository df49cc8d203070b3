"""Reads what the rules of titan_rl.tools.diagnosis need from a run's folder, and applies them."""

from dataclasses import dataclass
from itertools import compress
from pathlib import Path

from titan_rl.config.sections import Config
from titan_rl.config.toml import ConfigError, load_of_run
from titan_rl.record.config_history import reward_cut
from titan_rl.record.summary import known_lines
from titan_rl.tools.diagnosis.answer_facts import Answer, AnswerFacts
from titan_rl.tools.diagnosis.history import MetricsHistory
from titan_rl.tools.diagnosis.ranking import Diagnosis, diagnose
from titan_rl.tools.inspect.reward_audit import JudgedSample, judged, suspicions
from titan_rl.tools.inspect.run_history import METRICS
from titan_rl.tools.inspect.samples import ROLLOUTS, RunSample, Samples

MOST_BYTES = 2**28  # rollouts that are read, in about 15 s: the last steps of a larger file


@dataclass(frozen=True, slots=True)
class DiagnosedRun:
    history: MetricsHistory
    diagnosis: Diagnosis
    notes: tuple[str, ...]  # what could not be read

    @classmethod
    def of(cls, run: Path) -> "DiagnosedRun":
        """Diagnose the run in a folder, which may be active, finished or crashed."""
        notes: list[str] = []
        config, begin = _config(run, notes), reward_cut(run)
        if begin:
            notes.append(f"only the steps after step {begin} are examined: the reward was another one up to there")
        lines = (
            line
            for line in known_lines(run / METRICS)
            if line["kind"] == "startup" or line["step"] > begin or not begin
        )
        history = MetricsHistory(lines, config, _answers(run, notes, begin))
        return cls(history, diagnose(history), tuple(notes))


def _config(run: Path, notes: list[str]) -> Config:
    """Return the run's config, or the defaults with a note if this version cannot read it."""
    try:
        return load_of_run(run)
    except (ConfigError, OSError, ValueError) as error:
        notes.append(f"config.toml cannot be read, so keys are assumed to have their defaults: {str(error).strip()}")
        return Config()


def _answers(run: Path, notes: list[str], begin: int) -> AnswerFacts | None:
    """Return what the rules need of the samples after step `begin`, or None if there are none."""
    if not (run / ROLLOUTS).is_file():
        return None
    try:
        samples = Samples(run)
    except OSError as error:
        notes.append(f"{ROLLOUTS} cannot be read: {error}")
        return None
    steps = [step for step in samples.steps if step > begin or not begin]
    if not steps:
        return None
    if (size := (run / ROLLOUTS).stat().st_size) > MOST_BYTES:
        steps = steps[-max(1, len(steps) * MOST_BYTES // size) :]
        notes.append(f"samples: of steps {steps[0]} to {steps[-1]} only, because {ROLLOUTS} has {size / 2**30:.1f} GiB")
    facts, rewarded = AnswerFacts(), list[JudgedSample]()
    for step in steps:
        for sample in samples.of_step(step):
            facts.add(_answer(sample))
            rewarded += filter(None, [judged(sample)])
    facts.close_step()
    facts.suspicions = suspicions(rewarded)
    if samples.damaged:
        notes.append(f"samples: {samples.damaged} damaged lines of {ROLLOUTS} are left out")
    return facts if facts.count else None


def _answer(sample: RunSample) -> Answer:
    sampled = compress(sample.logprobs, sample.mask)
    return Answer(
        sample.step,
        sample.prompt_id,
        sample.sample,
        sample.prompt,
        str(sample.answer),
        sample.text,
        sample.reward,
        sample.truncated,
        [logprob for logprob in sampled if logprob is not None],
        sample.status,
        sample.error,
        {name: value for name, value in sample.rewards.items() if value is not None},
    )
