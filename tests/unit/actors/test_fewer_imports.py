"""What a generator's imports leave out on a CPU, and that leaving it out changes nothing."""

import os
import subprocess
import sys

import pytest

from titan_rl.actors.vllm import vllm_cpu
from titan_rl.actors.vllm.fewer_imports import Placeholder, fewer_imports, uncompiled
from titan_rl.actors.vllm.launch_env import ENV

RANK = """
import importlib, importlib.metadata, sys, types
import torch
from torch._library import utils
from titan_rl.actors.vllm import fewer_imports as fewer
from titan_rl.meshes.zygote import PRELOAD
replaced = [(utils, "get_source"), (importlib.metadata, "packages_distributions")]
replaced += [(importlib.import_module(module), name) for module, names in fewer.COMPILERS.items() for name in names]
real = [getattr(*each) for each in replaced]
with fewer.fewer_imports():
    for name in PRELOAD["generator"].split():
        importlib.import_module(name)
    imported = set(sys.modules)
    import torch._inductor.utils  # as a model of another family might
heavy = {"aiohttp", "fastapi", "openai", "grpc", "xgrammar", "compressed_tensors"}
heavy |= {"sympy", "torch._dynamo", "torch._inductor", "torch.distributed.tensor", "torch.distributed.fsdp"}
print(sorted(heavy & imported))
print([getattr(*each) for each in replaced] == real)
import opentelemetry
later = [importlib.import_module(name) for name in fewer.PLACEHOLDERS]
print({type(module) for module in later} == {types.ModuleType})
print(any(isinstance(finder, fewer.FasterSearch) for finder in sys.meta_path))
print([fewer.place_of(1), fewer.place_of(1)] == [real[0](1), real[0](1)])
own, expected = fewer.distributions_by_package(), real[1]()
for names in [*own.values(), *expected.values()]:
    names.sort()
print(len(own) > 50, own == expected)
import pathlib, transformers
from transformers.utils.import_utils import create_import_structure_from_path as structure_of, fetch__all__ as found
models = pathlib.Path(transformers.__file__).parent / "models"
texts = [path.read_text() for path in sorted(models.glob("*/*.py"))[::10]]
texts += ["", "x = 1", "x = '__all__'\\n", "__all__ = ['A']", "__all__ = ['A']\\n__all__ = [\\n  'B',\\n]\\n"]
print(len(texts) > 200, found(texts[-1]), all(found(text) == found.__wrapped__(text) for text in texts))
structures = [structure_of(models), structure_of(str(models / "__init__.py"))]
print(len(structures[0]) > 200, structures == [structure_of.__wrapped__(str(models))] * 2)
"""


def test_a_generator_imports_less_and_as_exactly_and_can_import_the_rest_later() -> None:
    env = {**os.environ, **ENV, **vllm_cpu.ENV}
    done = subprocess.run([sys.executable, "-c", RANK], capture_output=True, text=True, check=False, env=env)
    expected = ["[]", "True", "True", "False", "True", "True True", "True ['B'] True", "True True"]
    assert done.stdout.splitlines() == expected, done.stderr


def test_what_would_be_compiled_is_what_was_given() -> None:
    @uncompiled
    def plain() -> int:
        return 1

    @uncompiled(dynamic=True, backend="eager")
    def with_settings() -> int:
        return 2

    assert (plain(), with_settings(), uncompiled(len)) == (1, 2, len)


def test_an_engine_that_may_compile_imports_everything(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TORCHDYNAMO_DISABLE", raising=False)
    before = sys.modules.copy(), sys.meta_path[:]
    with fewer_imports():
        assert (sys.modules, sys.meta_path) == before


def test_a_placeholder_is_good_for_annotations_and_raises_when_it_is_used() -> None:
    placeholder = Placeholder("some.server")
    parser = placeholder.Parser
    assert parser is placeholder.Parser
    assert not isinstance("text", parser)
    assert parser | None
    for use in (parser, lambda: parser.parse("text")):
        with pytest.raises(RuntimeError, match=r"some\.server was not imported .*expected no use of it"):
            use()
    with pytest.raises(AttributeError):
        _ = placeholder.__path__
