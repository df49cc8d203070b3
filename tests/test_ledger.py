"""The ledger and its audit: what a crash leaves, and what is found wrong."""

import json
import random
import signal
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from running import Run, Runs
from titan_rl.audit import audit, main
from titan_rl.config import Config
from titan_rl.config_file import to_toml
from titan_rl.ledger import NAME, Damaged, Ledger, events
from titan_rl.types import Completion, Group, Prompt, Rollout, Turn

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


# -- audits of real runs --------------------------------------------------------------------------------------------

KEYS: dict[str, Any] = {
    "task__reward": "dense_reward:digits",
    "task__eval_reward": "exact",
    "rollout__lag": 1,
    "training__steps": 30,
    "checkpoint__interval": 3,
    "eval__interval": 0,
    "cold_start__steps": 0,
}


@pytest.fixture(scope="module")
def killed(runs: Runs, tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Its controller was killed three times at random moments, once with the ledger's tail lost; then it finished."""
    folder = tmp_path_factory.mktemp("killed") / "run"
    moments = random.Random(5)
    for life in range(3):
        run = runs.start(folder, **KEYS)
        run.wait_for_step(4 + 7 * life)
        time.sleep(moments.uniform(0, 0.3))
        run.process.send_signal(signal.SIGKILL)
        run.process.wait(20)
        if life == 1:
            ledger = folder / NAME
            ledger.write_bytes(ledger.read_bytes()[:-11])
    return runs.finish(folder, **KEYS)


def test_a_run_that_was_killed_trains_every_prompt_once(killed: Run) -> None:
    problems, looked_at = audit(killed.folder)
    assert problems == []
    assert "120 prompts: 120 trained on in 30 steps, 0 dropped, 0 under way" in looked_at
    assert "by 3 resumes" in looked_at
    trained = Counter((line["step"], line["prompt_id"]) for line in killed.lines("rollouts.jsonl"))
    assert Counter(step for step, _ in trained) == dict.fromkeys(range(1, 31), 4)
    assert sorted(prompt for _, prompt in trained) == list(range(120))


def test_the_command_says_so(killed: Run, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(killed.folder)]) == 0
    assert capsys.readouterr().out.startswith("nothing lost, nothing twice, nothing stale: 120 prompts")
    assert main(["/no/such"]) == 2
    assert "expected the folder of an RL run" in capsys.readouterr().err


def rewrite(path: Path, change: Callable[[list[dict[str, Any]]], None]) -> None:
    """A ledger that is whole, and says something else."""
    found = events_of(path.read_bytes())
    change(found)
    path.unlink()
    with Ledger(path.parent) as ledger:
        for event in found:
            ledger._append(**{key: value for key, value in event.items() if key != "n"})


def swap_prompt(found: list[dict[str, Any]]) -> None:
    last = [event for event in found if event["event"] == "trained"][-1]
    last["prompts"][0] = last["prompts"][1]


def lose_prompt(found: list[dict[str, Any]]) -> None:
    found[:] = [event for event in found if event.get("prompt") != 77]


def make_stale(found: list[dict[str, Any]]) -> None:
    [event for event in found if event["event"] == "sampled"][-1]["versions"] = [3, 3]


def train_unscored(found: list[dict[str, Any]]) -> None:
    scored = [event for event in found if event["event"] == "scored"][-1]
    found.remove(scored)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (swap_prompt, "has its fate already: trained at step 30"),
        (lose_prompt, "prompt 77 was"),
        (make_stale, "steps old at step"),
        (train_unscored, "is trained on before it is scored"),
    ],
)
def test_an_audit_names_what_is_wrong(
    killed: Run, tmp_path: Path, change: Callable[[list[dict[str, Any]]], None], said: str
) -> None:
    for name in (NAME, "config.toml", "metrics.jsonl", "rollouts.jsonl"):
        (tmp_path / name).write_bytes((killed.folder / name).read_bytes())
    rewrite(tmp_path / NAME, change)
    problems, _ = audit(tmp_path)
    assert any(said in problem for problem in problems), problems
    assert main([str(tmp_path)]) == 1


def test_rollouts_that_the_ledger_does_not_know_are_named(tmp_path: Path) -> None:
    (tmp_path / "config.toml").write_text(to_toml(Config()))
    with Ledger(tmp_path) as ledger:
        ledger.begun(0, 0, [])
    line = {"kind": "rl", "step": 1, "prompt_id": 4}
    (tmp_path / "rollouts.jsonl").write_text(json.dumps(line) + "\n")
    problems, _ = audit(tmp_path)
    assert "rollouts.jsonl has prompt 4 at step 1, the ledger does not" in problems
