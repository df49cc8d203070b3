"""The garbage collector of a run's controller, once it is up."""

import gc

from titan_rl.session import OBJECTS, settle_memory


def test_what_start_up_made_is_never_looked_at_again() -> None:
    before, kept = gc.get_threshold(), gc.get_freeze_count()
    made = [[i] for i in range(1000)]
    try:
        settle_memory()
        assert gc.get_freeze_count() >= kept + len(made)
        assert gc.get_threshold() == (OBJECTS, *before[1:])
        assert gc.isenabled()
    finally:
        gc.unfreeze()
        gc.set_threshold(*before)
