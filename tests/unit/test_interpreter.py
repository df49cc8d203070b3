"""The interpreter of a run's controller, once everything is up."""

import gc
import sys

from titan_rl.session import OBJECTS, SWITCH_SECONDS, settle_interpreter


def test_neither_what_start_up_made_nor_a_thread_holds_up_the_loop() -> None:
    thresholds, frozen, interval = gc.get_threshold(), gc.get_freeze_count(), sys.getswitchinterval()
    made = [[i] for i in range(1000)]
    try:
        settle_interpreter()
        assert gc.get_freeze_count() >= frozen + len(made)
        assert gc.get_threshold() == (OBJECTS, *thresholds[1:])
        assert gc.isenabled()
        assert sys.getswitchinterval() == SWITCH_SECONDS
    finally:
        gc.unfreeze()
        gc.set_threshold(*thresholds)
        sys.setswitchinterval(interval)
