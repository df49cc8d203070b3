"""titan_rl as a library, without a run: the cost of its import, and its names."""

import subprocess
import sys

import pytest

import titan_rl


def test_an_import_brings_no_engine() -> None:
    code = "import sys, titan_rl; print(sorted({'torch', 'vllm', 'monarch', 'numpy', 'rich'} & {*sys.modules}))"
    printed = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert printed.strip() == "[]"


def test_every_name_is_there() -> None:
    assert all(getattr(titan_rl, name) for name in titan_rl.__all__)
    assert sorted(titan_rl.__all__) == sorted(name for names in titan_rl.MODULES.values() for name in names)
    with pytest.raises(AttributeError, match="has no attribute 'nothing'"):
        _ = titan_rl.nothing  # pyright: ignore[reportAttributeAccessIssue]
