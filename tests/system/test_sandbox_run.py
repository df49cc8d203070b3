"""A whole run whose environment and reward execute what the policy writes."""

from pathlib import Path

from support.running import Runs
from titan_rl.tools.inspect.audit_rules import audit


def test_what_the_policy_writes_is_executed_and_sees_nothing_of_the_run(runs: Runs, tmp_path: Path) -> None:
    run = runs.finish(
        tmp_path / "run",
        environment__name="code_environment:Coder",
        environment__processes=1,
        task__reward="code_environment:judged",
        sandbox__wall_seconds=60,
        hosts__isolation="require",
        cold_start__steps=2,
        training__steps=2,
        eval__size=4,
        eval__interval=0,
    )
    assert audit(run.folder)[0] == []
    steps, rollouts = run.lines("metrics.jsonl"), run.lines("rollouts.jsonl")
    assert [line["step"] for line in steps] == [1, 2]
    assert len(rollouts) == 2 * 16
    for line in rollouts:
        assert (line["status"], len(line["turns"])) == ("completed", 2), line
        assert line["reward"] in (0.5, 1.0)
    for line in steps:
        assert line["environment/spied"] == 0
        assert line["environment/wall_seconds"] == 60
    assert not [name for _, name, command in run.processes() if "sandbox.fork_server" in command]


def test_a_run_on_a_machine_without_a_layer_ends_before_anything_is_spawned(runs: Runs, tmp_path: Path) -> None:
    run = runs.start(
        tmp_path / "run",
        environment__name="titan_rl.ext.sandbox.code_tools:CodeTools",
        sandbox__require="namespaces,landlock",
        sandbox__cgroup="/no/such",
    )
    out = " ".join(run.finish().split())
    assert run.code == 2, out
    assert (
        'sandbox.require: expected "seccomp", and "namespaces" or "landlock" or both, found namespaces, landlock' in out
    )
    assert "sandbox.cgroup: expected the folder of a cgroup v2, found '/no/such'" in out
