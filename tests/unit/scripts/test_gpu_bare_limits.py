"""gpu_bare's time on a machine that is lent by the minute."""

import gpu_bare


def test_its_parts_take_five_minutes_at_most() -> None:
    """Each process may take what earlier ones leave of their limits, so the sum bounds them all."""
    assert sum(process.seconds for process in gpu_bare.PROCESSES) <= 300
