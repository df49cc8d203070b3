"""Optional parts of titan_rl: what the core uses if this installation has it, and imports by name only.

Each is an attribute of a module in titan_rl/ext or titan_rl/tools. The core runs without them (scripts/without).
"""

from importlib import import_module
from importlib.util import find_spec
from typing import Any

PARTS = {
    "pretrained models": "tools.fetch.models:model_folder",
    "samples at the end": "tools.inspect.last_samples:last_samples",
    "warnings of rules": "tools.diagnosis.watch:Watch",
}
"""Where each part is."""


class PartMissing(Exception):
    """A key needs a part that this installation lacks."""


def part(name: str) -> Any:
    """Return an optional part, or None if this installation lacks it."""
    module, _, attribute = PARTS[name].partition(":")
    return getattr(import_module(f"titan_rl.{module}"), attribute) if has_part(name) else None


def needed_part(name: str, key: str) -> Any:
    """Return the part that a key needs."""
    if not has_part(name):
        folder = "/".join(PARTS[name].partition(":")[0].split(".")[:2])
        raise PartMissing(f"{key}: expected an installation with titan_rl/{folder} ({name}), found one without")
    return part(name)


def has_part(name: str) -> bool:
    """Return True if this installation has a part. Nothing but its package is imported."""
    try:
        return find_spec(f"titan_rl.{PARTS[name].partition(':')[0]}") is not None
    except ModuleNotFoundError:  # the package has no folder
        return False
