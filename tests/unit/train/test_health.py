"""When a run that makes no progress ends, and what it says."""

from dataclasses import replace

import pytest

from titan_rl.config.sections import Config, FaultSection
from titan_rl.train.health import Health, Rewind
from titan_rl.wire.types import StepStats

STEP = StepStats(loss=0.0, grad_norm=1.0, lr=1e-3, tokens=8, seconds=1.0)


@pytest.mark.parametrize("reaction", ["stop", "rollback"])
def test_three_steps_in_a_row_without_a_finite_gradient_end_a_run_or_rewind_it(reaction: str) -> None:
    health = Health(Config(fault=FaultSection(on_bad_steps=reaction)), print)  # pyright: ignore[reportArgumentType]
    bad = replace(STEP, skipped=1)
    assert [health.after(step, stats) for step, stats in enumerate((bad, bad, STEP, bad, bad), start=1)] == [None] * 5
    error = health.after(6, bad)
    assert str(error) == "3 steps in a row had a gradient that is not finite"
    if isinstance(error, Rewind):
        assert error.before == 4
    else:
        assert "fault.max_bad_steps" in getattr(error, "details", "")
    assert isinstance(error, Rewind) == (reaction == "rollback")
