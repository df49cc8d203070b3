"""Where scripts/install.py takes torch's CPU build from, as the real pip and uv see indexes of empty packages."""

import os
import shutil
import sys
from pathlib import Path

import install
import pytest

from support.checkouts import simple_index

TORCH = "torch==90.0+cpu"  # a release that no environment has


@pytest.mark.parametrize("name", ["pip", "uv"])
@pytest.mark.parametrize("version", ["90.0+cpu", "90.0"])
def test_pytorchs_index_is_used_only_where_the_own_one_lacks_the_cpu_build(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, name: str, version: str
) -> None:
    for variable in [variable for variable in os.environ if variable.startswith(("PIP_", "UV_", "TORCH_INDEX"))]:
        monkeypatch.delenv(variable)
    own = {"index-url": simple_index(tmp_path, torch=version)}
    if name == "uv":
        uv = shutil.which(Path(sys.executable).with_name("uv")) or shutil.which("uv")
        assert uv, "expected uv, which the dev extra installs"
        command, environment = install.uv_command(uv, offline=False), install.uv_environment(own, os.environ)
        environment["UV_CACHE_DIR"] = str(tmp_path / "cache")
    else:
        command = [*install.PIP, "install"]
        environment = os.environ | {"PIP_CONFIG_FILE": os.devnull, "PIP_INDEX_URL": own["index-url"]}
    index = install.torch_index(install.Installer(name, command, environment, tmp_path / "log"), TORCH, offline=False)
    said = capsys.readouterr().err
    if version == "90.0+cpu":
        assert (index, said) == ("", "")
    else:
        assert index == "https://download.pytorch.org/whl/cpu"
        assert said.startswith(f"titan_rl: found no {TORCH} where pip looks (default PyPI has only the CUDA build): ")
        assert said.endswith(f"taking torch from {index}\n")


def test_the_address_that_is_shown_has_no_password() -> None:
    assert install.public("https://me:secret@mirror/whl/cpu") == "https://***@mirror/whl/cpu"
    assert install.public(install.TORCH_INDEX) == install.TORCH_INDEX
