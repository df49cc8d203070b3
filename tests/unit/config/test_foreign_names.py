"""Names of TRL, verl and OpenRLHF: each leads to a key that exists, and docs/environments.md has the same."""

import re
from pathlib import Path

from titan_rl.config.foreign_names import KEYS, foreign_hint
from titan_rl.config.toml import schema

PAGE = Path(__file__).parents[3] / "docs/environments.md"


def names(cell: str) -> list[str]:
    return re.findall(r"`([^`]+)`", cell)


def test_every_name_leads_to_a_key_and_none_hides_one() -> None:
    ours = {f"{section}.{key}" for section, keys in schema().items() for key in keys}
    assert set(KEYS.values()) <= ours
    assert not ours & set(KEYS)
    assert foreign_hint("--num-generations") == "; here it is --rollout.group_size (docs/environments.md)"
    assert foreign_hint("oops") == ""


def test_the_page_and_the_hints_agree() -> None:
    section = PAGE.read_text(encoding="utf-8").partition("## Coming from TRL or verl")[2]
    rows = [line.split("|")[1:4] for line in section.splitlines() if line.startswith("| `")]
    assert len(rows) > 20
    for key, *others in rows:
        for theirs in others:
            found = [KEYS.get(name, "algorithm.kl_coef" if name == "beta" else "") for name in names(theirs)]
            assert found in ([], names(key)), theirs
