"""Shows a good and a bad sample at the end of a run."""

import shlex
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from rich.text import Text

from titan_rl.record.run_log import rollout_lines
from titan_rl.tools.inspect.sample_view import brief_lines, good_and_bad
from titan_rl.tools.inspect.samples import RunSample, opening_of
from titan_rl.wire.program import command_of
from titan_rl.wire.types import Group

SAMPLE_LINES = 12  # the most of each sample


def last_samples(folder: Path, step: int, groups: Sequence[Group], width: int) -> list[Text]:
    """Return lines of a good and a bad sample of a run's last step; none if no step ran."""
    lines = list[Text]()
    for sample in good_and_bad([RunSample.of(line) for line in rollout_lines(step, groups)]):
        opening = opening_of(groups[sample.group].prompt.messages, sample.messages)
        lines += [*brief_lines(replace(sample, opening=opening), width, SAMPLE_LINES), Text()]
    if lines:
        lines.append(Text(f"all of them: {command_of('look')} {shlex.quote(str(folder))}", "dim"))
    return lines
