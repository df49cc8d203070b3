"""Names what a run's folder had recorded and lost, before a resumed run trains anything again."""

import json
import os
from pathlib import Path

from titan_rl.config.sections import Config
from titan_rl.record.ledger import NAME, decode
from titan_rl.record.lines import whole_lines
from titan_rl.record.run_folder import Resume

LAST_BYTES = 1 << 22  # at the end of a file, in which its last line is looked for


def missing_records(folder: Path, config: Config, resume: Resume) -> list[str]:
    """Return a note for each file of an RL run that ends before the step at which the run resumes, and for a step that
    the ledger saved and that has no checkpoint."""
    if config.algorithm.kind != "rl" or resume.nothing:
        return []
    step = resume.rl or 0
    notes, (trained, saved) = list[str](), ledger_steps(folder)
    if saved > step:
        notes.append(
            f"the checkpoint of step {saved}, which the ledger saved, is missing or not whole: the steps after "
            f"{f'step {step}' if step else 'the cold start'} are trained again"
        )
    ends = {NAME: trained} | {name: _last_step(folder, name) for name in ("metrics.jsonl", "rollouts.jsonl")}
    for name, end in ends.items():
        if end < step:
            what = "is missing" if not (folder / name).exists() else f"ends at step {end}"
            notes.append(f"{name} {what}, and the run resumes from step {step}: records of its steps are lost")
    return notes


def ledger_steps(folder: Path) -> tuple[int, int]:
    """Return the last step that the ledger trained, and the last that it saved; a rewind undoes later ones."""
    trained = saved = 0
    path = folder / NAME
    for line in whole_lines(path) if path.is_file() else ():
        if not any(kind in line for kind in (b'"event":"trained"', b'"event":"saved"', b'"event":"begun"')):
            continue
        event = decode(line)
        step = event.get("step") if event is not None else None
        if event is None or not isinstance(step, int):
            continue
        if event["event"] == "begun":
            trained, saved = min(trained, step), min(saved, step)
        elif event["event"] == "trained":
            trained = step
        elif event["event"] == "saved":
            saved = step
    return trained, saved


def _last_step(folder: Path, name: str) -> int:
    """Return the last RL step in a file of lines; 0: there is none."""
    path = folder / name
    if not path.is_file():
        return 0
    begin = max(0, os.path.getsize(path) - LAST_BYTES)
    return _last_step_from(path, begin) or (_last_step_from(path, 0) if begin else 0)  # a line may be longer


def _last_step_from(path: Path, begin: int) -> int:
    last = 0
    for line in whole_lines(path, begin):
        try:
            record = json.loads(line)
        except ValueError:  # the first one may be a part of a line
            continue
        if isinstance(record, dict) and record.get("kind") == "rl" and isinstance(record.get("step"), int):
            last = record["step"]
    return last
