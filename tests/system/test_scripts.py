"""The real scripts, bash, venv and pip, on an empty package and without an index: nothing is downloaded."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from support.checkouts import Checkout, clone


@pytest.fixture
def fresh(tmp_path: Path) -> Checkout:
    return clone(tmp_path)


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Checkout:
    """An installed checkout, shared by the tests that do not need a fresh one."""
    checkout = clone(tmp_path_factory.mktemp("installed"))
    checkout.add_torch()
    done = checkout.call("--extra", "cpu")
    assert done.returncode == 0, done.stderr
    assert "installing titan_rl[cpu] into" in done.stderr
    return checkout


def test_arguments_and_cwd_reach_the_program(installed: Checkout, tmp_path: Path) -> None:
    done = installed.call("--config", "my run.toml", "--extra", "cpu", "", "--job.description=a  'b' $c", cwd=tmp_path)
    seen = json.loads(done.stdout)
    assert seen["args"] == ["--config", "my run.toml", "", "--job.description=a  'b' $c"]
    assert Path(seen["cwd"]) == tmp_path.resolve()
    assert Path(seen["prefix"]) == installed.root / ".venv"


def test_a_script_can_be_called_through_a_link(installed: Checkout, tmp_path: Path) -> None:
    (tmp_path / "titan").symlink_to(installed.root / "scripts/run")
    done = subprocess.run(
        [tmp_path / "titan", "x"], cwd=tmp_path, env=installed.env(), capture_output=True, text=True, timeout=60
    )
    assert json.loads(done.stdout)["args"] == ["x"]


def test_the_second_call_installs_nothing(installed: Checkout) -> None:
    installed.call()
    before = installed.log.stat().st_mtime_ns
    done = installed.call()
    assert (done.returncode, done.stderr) == (0, "")
    assert installed.log.stat().st_mtime_ns == before


def test_a_changed_pyproject_is_installed_again(installed: Checkout) -> None:
    with (installed.root / "pyproject.toml").open("a") as file:
        file.write("# changed\n")
    assert "installing titan_rl[" in installed.call().stderr
    assert installed.call().stderr == ""


def test_an_extra_is_kept_until_another_is_asked_for(fresh: Checkout) -> None:
    fresh.add_torch()
    assert "installing titan_rl[cpu]" in fresh.call("--extra=cpu").stderr
    done = fresh.call("--extra", "cuda")
    assert "it holds vLLM for another device than cuda" in done.stderr
    assert "installing titan_rl[cuda]" in done.stderr
    # Of the two media packages, only the one that does not import is removed.
    line = "titan_rl: removed torchvision: built for another torch; text models do not need them"
    assert line in done.stderr.splitlines()
    names = {path.name.split("-")[0] for path in fresh.root.glob(".venv/lib/*/site-packages/*.dist-info")}
    assert "torchaudio" in names
    assert "torchvision" not in names
    assert fresh.call().stderr == ""


def test_a_failed_install_leaves_no_stamp_and_the_next_call_goes_on(fresh: Checkout) -> None:
    failed = fresh.call("--extra", "cpu")  # there is no torch to find yet
    assert failed.returncode == 1
    assert "No matching distribution found for torch==2.13.0+cpu" in failed.stderr
    assert str(fresh.log) in failed.stderr
    assert not fresh.stamp.exists()
    fresh.add_torch()
    assert fresh.call("--extra", "cpu").returncode == 0  # into the .venv that has no stamp
    assert fresh.stamp.exists()


def test_of_two_first_calls_one_installs(fresh: Checkout) -> None:
    fresh.add_torch()
    both = [
        subprocess.Popen(
            fresh.command("--extra", "cpu"),
            cwd=fresh.root,
            env=fresh.env(),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for _ in range(2)
    ]
    said = [process.communicate(timeout=300)[1] for process in both]
    assert [process.returncode for process in both] == [0, 0]
    assert "".join(said).count("installing titan_rl[") == 1


@pytest.mark.parametrize("python", ["/nowhere/python3", "false", "python3.14"])
def test_without_a_python_that_the_engines_support_the_exit_code_is_2(fresh: Checkout, python: str) -> None:
    newer = fresh.wheels / "python3.14"  # this Python, which calls itself 3.14
    program = "import sys; sys.version_info = (3, 14, 0); exec(sys.argv[1])"
    newer.write_text(
        f"#!/bin/sh\n[ $1 != -V ] || exec echo Python 3.14.0\nexec {sys.executable} -c '{program}' \"$2\"\n"
    )
    newer.chmod(0o755)
    done = fresh.call(PYTHON=str(newer) if python == newer.name else python)
    assert done.returncode == 2
    assert "expected Python 3.11, 3.12 or 3.13" in done.stderr
    assert ("(Python 3.14.0)" in done.stderr) == (python == newer.name)
    assert not fresh.stamp.exists()


@pytest.mark.parametrize("args", [["--extra", "tpu"], ["--extra"], ["--extra="]])
def test_an_unknown_extra_is_refused(fresh: Checkout, args: list[str]) -> None:
    done = fresh.call(*args)
    assert done.returncode == 2
    assert "--extra expects cpu or cuda, found" in done.stderr


def give_tests(checkout: Checkout) -> None:
    """Write a test of each kind. They run in the real pytest of the environment that runs this test."""
    own = next(checkout.root.glob(".venv/lib/*/site-packages"))
    (own / "borrowed.pth").write_text("\n".join(path for path in sys.path if path.endswith("site-packages")))
    for tier in ("unit", "system"):
        (checkout.root / "tests" / tier).mkdir(parents=True)
        (checkout.root / "tests" / tier / f"test_{tier}.py").write_text(
            f"import pytest\n\ndef test_{tier}(): pass\n\n"
            "@pytest.mark.gpu\ndef test_gpu(): pass\n\n@pytest.mark.slow\ndef test_slow(): pass\n"
        )
    (checkout.root / "tests/conftest.py").write_text(
        "from hypothesis import settings\n\nsettings.register_profile('thorough', max_examples=100)\n"
    )


def test_the_test_script_leaves_out_what_cannot_run(installed: Checkout) -> None:
    give_tests(installed)
    done = installed.call("-v", script="test")
    assert "installing titan_rl[cpu,dev]" in done.stderr

    def ran(*arguments: str) -> set[str]:
        out = installed.call("-v", *arguments, script="test").stdout
        return {line.split("::")[1].split()[0] for line in out.splitlines() if " PASSED " in line}

    assert "2 deselected" in done.stdout
    assert ran() == {"test_unit"}
    assert ran("--all") == {"test_unit", "test_system"}
    assert ran("-m", "slow") == {"test_slow"}
    assert ran("-k", "system") == set()
    assert ran("--all", "-k", "system") == {"test_system"}
    assert ran("tests/system") == ran("tests/system/test_system.py::test_system") == {"test_system"}
    assert installed.call().stderr == ""  # run keeps the dev extra


def test_on_the_cuda_stack_tests_that_start_runs_are_left_out(fresh: Checkout) -> None:
    fresh.add_torch()
    fresh.call("--extra", "cuda", script="test")  # installs; there are no tests yet
    give_tests(fresh)
    done = fresh.call("-v", "--all", script="test")
    assert "leaving out tests/loop and tests/system" in done.stderr
    assert {line.split("::")[1].split()[0] for line in done.stdout.splitlines() if " PASSED " in line} == {"test_unit"}
