"""What a rank's imports leave out, and that leaving it out changes nothing."""

import gc
import logging
import os
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch

from support.overlays import overlay
from titan_rl.actors.imports import compile_deferred, unlogged, without_gc

RANK = """
import re, sys
from titan_rl.actors.imports import compile_deferred, without_gc
with without_gc(), compile_deferred():
    from titan_rl.actors.titan.model import titan_config
from titan_rl.actors.titan import private
from titan_rl.actors.titan.spec import build_spec
from titan_rl.config.sections import Config, ModelSection
from titan_rl.preflight.shapes import shape_of

def spec(family):
    built = build_spec(shape_of(ModelSection(name=family)), seq_len=64)
    private.update_from_config(built.model, titan_config(Config(), Config().parallelism))
    return re.sub(" at 0x[0-9a-f]+", "", repr(built.model))

lean = [spec(family) for family in ("llama3", "qwen3")]
heavy = {"torchtitan.trainer", "tensorboard", "datasets", "pandas", "pyarrow", "aiohttp", "torch._inductor.compile_fx"}
print(sorted(heavy & sys.modules.keys()))
import torchtitan.trainer
print("sharding" in lean[0], lean == [spec(family) for family in ("llama3", "qwen3")])
print(torchtitan.trainer.__file__ is not None)
"""


def test_a_trainer_rank_imports_no_trainer_and_no_compiler() -> None:
    done = subprocess.run([sys.executable, "-c", RANK], capture_output=True, text=True)
    assert "leaked" not in done.stderr
    assert done.stdout.splitlines() == ["[]", "True True", "True"], done.stderr


def test_what_is_deferred_is_compiled_once_with_its_settings_at_its_first_call(monkeypatch: pytest.MonkeyPatch) -> None:
    compiled: list[tuple[str, dict[str, Any]]] = []

    def compile(function: Any, **settings: Any) -> Any:
        compiled.append((function.__name__, settings))
        return function

    monkeypatch.setattr(torch, "compile", compile)
    with compile_deferred():

        def double(x: int) -> int:
            return 2 * x

        plain, configured = torch.compile(double), torch.compile(double, options={"max_autotune": True})
        decorated = torch.compile(dynamic=True)(double)
    assert torch.compile is compile
    assert not compiled
    assert (plain(2), plain(3), configured(4), decorated(5)) == (4, 6, 8, 10)
    assert compiled == [
        ("double", {}),
        ("double", {"options": {"max_autotune": True}}),
        ("double", {"dynamic": True}),
    ]


def test_a_failed_import_leaves_garbage_collection_and_compile_as_they_were() -> None:
    before = torch.compile
    with suppress(ImportError), without_gc(), compile_deferred():
        assert not gc.isenabled()
        assert torch.compile is not before
        import no_such_module  # noqa: F401 # pyright: ignore[reportMissingImports]
    gc.unfreeze()
    assert gc.isenabled()
    assert torch.compile is before


ROOT = Path(__file__).parents[3]
WITHOUT_MONARCH_AND_TRITON = """
import sys
from importlib import import_module
sys.modules["monarch"] = sys.modules["triton"] = None  # as if they were not installed
import titan_rl.actors.titan.heads
from torchtitan.models import qwen3
kernels = sys.modules.get("torchtitan.distributed.minimal_async_ep.kernels")
print(kernels is None)
try:
    kernels and kernels.copy_rows_to_peers_kernel(1, rows=2)
except ModuleNotFoundError as error:
    print(error)
del sys.modules["triton"]  # a kernel's own module needs it
for name in sys.argv[1:]:
    import_module(name)
print([name for name in sys.modules if name.startswith("monarch.")])
"""


@pytest.mark.parametrize("merged", [False, True])
def test_a_ranks_own_work_is_imported_without_monarch_and_torchtitan_without_triton(
    merged: bool, tmp_path: Path
) -> None:
    folders = ("kernels", "actors/sync", "actors/titan")
    paths = [
        path.relative_to(ROOT).with_suffix("") for folder in folders for path in sorted((ROOT / folder).glob("*.py"))
    ]
    names = [f"titan_rl.{'.'.join(path.parts)}" for path in paths if path.name != "__init__"]
    assert {"titan_rl.actors.sync.landing", "titan_rl.actors.titan.role_model"} <= set(names)
    command = [sys.executable, "-c", WITHOUT_MONARCH_AND_TRITON, *names]
    env = overlay("import-without-triton", tmp_path) if merged else {}
    done = subprocess.run(command, env={**os.environ, **env}, capture_output=True, text=True)
    replaced = (
        "torchtitan.distributed.minimal_async_ep.kernels.copy_rows_to_peers_kernel needs triton, "
        "which is not installed: pip install triton"
    )
    assert done.stdout.splitlines() == (["True", "[]"] if merged else ["False", replaced, "[]"]), done.stderr


def test_messages_with_some_words_are_dropped_while_something_loads(caplog: pytest.LogCaptureFixture) -> None:
    logger = logging.getLogger("library.part")
    with unlogged("library.part", "needs torchvision, which"):
        logger.warning("it needs %s, which is missing", "torchvision")
        logger.warning("it needs torchaudio, which is missing")
    logger.warning("it needs torchvision, which is missing")
    kept = [record.getMessage().split()[2] for record in caplog.records]
    assert kept == ["torchaudio,", "torchvision,"]
