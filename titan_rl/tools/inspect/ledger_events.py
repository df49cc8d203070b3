"""The fields of each event of the ledger, and the check of each value."""

from typing import Any, get_args

from titan_rl.record.ledger import BOUNDS
from titan_rl.record.lines import is_count, is_number
from titan_rl.tools.inspect.line_checks import fields, is_text, list_of
from titan_rl.wire.stop_reasons import Status


def _is_reward(value: Any) -> bool:
    return value is None or is_number(value)


def _is_bounds(value: Any) -> bool:
    return isinstance(value, dict) and all(
        type(value.get(key)) in (int, bool) and is_count(int(value[key])) for key in BOUNDS
    )


EVENTS = {
    "begun": fields("step next", "open", bounds=_is_bounds),
    "admitted": fields("prompt turn attempt"),
    "sampled": fields("prompt", "versions tokens digests"),
    "turn": fields("prompt sample attempt turn tokens digest", "read"),
    "scored": fields("prompt", rewards=list_of(_is_reward)),
    "failed": fields("prompt attempt", error=is_text),
    "dropped": fields("prompt tokens", reason=is_text),
    "trained": fields("step", "prompts"),
    "logged": fields("step metrics rollouts"),
    "saved": fields("step"),
}
OPTIONAL = fields(
    "attempt bad_rows",
    "attempts",
    time=is_number,
    statuses=list_of(lambda value: value in get_args(Status)),
    own_loop=lambda value: value is True,
    seat=is_text,
    opponent=is_text,
    images=list_of(is_text),
    changed=lambda value: isinstance(value, dict) and all(map(list_of(is_text), value.values())),
)
