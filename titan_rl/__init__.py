"""titan_rl: RL post-training with Monarch meshes, TorchTitan trainers and vLLM generators.

`start` begins a run whose loop is your own: api.py and docs/loops have examples.
"""

import os
import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from titan_rl.api import Run, Stats, start
    from titan_rl.config.sections import Config
    from titan_rl.preflight.refusal import ConfigRefused
    from titan_rl.wire.errors import RunError
    from titan_rl.wire.types import Group, Prompt, Rollout

__version__ = "0.1.0"
__all__ = ["Config", "ConfigRefused", "Group", "Prompt", "Rollout", "Run", "RunError", "Stats", "start"]

if sys.argv[:1] == ["-m"] and sys.path and os.path.exists(sys.path[0]) and os.path.samefile(sys.path[0], "."):
    # `python -m` puts the current folder first, where a stray json.py would replace the library's. Last, it still has a
    # reward's module. What Python itself imports before this line (contextlib, importlib) cannot be helped.
    sys.path.append(sys.path.pop(0))

MODULES = {
    "api": ("Run", "Stats", "start"),
    "config.sections": ("Config",),
    "preflight.refusal": ("ConfigRefused",),
    "wire.errors": ("RunError",),
    "wire.types": ("Group", "Prompt", "Rollout"),
}
"""Where each name of the library is."""


def __getattr__(name: str) -> Any:
    """Import a name of the library when it is used: programs that need none of it start at once."""
    from importlib import import_module

    for module, names in MODULES.items():
        if name in names:
            return getattr(import_module(f"titan_rl.{module}"), name)
    raise AttributeError(f"module 'titan_rl' has no attribute {name!r}")
