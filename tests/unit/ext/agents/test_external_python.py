"""Environments in another Python: what goes wrong there is the same data as here. The other Python is this one's own,
without this project's packages on its path."""

import json
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

from support.played import LIMITS, PATIENCE, Played, playing, prompt_of
from titan_rl.ext.agents.episode_news import Ask, Begin, Blocked
from titan_rl.ext.agents.external_python import CHILD, PACKAGE, python_in

UNRULY, SELFISH = "support.lookalikes:Unruly", "support.lookalikes:Selfish"
QUICK = replace(LIMITS, turn_seconds=1.5)


def begun(played: Played, **row: object) -> None:
    """Begin a rollout, and answer its first turn."""
    played.loop.begin([Begin(7, prompt_of("7=", row), seed=0)])
    (ask,) = played.news()
    assert isinstance(ask, Ask)
    played.answer(ask, "8")


def looked(played: Played) -> Blocked:
    deadline = time.monotonic() + PATIENCE
    while (found := played.loop.look()) is None:
        assert time.monotonic() < deadline, "nothing was found to block the loop"
        time.sleep(0.05)
    return found


def test_it_runs_in_the_other_python_and_its_prints_are_no_answers(tmp_path: Path) -> None:
    with playing(UNRULY, tmp_path, python=sys.executable) as played:
        outcomes = played.play([prompt_of("7=", {"does": "nothing"}, id) for id in range(9)], lambda id, turn: "8")
    assert [outcome.reward for outcome in outcomes] == [1.0] * 9


def test_an_error_has_its_name_and_its_line_in_the_users_file(tmp_path: Path) -> None:
    with playing(UNRULY, tmp_path, python=sys.executable) as played:
        (outcome,) = played.play([prompt_of("7=", {"does": "raise"})], lambda id, turn: "8")
    assert outcome.status == "error"
    assert outcome.error.startswith("LookupError: as asked (")
    assert "lookalikes.py:" in outcome.error
    assert 'in step: raise LookupError("as asked"))' in outcome.error


def test_a_late_call_is_a_timeout_with_its_line_and_its_thread_is_counted(tmp_path: Path) -> None:
    with playing(UNRULY, tmp_path, QUICK, python=sys.executable) as played:
        (outcome,) = played.play([prompt_of("7=", {"does": "block", "seconds": 60})], lambda id, turn: "8")
        assert outcome.status == "timeout"
        assert "lookalikes.py:" in outcome.error
        assert "time.sleep" in outcome.error
        deadline = time.monotonic() + PATIENCE
        while not played.loop.stuck:
            assert time.monotonic() < deadline, "the thread was not counted"
            time.sleep(0.1)


def test_a_child_that_dies_and_one_that_is_blocked_are_named(tmp_path: Path) -> None:
    with playing(UNRULY, tmp_path, python=sys.executable) as played:
        begun(played, does="exit")
        assert looked(played).dead == "environment.python ended with exit code 7"
    with playing(SELFISH, tmp_path, QUICK, python=sys.executable) as played:
        begun(played, does="block", seconds=60)
        found = looked(played)
        assert (found.id, found.dead) == (7, "")
        assert found.seconds >= 1.5
        assert "time.sleep" in found.place


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("no_such:Thing", "environment.name = 'no_such:Thing': ModuleNotFoundError"),
        (
            "support.lookalikes:with_policy",
            "environment.name: expected a class, because a function that is given the pol",
        ),
        ("skyrl:gsm8k", "environment.name = 'skyrl:gsm8k': ModuleNotFoundError: No module named 'skyrl_gym'"),
    ],
)
def test_what_cannot_be_loaded_there_is_named(name: str, why: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=why), playing(name, tmp_path, python=sys.executable):
        pass


def test_the_child_imports_the_standard_library_only() -> None:
    program = CHILD.replace("; asyncio.run(serve())", "")
    subprocess.run([sys.executable, "-S", "-c", program, PACKAGE], check=True)


def test_a_python_that_is_too_old_says_so() -> None:
    program = f"import sys; sys.version_info = (3, 10); exec({CHILD!r})"
    said = subprocess.run([sys.executable, "-c", program, PACKAGE], check=True, stdout=subprocess.PIPE, text=True)
    (failed,) = json.loads(said.stdout).values()
    assert failed.startswith("environment.python: expected Python 3.11 or newer, found 3.")


def test_a_folder_stands_for_its_python_and_another_path_is_refused(tmp_path: Path) -> None:
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "python").symlink_to(sys.executable)
    assert python_in(str(tmp_path)) == tmp_path / "bin" / "python"
    with pytest.raises(
        ValueError, match=r"environment\.python: expected a Python or the folder of a virtual environment"
    ):
        python_in(str(tmp_path / "none"))
