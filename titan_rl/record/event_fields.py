"""The fields of each event in ledger.jsonl, and what is a valid value of each."""

import math
from collections.abc import Callable
from typing import Any, get_args

from titan_rl.record.ledger import BOUNDS
from titan_rl.wire.stop_reasons import Status


def _is_int(value: Any) -> bool:
    return type(value) is int and 0 <= value < 1 << 63


def _is_number(value: Any) -> bool:
    return math.isfinite(value) if type(value) is float else type(value) is int and abs(value) < 1 << 63


def _is_list(of: Callable[[Any], bool]) -> Callable[[Any], bool]:
    return lambda value: isinstance(value, list) and all(map(of, value))


def _is_reward(value: Any) -> bool:
    return value is None or _is_number(value)


def _is_status(value: Any) -> bool:
    return value in get_args(Status)


def _is_str(value: Any) -> bool:
    return isinstance(value, str)


def _is_bounds(value: Any) -> bool:
    return isinstance(value, dict) and all(
        _is_int(int(value[key])) if type(value.get(key)) in (int, bool) else False for key in BOUNDS
    )


FIELDS: dict[str, dict[str, Callable[[Any], bool]]] = {
    "begun": {"step": _is_int, "next": _is_int, "open": _is_list(_is_int)},
    "admitted": {"prompt": _is_int, "turn": _is_int, "attempt": _is_int},
    "sampled": {"prompt": _is_int, "versions": _is_list(_is_int), "tokens": _is_list(_is_int)},
    "turn": {
        "prompt": _is_int,
        "sample": _is_int,
        "attempt": _is_int,
        "turn": _is_int,
        "read": _is_list(_is_int),
        "tokens": _is_int,
        "digest": _is_int,
    },
    "scored": {"prompt": _is_int, "rewards": _is_list(_is_reward)},
    "failed": {"prompt": _is_int, "attempt": _is_int, "error": _is_str},
    "dropped": {"prompt": _is_int, "reason": _is_str, "tokens": _is_int},
    "trained": {"step": _is_int, "prompts": _is_list(_is_int)},
    "logged": {"step": _is_int, "metrics": _is_int, "rollouts": _is_int},
    "saved": {"step": _is_int},
}
OPTIONAL: dict[str, Callable[[Any], bool]] = {
    "attempt": _is_int,
    "time": _is_number,
    "bounds": _is_bounds,
    "config": _is_int,
    "digests": _is_list(_is_int),
    "statuses": _is_list(_is_status),
    "attempts": _is_list(_is_int),
    "bad_rows": _is_int,
}
