"""The ledger after a crash or damage, and replays of ledgers written by hand."""

import json
import zlib
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from titan_rl.config.sections import Config, RolloutSection, TrainingSection
from titan_rl.record.ledger import Ledger, bounds_of, digest
from titan_rl.record.lines import LineFile, superseded
from titan_rl.record.run_names import LEDGER
from titan_rl.tools.inspect.audit_rules import BOUND_RULES
from titan_rl.tools.inspect.run_files import Damaged, RunFiles
from titan_rl.tools.inspect.run_history import LedgerHistory
from titan_rl.wire.types import Branch, Completion, Group, Prompt, Rollout, Turn

COMPLETION = Completion([5, 6], [-0.5, -0.25], [0, 0], "stop")


def group(id: int) -> Group:
    return Group(Prompt(id, "1+1=", [1], "20"), [Rollout([Branch([Turn([1], COMPLETION)])], "20", 1.0)])


def written(folder: Path, lines: int) -> None:
    with Ledger(folder) as ledger:
        for id in range(lines):
            ledger.admitted(id, 1)


@settings(deadline=None, max_examples=40)
@given(cut=st.integers(0, 400), lines=st.integers(1, 8))
def test_a_torn_ledger_goes_on_after_its_last_whole_line(
    tmp_path_factory: pytest.TempPathFactory, cut: int, lines: int
) -> None:
    folder = tmp_path_factory.mktemp("ledger")
    written(folder, lines)
    path = folder / LEDGER
    whole = path.read_bytes()
    path.write_bytes(whole[:cut])
    kept = list(RunFiles(folder).ledger())
    assert kept == list(events_of(whole))[: whole[:cut].count(b"\n")]
    with Ledger(folder) as ledger:
        ledger.admitted(99, 2)
    assert [event["n"] for event in RunFiles(folder).ledger()] == list(range(len(kept) + 1))
    assert list(RunFiles(folder).ledger())[-1]["prompt"] == 99


def events_of(text: bytes) -> list[dict[str, Any]]:
    return [json.loads(line.split(b" ", 1)[1]) for line in text.splitlines()]


def test_a_changed_or_missing_line_in_the_midst_is_found(tmp_path: Path) -> None:
    written(tmp_path, 5)
    path = tmp_path / LEDGER
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join([*lines[:2], lines[2].replace(b'"turn":1', b'"turn":7'), *lines[3:]]))
    with pytest.raises(Damaged, match="line 3"):
        list(RunFiles(tmp_path).ledger())
    path.write_bytes(b"".join([*lines[:2], *lines[3:]]))
    with pytest.raises(Damaged, match="line 3: expected event 2"):
        list(RunFiles(tmp_path).ledger())


def test_a_flipped_bit_deletes_nothing(tmp_path: Path) -> None:
    """The damaged line moves aside, those around it stay, and the audit still names the missing one."""
    written(tmp_path, 82)
    path, said = tmp_path / LEDGER, list[str]()
    lines = path.read_bytes().splitlines(keepends=True)
    lines[1] = lines[1].replace(b'"turn":1', b'"turn":3')
    path.write_bytes(b"".join(lines))
    with Ledger(tmp_path, said.append) as ledger:
        ledger.admitted(82, 2)
    now = path.read_bytes().splitlines(keepends=True)
    assert now[:81] == [lines[0], *lines[2:]]
    assert [event["n"] for event in events_of(path.read_bytes())] == [0, *range(2, 83)]
    assert superseded(path).read_bytes() == lines[1]
    assert said == [f"{path}, line 2: damaged, and moved to ledger.superseded.jsonl; all other lines stay"]
    problems = LedgerHistory.of(tmp_path).problems
    assert problems[0] == "ledger.jsonl, line 2: expected event 1, found event 2: lines are missing"


@pytest.mark.parametrize("line", [b"[]", b"{}", b'{"n":1}', b'"n"', b"\xff"])
def test_a_line_that_is_no_event_is_damaged_though_its_checksum_is_right(tmp_path: Path, line: bytes) -> None:
    written(tmp_path, 1)
    with LineFile(tmp_path / LEDGER) as file:
        file.append([b"%08x %s" % (zlib.crc32(line), line)])
    said = list[str]()
    with Ledger(tmp_path, said.append) as ledger:
        ledger.admitted(1, 1)
    assert "line 2: damaged" in said[0]
    assert [event["n"] for event in RunFiles(tmp_path).ledger()] == [0, 1]


# -- replays -----------------------------------------------------------------------------------------------------


def lived(ledger: Ledger, *prompts: int, step: int) -> None:
    """Admitted, sampled, scored and trained on."""
    for id in prompts:
        ledger.admitted(id, step)
        ledger.sampled(id, [Completion([5, 6], [-0.5, -0.25], [step - 1, step - 1], "stop")])
        ledger.scored(id, [1.0])
    ledger.trained(step, [group(id) for id in prompts])


def bounds(steps: int) -> dict[str, int]:
    return bounds_of(
        Config(rollout=RolloutSection(groups_per_step=2, group_size=1), training=TrainingSection(steps=steps))
    )


def test_a_run_that_goes_back_within_its_process_is_replayed_as_one_that_resumes(tmp_path: Path) -> None:
    """Steps 1 to 3, back to the cut of step 1 with prompt 3 open, on to step 3; and the ledger numbers the attempts."""
    with Ledger(tmp_path) as ledger:
        ledger.begun(0, 0, [], bounds=bounds(3))
        lived(ledger, 0, 1, step=1)
        ledger.saved(1)
        ledger.admitted(2, 2)
        ledger.admitted(3, 2)
        ledger.begun(1, 4, [2, 3], bounds=bounds(3), attempt=2)
        lived(ledger, 2, 3, step=2)
        lived(ledger, 4, 5, step=3)
        ledger.begun(1, 4, [2, 3], bounds=bounds(3), attempt=3)
        lived(ledger, 2, 3, step=2)
        lived(ledger, 4, 5, step=3)
        ledger.admitted(6, 4)
    history = LedgerHistory.of(tmp_path)
    assert history.problems == []
    assert [problem for rule in BOUND_RULES for problem in rule(history)] == [
        "prompt 6 was neither trained on nor dropped, and the run is finished"
    ]
    assert (len(history.prompts), len(history.starts), list(history.steps)) == (7, 3, [1, 2, 3])
    attempts = [
        (event["prompt"], event["attempt"]) for event in RunFiles(tmp_path).ledger() if event["event"] == "admitted"
    ]
    assert attempts[4:] == [(2, 2), (3, 2), (4, 1), (5, 1), (2, 3), (3, 3), (4, 2), (5, 2), (6, 1)]
    with Ledger(tmp_path) as ledger:  # another process counts on
        ledger.begun(1, 4, [2, 3], bounds=bounds(3))
        ledger.admitted(5, 4)
    assert list(RunFiles(tmp_path).ledger())[-1]["attempt"] == 3


def test_a_failed_group_is_no_problem_and_its_attempts_are_counted(tmp_path: Path) -> None:
    with Ledger(tmp_path) as ledger:
        ledger.begun(0, 0, [], bounds=bounds(2))
        for id in (0, 1):
            ledger.admitted(id, 1)
            ledger.sampled(id, [COMPLETION])
            ledger.failed(id, 1, "ValueError: no")
        ledger.failed(0, 2, "ValueError: no")
        ledger.dropped(group(0), "failed: ValueError: no")
        ledger.scored(1, [1.0])
        ledger.trained(1, [group(1)])
        lived(ledger, 2, 3, step=2)
    history = LedgerHistory.of(tmp_path)
    assert history.problems == []
    assert [problem for rule in BOUND_RULES for problem in rule(history)] == ["step 1 trained on 1 prompts, expected 2"]


def test_a_digest_is_of_tokens_and_versions() -> None:
    samples = [([5, 6], [0, 0]), ([6, 5], [0, 0]), ([5, 6], [0, 1]), ([5], [0]), ([], [])]
    assert len({digest(tokens, versions) for tokens, versions in samples}) == len(samples)


def test_a_turn_is_written_as_json_writes_it(tmp_path: Path) -> None:
    with Ledger(tmp_path) as ledger:
        ledger.admitted(3, 1)
        ledger.turn(3, 1, 2, (7, 123), Turn([1], COMPLETION, index=4))
    event = {"n": 1, "event": "turn", "prompt": 3, "sample": 1, "attempt": 2, "turn": 4, "read": [7, 123], "tokens": 2}
    text = json.dumps({**event, "digest": digest([5, 6], [0, 0])}, separators=(",", ":")).encode()
    assert (tmp_path / LEDGER).read_bytes().splitlines()[1] == b"%08x %s" % (zlib.crc32(text), text)
