"""Reads a run's folder back. The run may be active, damaged or of an earlier version: a torn last line is always left
out, and damaged lines wherever no Damaged is raised.

    config.toml ── config, keys, cuts       metrics.jsonl ── metrics        evaluations.jsonl ── evaluations
    summary.json ── summary                 ledger.jsonl ── ledger          evaluation_answers.jsonl ── answers
    replays/ ── gaps                        rollouts.jsonl ── samples       faults.jsonl ── faults

Files that are not there raise OSError where nothing else is said.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import tomli

from titan_rl.config.plain_files import text_of
from titan_rl.config.policies import POLICIES
from titan_rl.config.sections import Config
from titan_rl.config.toml import CONFIG, ConfigError, load_of_run
from titan_rl.record.config_history import Cut, cuts
from titan_rl.record.incidents import Incident
from titan_rl.record.ledger import decode
from titan_rl.record.lines import is_number, whole_lines
from titan_rl.record.run_lock import in_use
from titan_rl.record.run_names import EVALUATIONS, FAULTS, LEDGER, METRICS, SUMMARY
from titan_rl.record.summary import known_lines
from titan_rl.tools.inspect.line_checks import Check, fields, is_text, list_of, objects, parsed, valid_objects
from titan_rl.tools.inspect.samples import EvaluationAnswers, Samples

REWARD_KEYS = ("task.reward", "task.rewards", "task.reward_args", "reward_model.hf_assets_path")
Objects = Iterator[tuple[str, bytes, dict[str, Any] | str]]
_rewards = list_of(lambda reward: reward is None or is_number(reward))
EVALUATION = fields(
    "step",
    kind=is_text,
    set=is_text,
    rewards=lambda value: isinstance(value, dict) and all(map(_rewards, value.values())),
)
FAULT = {"who": is_text, "why": is_text, "outcome": is_text, "time": is_number, "seconds": is_number}


class Damaged(ValueError):
    """A line of the ledger before the last one is missing, or does not match its checksum."""


class RunFiles:
    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __truediv__(self, name: str) -> Path:
        return self.folder / name

    @property
    def active(self) -> bool:
        return in_use(self.folder)

    @property
    def absence(self) -> str:
        """Return the end of a message that a file, or the whole folder, was not found."""
        if not self.folder.is_dir():
            return f"found no folder {self.folder}"
        policies = ", ".join(str(path.parent) for path in sorted(self.folder.glob(f"{POLICIES}/*/{CONFIG}")))
        hint = f"; its policies have folders: {policies}" if policies else ""
        return f"found none in {self.folder}{hint}"

    def objects(self, name: str, expected: Mapping[str, Check]) -> Objects:
        return objects(self / name, expected)

    # -- config.toml, summary.json -------------------------------------------------------------------------------------

    def config(self, overrides: Sequence[tuple[str, str]] = ()) -> Config:
        """Raise ConfigError, OSError or ValueError if this version cannot read the config."""
        return load_of_run(self.folder, overrides)

    def config_or_why(self) -> tuple[Config | None, str]:
        """Return the config, or why this version cannot read it."""
        try:
            return self.config(), ""
        except (ConfigError, OSError, ValueError) as error:
            return None, str(error)

    def tables(self) -> dict[str, Any]:
        """Return config.toml as the run wrote it. Raise OSError, ValueError or RecursionError if it is no TOML."""
        return tomli.loads(text_of(self / CONFIG))

    def cuts(self) -> list[Cut]:
        return cuts(self.folder)

    def reward_cut(self) -> int:
        """Return the step after which the rewards are of the present kind; 0: they always were."""
        return max((cut.step for cut in self.cuts() if any(key in cut.changed for key in REWARD_KEYS)), default=0)

    def summary(self) -> dict[str, Any]:
        """Return summary.json; empty if it cannot be read."""
        with suppress(OSError, ValueError, RecursionError):
            found = json.loads(text_of(self / SUMMARY))
            return found if isinstance(found, dict) else {}
        return {}

    # -- lines ---------------------------------------------------------------------------------------------------------

    def metrics(self) -> Iterator[dict[str, Any]]:
        return known_lines(self / METRICS)

    def samples(self) -> Samples:
        return Samples(self.folder)

    def answers(self) -> EvaluationAnswers:
        return EvaluationAnswers(self.folder)

    def evaluations(self) -> Iterator[dict[str, Any]]:
        """Yield kind, step, set and rewards by problem of each evaluation; none if the run stored none."""
        if (self / EVALUATIONS).exists():
            yield from valid_objects(self / EVALUATIONS, EVALUATION)

    def faults(self) -> Iterator[Incident]:
        """Yield the incidents, each once when it was noticed and once when it ended; none without a file."""
        if (self / FAULTS).exists():
            for line in valid_objects(self / FAULTS, FAULT):
                again = (line.get(key, 0) for key in ("redone", "anew"))
                yield Incident(line["who"], line["why"], line["time"], line["outcome"], line["seconds"], *again)

    def ledger(self) -> Iterator[dict[str, Any]]:
        """Yield every event. Raise Damaged at a line that is changed or missing."""
        for number, line in enumerate(whole_lines(self / LEDGER)):
            event = decode(line)
            if event is None or event["n"] != number:
                expected = f"expected event {number} and its checksum, found {line[:80].rstrip()!r}"
                raise Damaged(f"{self / LEDGER}, line {number + 1}: {expected}")
            yield event

    def gaps(self, step: int) -> dict[tuple[int, ...], list[float]]:
        """Return the gaps of a step's log-probs by the samples' tokens, if `titan_rl replay --logprobs` wrote them."""
        path, found = self / f"replays/step-{step}.jsonl", {}
        for line in whole_lines(path) if path.exists() else ():
            with suppress(KeyError, TypeError):
                sample = parsed(line) or {}
                found[tuple(sample["tokens"])] = sample["gaps"]
        return found
