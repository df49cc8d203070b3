"""The real command: in this environment, without any package, with broken ones, in a full and in a narrow place."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from titan_rl.tools.doctor.machine_facts import VARIABLES, Disk
from titan_rl.tools.doctor.report_lines import space, without_home

ROOT = Path(__file__).parents[4]
BARE = (
    "import runpy, sys; sys.path.insert(0, sys.argv.pop(1)); "
    "runpy.run_module('titan_rl.tools.doctor', run_name='__main__')"
)


def doctor(
    *args: str, python: tuple[str, ...] = ("-m", "titan_rl", "doctor"), **env: str
) -> subprocess.CompletedProcess[str]:
    kept = {key: value for key, value in os.environ.items() if key not in ("PYTHONPATH", *VARIABLES)}
    command = [sys.executable, *python, *args]
    return subprocess.run(command, cwd=ROOT, env=kept | env, capture_output=True, text=True, timeout=120)


def without_packages(*args: str, **env: str) -> subprocess.CompletedProcess[str]:
    return doctor(*args, python=("-I", "-S", "-c", BARE, str(ROOT)), **env)


def test_the_screen_of_this_machine() -> None:
    done = doctor()
    assert (done.returncode, done.stderr) == (0, "")
    labels = [line.split(" ")[0] for line in done.stdout.splitlines() if line[:1].strip()]
    assert labels[:7] == ["titan_rl", "titan_rl", "python", "engines", "packages", "cpu", "memory"]
    assert len(done.stdout.splitlines()) < 50


def test_a_folder_that_cannot_be_written_is_named_without_the_file_that_was_tried() -> None:
    denied = "PermissionError: [Errno 13] Permission denied"
    disk = Disk("/there", 2**30, 2**31, f"{denied}: '/there/tmp1x2y'")
    assert space(disk) == f"1.0 GiB of 2.0 GiB free ({denied})"


def test_the_json_has_every_fact_and_no_secret() -> None:
    done = doctor("--json", SECRET_TOKEN="hunter2", ATEN_CPU_CAPABILITY="avx2")
    report = json.loads(done.stdout)
    assert (done.returncode, report["schema"], report["ok"]) == (0, 2, True)
    assert [problem["level"] for problem in report["problems"] if "ATEN_CPU_CAPABILITY" in problem["text"]] == [
        "warning"
    ]
    assert all(problem.keys() == {"check", "level", "text", "remedy"} for problem in report["problems"])
    facts = report["facts"]
    assert facts.keys() == {
        *("identity", "environment", "packages", "cpu", "memory", "limits", "sockets", "kernel", "rank"),
        *("gpu", "network", "disks", "capability", "engine"),
    }
    assert facts["packages"].keys() == {"found", "wanted", "damaged", "cuda_media", "torch_cuda"}
    assert facts["cpu"].keys() == {"model", "architecture", "cores", "usable", "quota", "flags"}
    assert facts["environment"]["ATEN_CPU_CAPABILITY"] == "avx2"
    assert facts["disks"].keys() == {"outputs", "packages", "cache", "temporary"}
    assert "hunter2" not in done.stdout
    assert str(Path.home()) + "/" not in done.stdout


def test_without_any_package_it_says_so_and_what_to_do() -> None:
    done = without_packages()
    assert (done.returncode, done.stderr) == (1, "")
    assert "error: not installed for this Python: torch, torchtitan, spmd-types, torchmonarch, " in done.stdout
    assert "    remedy: " in done.stdout
    report = json.loads(without_packages("--json").stdout)
    assert not report["ok"]
    assert report["problems"][0]["check"] == "packages"
    assert report["facts"]["packages"]["found"] == {}


def test_broken_packages_are_not_imported(tmp_path: Path) -> None:
    names = ("torch", "rich", "psutil", "numpy", "tomli", "vllm", "monarch", "torchtitan", "tokenizers", "packaging")
    for name in names:
        (tmp_path / f"{name}.py").write_text(f"raise RuntimeError('{name} was imported')")
    done = doctor(PYTHONPATH=f"{tmp_path}:{ROOT}")
    assert (done.returncode, done.stderr) == (1, "")
    assert "engines     torch " in done.stdout
    assert "error: no rank of a run can be started: RuntimeError: monarch was imported" in done.stdout


def test_a_torch_of_which_a_file_is_missing_is_named(tmp_path: Path) -> None:
    info = tmp_path / "torch-2.13.0+cpu.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Name: torch\nVersion: 2.13.0+cpu\n")
    (info / "RECORD").write_text("torch/__init__.py,,5\n")
    report = json.loads(doctor("--json", PYTHONPATH=f"{tmp_path}:{ROOT}").stdout)
    (problem,) = (problem for problem in report["problems"] if problem["level"] == "error")
    assert problem["text"] == ("torch is damaged: 1 of 1 files are missing or changed, such as torch/__init__.py")
    assert not report["ok"]


def test_a_long_tmpdir_is_a_warning(tmp_path: Path) -> None:
    folder = tmp_path / ("t" * 80)
    folder.mkdir()
    done = doctor(TMPDIR=str(folder))
    assert "expected at most 54" in " ".join(done.stdout.split())
    assert list(folder.iterdir()) == []


def test_too_few_open_files() -> None:
    script = f"ulimit -n 100; exec {sys.executable} -m titan_rl.tools.doctor"
    done = subprocess.run(["bash", "-c", script], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 1
    assert "✗ error" in done.stdout
    assert "open files are limited to 100" in done.stdout


def test_bad_usage() -> None:
    assert doctor("--jsn").returncode == 2


def test_the_home_folder_is_a_tilde() -> None:
    report = {"a": ["/home/me", "/home/me/x and /home/me/y", "/home/mean", 1], "b": ({"c": "/home/me/"},)}
    assert without_home(report, "/home/me") == {"a": ["~", "~/x and ~/y", "/home/mean", 1], "b": [{"c": "~/"}]}
    assert without_home("/root", "/") == "/root"


@pytest.mark.parametrize("name", ["doctor", "machine_facts"])
def test_nothing_outside_python_is_imported(name: str) -> None:
    program = f"import sys; import titan_rl.tools.doctor.{name.replace('doctor', 'screen')} as m; print(*sys.modules)"
    done = doctor(python=("-c", program))
    roots = {module.split(".")[0] for module in done.stdout.split()}
    site = {"rich", "torch", "psutil", "numpy", "tomli", "vllm", "monarch", "torchtitan", "transformers", "packaging"}
    assert roots & site == set(), done.stderr
