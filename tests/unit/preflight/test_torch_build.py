"""For which device installed packages were built, from their files."""

import sys
from pathlib import Path

import pytest

from titan_rl.preflight import torch_build
from titan_rl.preflight.torch_build import cuda_media, removal, torch_cuda


def test_a_media_package_for_cuda_is_known_by_what_it_links_to(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for folder in ("torchvision-1.dist-info", "a"):
        (tmp_path / folder).mkdir()
    (tmp_path / "torchvision-1.dist-info/METADATA").write_text("Name: torchvision\nVersion: 1\n")
    (tmp_path / "torchvision-1.dist-info/RECORD").write_text("a/_C.so,,\na/cuda.py,,\n")
    (tmp_path / "a/cuda.py").write_text("libtorch_cuda.so")
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "a/_C.so").write_bytes(b"\x7fELF libtorch_cpu.so\0")
    assert cuda_media() == ()
    (tmp_path / "a/_C.so").write_bytes(b"\x7fELF libtorch_cpu.so\0libtorch_cuda.so\0")
    assert cuda_media() == (() if torch_cuda() else ("torchvision",))


def test_packages_are_removed_by_what_the_environment_has(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "/my tools/python")
    for has_pip, command in ((True, "pip uninstall -y"), (False, "uv pip uninstall --python '/my tools/python'")):
        monkeypatch.setattr(torch_build, "_installed", lambda name, found=has_pip: found)
        assert removal(("torchvision", "torchcodec")) == f"{command} torchvision torchcodec"
