"""The ledger after a crash, and audits of ledgers written by hand."""

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from titan_rl.config.sections import Config, RolloutSection, TrainingSection
from titan_rl.config.toml import to_toml
from titan_rl.record.history import audit
from titan_rl.record.ledger import NAME, Damaged, Ledger, events
from titan_rl.wire.types import Completion, Group, Prompt, Rollout, Turn

COMPLETION = Completion([5, 6], [-0.5, -0.25], [0, 0], "stop")


def group(id: int) -> Group:
    return Group(Prompt(id, "1+1=", [1], "20"), [Rollout([Turn([1], COMPLETION)], "20", 1.0)])


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
    path = folder / NAME
    whole = path.read_bytes()
    path.write_bytes(whole[:cut])
    kept = list(events(folder))
    assert kept == list(events_of(whole))[: whole[:cut].count(b"\n")]
    with Ledger(folder) as ledger:
        ledger.admitted(99, 2)
    assert [event["n"] for event in events(folder)] == list(range(len(kept) + 1))
    assert list(events(folder))[-1]["prompt"] == 99


def events_of(text: bytes) -> list[dict[str, Any]]:
    return [json.loads(line.split(b" ", 1)[1]) for line in text.splitlines()]


def test_a_changed_or_missing_line_in_the_midst_is_found(tmp_path: Path) -> None:
    written(tmp_path, 5)
    path = tmp_path / NAME
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join([*lines[:2], lines[2].replace(b'"turn":1', b'"turn":7'), *lines[3:]]))
    with pytest.raises(Damaged, match="line 3"):
        list(events(tmp_path))
    path.write_bytes(b"".join([*lines[:2], *lines[3:]]))
    with pytest.raises(Damaged, match="line 3: expected event 2"):
        list(events(tmp_path))


# -- audits ------------------------------------------------------------------------------------------------------


def lived(ledger: Ledger, *prompts: int, step: int) -> None:
    """Admitted, sampled, scored and trained on."""
    for id in prompts:
        ledger.admitted(id, step)
        ledger.sampled(id, [COMPLETION])
        ledger.scored(id, [1.0])
    ledger.trained(step, [group(id) for id in prompts])


def recorded(folder: Path, steps: dict[int, list[int]]) -> None:
    """The run's other records, as they stand at its end."""
    config = Config(
        rollout=RolloutSection(groups_per_step=2, group_size=1, lag=9), training=TrainingSection(steps=len(steps))
    )
    (folder / "config.toml").write_text(to_toml(config))
    (folder / "metrics.jsonl").write_text("".join(f'{{"kind": "rl", "step": {step}}}\n' for step in steps))
    lines = [{"step": step, "prompt_id": id} for step, ids in steps.items() for id in ids]
    (folder / "rollouts.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


def test_a_run_that_goes_back_within_its_process_is_audited_as_one_that_resumes(tmp_path: Path) -> None:
    """Steps 1 to 3, back to the cut of step 1 with prompt 3 open, on to step 3; and the ledger says which attempt at a
    prompt an admission is."""
    with Ledger(tmp_path) as ledger:
        ledger.begun(0, 0, [])
        lived(ledger, 0, 1, step=1)
        ledger.admitted(2, 2)
        ledger.admitted(3, 2)
        ledger.begun(1, 4, [2, 3])
        lived(ledger, 2, 3, step=2)
        lived(ledger, 4, 5, step=3)
        ledger.begun(1, 4, [2, 3])
        lived(ledger, 2, 3, step=2)
        lived(ledger, 4, 6, step=3)
        ledger.admitted(5, 4)
    recorded(tmp_path, {1: [0, 1], 2: [2, 3], 3: [4, 6]})
    problems, checked = audit(tmp_path)
    assert problems == ["prompt 5 was neither trained on nor dropped, and the run is finished"]
    assert "7 prompts: 6 trained on in 3 steps, 0 dropped, 1 unfinished, 6 admitted again by 2 restarts" in checked
    attempts = [(event["prompt"], event["attempt"]) for event in events(tmp_path) if event["event"] == "admitted"]
    assert attempts[4:] == [(2, 2), (3, 2), (4, 1), (5, 1), (2, 3), (3, 3), (4, 2), (6, 1), (5, 2)]
    with Ledger(tmp_path) as ledger:  # another process counts on
        ledger.begun(1, 4, [])
        ledger.admitted(5, 4)
    assert list(events(tmp_path))[-1]["attempt"] == 3


def test_a_failed_group_is_no_problem_and_its_attempts_are_counted(tmp_path: Path) -> None:
    with Ledger(tmp_path) as ledger:
        ledger.begun(0, 0, [])
        for id in (0, 1):
            ledger.admitted(id, 1)
            ledger.sampled(id, [COMPLETION])
            ledger.failed(id, 1, "ValueError: no")
        ledger.failed(0, 2, "ValueError: no")
        ledger.dropped(group(0), "failed: ValueError: no")
        ledger.scored(1, [1.0])
        ledger.trained(1, [group(1)])
        lived(ledger, 2, 3, step=2)
    recorded(tmp_path, {1: [1], 2: [2, 3]})
    problems, checked = audit(tmp_path)
    assert problems == ["step 1 trained on 1 prompts, expected 2"]
    assert "4 prompts: 3 trained on in 2 steps, 1 dropped" in checked


@pytest.mark.parametrize(
    ("what", "said"),
    [
        ([("failed", {"attempt": 2, "error": "e"})], "failed at attempt 2, expected 1"),
        ([("dropped", {"reason": "failed: e", "tokens": 2})], "is dropped as failed, but no attempt failed"),
        ([("dropped", {"reason": "flat", "tokens": 2})], "is dropped (flat) before it is scored"),
        (
            [
                ("failed", {"attempt": 1, "error": "e"}),
                ("scored", {"rewards": [1.0]}),
                ("dropped", {"reason": "failed: e", "tokens": 2}),
            ],
            "is dropped as failed, but was scored",
        ),
        (
            [("scored", {"rewards": [1.0]}), ("failed", {"attempt": 1, "error": "e"})],
            "failed after its outcome was known, or before it was sampled",
        ),
        ([("admitted", {"turn": 1, "attempt": 3})], "is attempt 3, expected 2"),
    ],
)
def test_an_audit_names_what_contradicts_itself(
    tmp_path: Path, what: list[tuple[str, dict[str, Any]]], said: str
) -> None:
    with Ledger(tmp_path) as ledger:
        ledger.begun(0, 0, [])
        ledger.admitted(0, 1)
        ledger.sampled(0, [COMPLETION])
        for event, more in what:
            ledger._append(event, prompt=0, **more)
    recorded(tmp_path, {})
    assert any(said in problem for problem in audit(tmp_path)[0]), audit(tmp_path)[0]


def test_rollouts_that_the_ledger_does_not_know_are_named(tmp_path: Path) -> None:
    (tmp_path / "config.toml").write_text(to_toml(Config()))
    with Ledger(tmp_path) as ledger:
        ledger.begun(0, 0, [])
    line = {"kind": "rl", "step": 1, "prompt_id": 4}
    (tmp_path / "rollouts.jsonl").write_text(json.dumps(line) + "\n")
    problems, _ = audit(tmp_path)
    assert "rollouts.jsonl has prompt 4 at step 1, the ledger does not" in problems
