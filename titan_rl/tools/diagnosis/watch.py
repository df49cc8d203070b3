"""Warns during a run: the rules that need metrics only, over a bounded window of steps."""

from collections import deque
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from titan_rl.config.sections import Config
from titan_rl.record.summary import known_lines
from titan_rl.tools.diagnosis.findings import RunFinding
from titan_rl.tools.diagnosis.history import MetricsHistory
from titan_rl.tools.diagnosis.ranking import Diagnosis, diagnose
from titan_rl.wire.program import WHY_PAGE, why_command

WINDOW = 64  # steps: rules look at most this far back during a run, so that a step costs milliseconds
SCORES = 32  # evaluations
EARLY_STEPS = 3  # steps after which truncation or a constant reward is a warning; a collapse is one at once
AT_ONCE = ("collapse", "not_finite")
SCORE_KEYS = ("eval/score", "eval/low", "eval/high")
NOT_TOLD = ("flat", "prompts")  # they name no cause: `python -m titan_rl why` has them


class MetricsWatch:
    """Takes the lines of metrics.jsonl as they are written. Not for several threads at once."""

    def __init__(self, config: Config) -> None:
        self._config = config
        self._steps: deque[Mapping[str, Any]] = deque(maxlen=WINDOW)
        self._scores: deque[Mapping[str, Any]] = deque(maxlen=SCORES)
        self._broken = False  # a rule raised
        self._reported: dict[str, int] = {}  # the level of each rule's last warning

    def step(self, line: Mapping[str, Any]) -> Sequence[str]:
        """Take the line of a step, and return the warnings that it gives rise to."""
        if self._broken:
            return []
        try:
            self._take(line)
            return [f"step {line['step']}: {_short(each)}" for each in self.diagnosis.problems if self._is_news(each)]
        except Exception as error:  # a bug in a rule must not end a run of days
            self._broken = True
            return [f"step {line['step']}: a rule of tools/diagnosis failed and warns no more: {error!r}"]

    def restart(self, metrics: Path) -> None:
        """Begin again with the file's lines, up to where the run resumed or rewound to. Warnings are not repeated."""
        self._steps.clear()
        self._scores.clear()
        for line in known_lines(metrics, last=2 * WINDOW):
            self._take(line)

    def score(self, step: int, scores: Mapping[str, Any]) -> None:
        """Take an evaluation after a step, if `scores` has one."""
        if scores.get("eval/score") is not None:
            self._scores.append({"kind": "eval", "step": step, **{k: scores[k] for k in SCORE_KEYS if k in scores}})

    @property
    def diagnosis(self) -> Diagnosis:
        return Diagnosis((), ()) if self._broken else diagnose(self._history)

    @property
    def cause(self) -> str:
        """Return the first cause that the rules name, with the key to change, or ""."""
        return next((finding.warning for finding in self.diagnosis.findings), "")

    @property
    def hint(self) -> str:
        """Return what explains a run whose steps raised no score beyond noise, or ""."""
        run = self._history
        if not run.lines or run.rises or any(each.rule == "solved" for each in self.diagnosis.findings):
            return ""
        return f"{why_command(self._config.job.dump_folder)}  (no progress: {WHY_PAGE})"

    @property
    def _history(self) -> MetricsHistory:
        return MetricsHistory([*self._steps, *self._scores], self._config)

    def _take(self, line: Mapping[str, Any]) -> None:
        self.score(line["step"], line)
        if line["kind"] in ("rl", "fit"):
            self._steps.append({key: value for key, value in line.items() if not key.startswith("eval/")})

    def _is_news(self, finding: RunFinding) -> bool:
        if finding.rule in NOT_TOLD or (len(self._steps) < EARLY_STEPS and finding.rule not in AT_ONCE):
            return False
        if finding.level <= self._reported.get(finding.rule, -1):
            return False
        self._reported[finding.rule] = finding.level
        return True


def _short(finding: RunFinding) -> str:
    text = finding.text
    head = f"step {finding.since}: "
    if finding.rule != "collapse" or not finding.changes:
        return finding.warning
    change = finding.changes[0]
    return f"{text.removeprefix(head)}: {change.key} = {change.now:g} is the first suspect; try {change.proposed:g}"
