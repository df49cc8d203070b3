"""What a run may do: none of it is a finding of the audit."""

import shutil
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from support.written_runs import WrittenRun, config
from titan_rl.record.run_names import LEDGER
from titan_rl.tools.inspect.audit_rules import audit

pytestmark = pytest.mark.usefixtures("fast_disk")

MOMENTS = ("starting", "sampled", "trained", "reported", "saving")


def clean(run: WrittenRun, steps: int = 8) -> str:
    problems, checked = audit(run.folder)
    assert problems == []
    assert f"in {steps} steps" in checked
    return checked


@pytest.fixture
def run(tmp_path: Path) -> WrittenRun:
    return WrittenRun(tmp_path)


@pytest.mark.parametrize(
    "keys",
    [
        {},
        {"max_staleness_steps": 1},
        {"max_staleness_steps": 3},
        {"max_staleness_steps": 2, "overtake_steps": 1},
        {"max_staleness_steps": 4, "overtake_steps": 2, "groups_per_step": 3},
        {"stream_groups": 1, "groups_per_step": 3},
        {"stream_groups": 2, "groups_per_step": 3, "max_staleness_steps": 2},
        {"dynamic_sampling": True},
        {"dynamic_sampling": True, "max_staleness_steps": 1},
        {"group_size": 5, "interval": 3},
        {"interval": 100},
    ],
    ids=str,
)
def test_a_run_to_its_end(run: WrittenRun, keys: dict[str, Any]) -> None:
    run.life(config(**keys))
    checked = clean(run)
    assert " 0 unfinished, 0 admitted again by 0 restarts" in checked
    assert (", 0 dropped" in checked) == ("dynamic_sampling" not in keys)


@pytest.mark.parametrize("lag", [0, 2])
@pytest.mark.parametrize("stream_groups", [0, 1])
def test_groups_whose_reward_fails(run: WrittenRun, lag: int, stream_groups: int) -> None:
    run.life(config(max_staleness_steps=lag, stream_groups=stream_groups), failing={1: 2, 4: 1, 9: 5})
    assert "2 dropped" in clean(run)


@pytest.mark.parametrize(
    "changed",
    [
        {"groups_per_step": 4},
        {"groups_per_step": 1},
        {"group_size": 4},
        {"max_staleness_steps": 2},
        {"max_staleness_steps": 3, "overtake_steps": 2},
        {"max_staleness_steps": 0, "overtake_steps": 0},
        {"interval": 3},
        {"steps": 10},
        {"dynamic_sampling": True},
        {"stream_groups": 1},
        {"groups_per_step": 3, "group_size": 3, "max_staleness_steps": 3, "interval": 5, "steps": 12},
    ],
    ids=str,
)
@pytest.mark.parametrize(
    "before", [{"max_staleness_steps": 1}, {"max_staleness_steps": 3, "overtake_steps": 1}], ids=str
)
def test_a_run_that_resumes_with_other_bounds(run: WrittenRun, before: dict[str, Any], changed: dict[str, Any]) -> None:
    run.life(config(**before), last=5)
    clean(run, 5)
    run.life(config(**before | {"overtake_steps": 0} | changed))
    clean(run, changed.get("steps", 8))


@pytest.mark.parametrize("moment", MOMENTS)
@pytest.mark.parametrize("step", [2, 5, 8])
def test_a_run_that_is_killed(run: WrittenRun, step: int, moment: str) -> None:
    if moment == "starting":
        run.life(config(max_staleness_steps=1), last=step)
    run.life(config(max_staleness_steps=2 if moment == "starting" else 1, steps=9), kill=(step, moment))
    problems, _ = audit(run.folder)
    assert problems == []
    run.life(config(max_staleness_steps=1, steps=9))
    clean(run, 9)


def test_a_run_that_is_killed_twice_and_the_second_time_before_it_begins(run: WrittenRun) -> None:
    """It has cut the logs at its checkpoint, and the ledger does not say so yet."""
    run.life(config(), kill=(5, "trained"))
    run.life(config(interval=1), kill=(4, "starting"))
    assert audit(run.folder)[0] == []
    run.life(config())
    clean(run)


@pytest.mark.parametrize("interval", [1, 2, 0])
def test_a_run_that_rewinds_within_its_process(run: WrittenRun, interval: int) -> None:
    run.life(config(max_staleness_steps=1, interval=3, snapshot_interval=interval), rewind=5)
    assert "by 1 restarts" in clean(run)
    shutil.rmtree(run.folder)
    run.life(config(interval=3, snapshot_interval=interval), last=4, rewind=2)
    run.life(config(interval=3, snapshot_interval=interval), rewind=7)
    assert "by 3 restarts" in clean(run)


@pytest.mark.parametrize("name", [LEDGER, "metrics.jsonl", "rollouts.jsonl"])
def test_a_run_whose_tail_is_torn(run: WrittenRun, name: str) -> None:
    run.life(config(max_staleness_steps=1), kill=(5, "reported"))
    path = run.folder / name
    path.write_bytes(path.read_bytes()[:-11])
    run.life(config(max_staleness_steps=1))
    clean(run)


def test_a_run_that_goes_back_to_an_earlier_checkpoint(run: WrittenRun) -> None:
    """The newest one was damaged, or a rollback hid it."""
    run.life(config(max_staleness_steps=1), last=6)
    newest = run.folder / "checkpoint" / "step-6"
    newest.rename(newest.with_name("undone-6.1"))
    run.life(config(max_staleness_steps=1), kill=(5, "reported"))
    assert audit(run.folder)[0] == []
    run.life(config(max_staleness_steps=1))
    clean(run)


def test_a_run_that_starts_over_in_its_folder(run: WrittenRun) -> None:
    run.life(config(max_staleness_steps=1), last=5)
    shutil.rmtree(run.folder / "checkpoint")
    run.life(config())
    assert "by 1 restarts" in clean(run)


def test_a_run_without_its_old_checkpoints(run: WrittenRun) -> None:
    run.life(config())
    for step in run.whole_steps()[:-1]:
        shutil.rmtree(run.folder / "checkpoint" / f"step-{step}")
    (run.folder / "summary.json").unlink()
    clean(run)


def life(how: str, steps: int) -> dict[str, Any]:
    keys = {"max_staleness_steps": 0, "overtake_steps": 0, "groups_per_step": 1, "dynamic_sampling": False}
    return {**keys, "interval": 1, "snapshot_interval": 0, "how": how, "steps": steps}


@example(
    lives=[life("stop", 2), life("stop", 3), life("sampled", 3), life("trained", 1)]
)  # the second wrote the summary
@example(lives=[life("stop", 2), life("stop", 3), life("sampled", 3), life("saving", 1)])  # killed in its last save
@settings(max_examples=20)
@given(
    lives=st.lists(
        st.fixed_dictionaries(
            {
                "max_staleness_steps": st.integers(0, 5),
                "overtake_steps": st.integers(0, 2),
                "groups_per_step": st.integers(1, 3),
                "dynamic_sampling": st.booleans(),
                "interval": st.integers(1, 4),
                "snapshot_interval": st.integers(0, 2),
                "how": st.sampled_from(["stop", "rewind", *MOMENTS]),
                "steps": st.integers(1, 3),
            }
        ),
        min_size=1,
        max_size=4,
    )
)
def test_any_lives(tmp_path_factory: pytest.TempPathFactory, lives: list[dict[str, Any]]) -> None:
    run = WrittenRun(tmp_path_factory.mktemp("lives"))
    for life in lives:
        keys = {key: value for key, value in life.items() if key not in ("how", "steps")}
        if life["dynamic_sampling"] or life["max_staleness_steps"] <= life["overtake_steps"]:
            keys["overtake_steps"] = 0
        at = max(run.whole_steps(), default=0)
        end = min(at + life["steps"], 8)
        if end == at:
            break
        match life["how"]:
            case "stop":
                run.life(config(**keys), last=end)
            case "rewind":
                run.life(config(**keys), last=end, rewind=end)
            case moment:
                run.life(config(**keys), kill=(at if moment == "starting" else end, moment))
        assert audit(run.folder)[0] == [] or not (run.folder / LEDGER).exists()
    if max(run.whole_steps(), default=0) < 8:
        run.life(config())
    clean(run)
