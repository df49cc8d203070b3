"""RL post-training for language models. `start` begins a run whose loop is your own; api.py has an example."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from titan_rl.api import Run, Stats, start
    from titan_rl.config.sections import Config
    from titan_rl.preflight.refusal import ConfigRefused
    from titan_rl.wire.errors import RunError
    from titan_rl.wire.types import Group, Prompt, Rollout

__all__ = ["Config", "ConfigRefused", "Group", "Prompt", "Rollout", "Run", "RunError", "Stats", "start"]

PLACES = {
    "Config": "config.sections",
    "ConfigRefused": "preflight.refusal",
    "Group": "wire.types",
    "Prompt": "wire.types",
    "Rollout": "wire.types",
    "Run": "api",
    "RunError": "wire.errors",
    "Stats": "api",
    "start": "api",
}


def __getattr__(name: str) -> Any:
    """Import what is asked for: programs that need none of it start at once."""
    from importlib import import_module

    if name not in PLACES:
        raise AttributeError(f"module 'titan_rl' has no attribute {name!r}")
    return getattr(import_module(f"titan_rl.{PLACES[name]}"), name)
