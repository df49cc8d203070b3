"""Tables of several policies over one base: [policies.NAME.SECTION], whose keys override the file's for one policy.

    [lora] rank = 16, sync = "adapter"     the base, the engines and all else is shared
    [policies.sums.task] name = "addition"
    [policies.sums.optimizer] lr = 1e-4

A policy's config is the whole file with the policy's tables laid over it. Its folder, RUN/policies/NAME, has the files
of any run.
"""

import re
from collections.abc import Iterator, Sequence
from typing import Any

POLICIES = "policies"
"""Name of the top-level table, of flags (--policies.NAME.SECTION.KEY), and of the folder in a run's."""
SECTIONS = (
    *("task", "curriculum", "rollout", "algorithm", "reference", "eval", "optimizer", "lr_scheduler"),
    *("metrics", "record"),
)
"""Sections whose keys a policy may override."""
KEYS = (
    *("training.steps", "training.stream_groups", "training.max_norm", "training.local_batch_size"),
    *("checkpoint.interval", "checkpoint.keep_latest_k", "debug.seed", "job.description"),
)
"""Keys of other sections that a policy may override."""
NAME = re.compile(r"[a-z0-9_]{1,40}")


def own_tables(file: str, tables: Any, policy: str, problems: list[str]) -> Iterator[tuple[str, str, dict[str, Any]]]:
    """Yield (label, section, its keys) of a policy's tables in the file's [policies]. Note entries of another form."""
    if not isinstance(tables, dict) or not all(isinstance(each, dict) for each in tables.values()):
        problems.append(f"{file}: [{POLICIES}]: expected tables such as [{POLICIES}.sums.task], found something else")
        return
    for section, keys in tables.get(policy, {}).items():
        label = f"{file}: [{POLICIES}.{policy}.{section}]"
        if not isinstance(keys, dict):
            problems.append(f"{label}: expected a table")
        else:
            yield label, section, keys


def of_flags(overrides: Sequence[tuple[str, str]], policy: str) -> list[tuple[str, str]]:
    """Return a policy's own flags, without their beginning; without a policy, the flags of the whole run."""
    own = f"{POLICIES}.{policy}."
    if policy:
        return [(flag.removeprefix(own), text) for flag, text in overrides if flag.startswith(own)]
    return [(flag, text) for flag, text in overrides if not flag.startswith(f"{POLICIES}.")]


def shared(section: str, name: str) -> bool:
    """Return whether a policy may not override a key."""
    return section not in SECTIONS and f"{section}.{name}" not in KEYS
