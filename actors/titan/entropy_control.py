"""Adapts the weight of the entropy bonus to a target (Skywork-OR1), once per step.

    entropy of the step <= target:    coef + delta, at most max;    the next step has the bonus
    entropy of the step > target:     coef - delta, at least min;   the next step has none

It is a state of each checkpoint and snapshot. All ranks compute the same, from the mesh's mean.
"""

from typing import Any

from titan_rl.config.sections import AlgorithmSection

ENTROPY_CONTROL = "entropy_control"
"""Name of the state in a checkpoint."""


class EntropyControl:
    def __init__(self, algorithm: AlgorithmSection) -> None:
        self._algorithm = algorithm
        self._coef = algorithm.entropy_coef
        self._low = False  # the last step's entropy was at or below the target

    @property
    def coef(self) -> float:
        """Weight of the bonus in the current step."""
        return self._coef if self._low else 0.0

    def observe(self, metrics: dict[str, float]) -> None:
        """Take the entropy of a step: of the tokens with a surrogate."""
        a = self._algorithm
        self._low = metrics.get("entropy/top", metrics["entropy"]) <= a.entropy_target
        moved = self._coef + (a.entropy_coef_delta if self._low else -a.entropy_coef_delta)
        self._coef = min(max(moved, a.entropy_coef_min), a.entropy_coef_max)

    def state_dict(self) -> dict[str, Any]:
        return {"coef": self._coef, "low": self._low}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """None is a value of a snapshot that was taken without a target."""
        if state_dict["coef"] is not None:
            self._coef, self._low = state_dict["coef"], state_dict["low"]
