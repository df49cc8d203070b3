"""The rules against runs that a seed draws: which share is named, and how often a healthy run is suspected."""

from support.sick_runs import drawn, score

SICK, HEALTHY = range(150), range(150)
NAMED, ALARMS = 0.85, 0.03


def test_causes_are_named_first_and_healthy_runs_are_left_alone() -> None:
    result = score(SICK, HEALTHY)
    assert result.first >= NAMED * result.sick, "\n".join((result.text, *result.missed))
    assert result.alarms <= ALARMS * result.healthy, "\n".join((result.text, *result.missed))


def test_a_seed_draws_the_same_run_each_time() -> None:
    runs = [drawn(7, sick=True) for _ in range(2)]
    assert runs[0].lines == runs[1].lines
    assert runs[0].cause == runs[1].cause
