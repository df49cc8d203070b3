"""A reward that waits while a test holds it, so that a run is still under way when the test looks."""

import os
import time
from pathlib import Path


def exact(completion: str, answer: str) -> float:
    """Return 1.0 if the completion equals the answer, once the file HELD_REWARD is gone."""
    held = Path(os.environ.get("HELD_REWARD", "/nonexistent"))
    while held.exists():
        time.sleep(0.02)
    return float(completion.strip() == answer.strip())
