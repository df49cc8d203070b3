"""A real run whose reward does everything that user code does on a bad day."""

import json
from pathlib import Path

from support.hostile_rewards import SUMS
from support.running import Runs
from titan_rl.tools.inspect.audit_rules import audit
from titan_rl.tools.inspect.run_files import RunFiles


def test_a_run_whose_reward_hangs_raises_leaks_forks_and_ends_finishes_and_names_each(
    runs: Runs, tmp_path: Path
) -> None:
    """The run is whole, the audit is clean, no process is left, and no failed answer has a reward."""
    run = runs.start(
        tmp_path / "run",
        task__reward="hostile_rewards:of_a_sum",
        task__reward_seconds=6,  # a busy machine fills 600 MiB slowly
        task__reward_memory_mb=600,
        task__grader="exact",
        task__eval_reward="exact",
        rollout__max_new_tokens=3,
        training__steps=5,
        algorithm__max_dead_steps=0,
    )
    out = run.finish()
    assert run.code == 0, out
    assert run.processes() == []
    assert audit(run.folder)[0] == []
    order = [
        (41, 37),
        (0, 33),
        (7, 96),
        (55, 24),
        (63, 77),
        (65, 17),
        (51, 20),
        (26, 83),
        (3, 0),
        (86, 80),
        (20, 38),
        (5, 41),
        (80, 99),
    ]
    prompts = {SUMS[row]: id for id, row in enumerate(order) if row in SUMS}
    lived = list(RunFiles(run.folder).ledger())
    failed = {event["prompt"]: event["error"] for event in lived if event["event"] == "failed"}
    for what, said in {
        "regex": "did not return within 6 s at",
        "raise": "ZeroDivisionError: mine",
        "leak": "MiB of memory, more than task.reward_memory_mb = 600",
        "exit": "process ended with exit code 3",
    }.items():
        assert said in failed[prompts[what]]
    assert failed.keys().isdisjoint([prompts["fork"], prompts["orphan"]])
    errors = [error for event in lived for error in event.get("errors", {}).values()]
    assert errors
    assert all("to return a finite number, found nan" in error for error in errors)
    lines = [json.loads(line) for line in (run.folder / "rollouts.jsonl").open()]
    assert all((line["reward"] is None) == ("7" in line["text"]) == ("error" in line) for line in lines)
    assert all(line["rewards"]["grader"] == float(line["text"] == line["answer"]) for line in lines)
    steps = run.lines("metrics.jsonl")
    assert sum(line["dropped/failed"] for line in steps) == len({*failed})
    assert sum(line.get("rollouts/failed", 0) for line in steps) == sum(line["reward"] is None for line in lines)
    assert "the reward failed on prompt" in out
