"""Lay a package with a change of docs/upstream over the installed one, to see what the change does here."""

import os
from pathlib import Path

import upstream


def overlay(contribution: str, folder: Path, only: tuple[str, ...] = ()) -> dict[str, str]:
    """Apply a contribution, or its part in the files of `only`, to a copy of the installed package in `folder`. Return
    the environment in which Python imports the copy."""
    trial = upstream.Trial(upstream.contributions()[contribution], {}, folder)
    trial.make_copy(checkout=False)
    wrong = trial.apply(
        trial.contribution.patches,
        *(f"--include={path}" for path in only),
        *(f"--exclude={path}" for path in trial.contribution.tests),
    )
    assert not wrong, wrong
    paths = [str(trial.copy / trial.project.root), os.environ.get("PYTHONPATH")]
    return {"PYTHONPATH": os.pathsep.join(filter(None, paths))}
