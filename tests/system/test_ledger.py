"""The audit of a real run that was killed three times."""

import random
import resource
import signal
import time
from collections import Counter
from typing import Any

import pytest

from support.running import Run, Runs
from titan_rl.record.run_names import LEDGER
from titan_rl.tools.audit import main
from titan_rl.tools.inspect.audit_rules import audit

FULL = "full.txt"
KEYS: dict[str, Any] = {
    "task__reward": "dense_reward:digits",
    "task__eval_reward": "exact",
    "rollout__max_staleness_steps": 1,
    "training__steps": 30,
    "checkpoint__interval": 3,
    "eval__interval": 0,
    "cold_start__steps": 0,
}


@pytest.fixture(scope="module")
def killed(runs: Runs, tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Its controller was killed twice at random moments, once with the ledger's tail lost; then its disk was full, and
    then it finished."""
    folder = tmp_path_factory.mktemp("killed") / "run"
    moments = random.Random(5)
    for life in range(3):
        run = runs.start(folder, **KEYS)
        run.wait_for_step(4 + 7 * life)
        time.sleep(moments.uniform(0, 0.3))
        if life == 2:
            most = (folder / "rollouts.jsonl").stat().st_size + 100
            resource.prlimit(run.process.pid, resource.RLIMIT_FSIZE, (most, most))  # not of its ranks
            (folder.parent / FULL).write_text(run.finish(60))
            assert run.code == 1
            continue
        run.process.send_signal(signal.SIGKILL)
        run.process.wait(20)
        if life == 1:
            ledger = folder / LEDGER
            written = ledger.read_bytes()
            on_disk = b'"saved"' in written.splitlines()[-1]  # before its checkpoint is: no machine loses that line
            ledger.write_bytes(written + b'{"n": 99, "ev' if on_disk else written[:-11])
    return runs.finish(folder, **KEYS)


def test_a_run_that_was_killed_trains_every_prompt_once(killed: Run) -> None:
    problems, checked = audit(killed.folder)
    assert problems == []
    assert "120 prompts: 120 trained on in 30 steps, 0 dropped, 0 unfinished" in checked
    assert "by 3 restarts" in checked
    trained = Counter((line["step"], line["prompt_id"]) for line in killed.lines("rollouts.jsonl"))
    assert Counter(step for step, _ in trained) == dict.fromkeys(range(1, 31), 4)
    assert sorted(prompt for _, prompt in trained) == list(range(120))


def test_a_full_disk_ends_a_run_by_the_name_of_the_file(killed: Run) -> None:
    said = (killed.folder.parent / FULL).read_text()
    assert f"{killed.folder / 'rollouts.jsonl'} cannot be written: File too large" in said
    assert "the same command resumes from RL step " in said
    assert "Traceback" not in said


def test_the_command_says_so(killed: Run, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(killed.folder)]) == 0
    assert capsys.readouterr().out.startswith("nothing lost, nothing twice, nothing stale: 120 prompts")
    assert main(["/no/such"]) == 2
    assert "expected the dump folder of an RL run" in capsys.readouterr().err
