"""What a generator's imports leave out on a CPU, and that leaving it out changes nothing."""

import os
import subprocess
import sys

import pytest

from titan_rl.actors.vllm import vllm_cpu
from titan_rl.actors.vllm.fewer_imports import Placeholder, fewer_imports
from titan_rl.actors.vllm.launch_env import ENV

RANK = """
import importlib, sys, types
from titan_rl.actors.vllm import fewer_imports as fewer
from torch._library import utils
real = utils.get_source
with fewer.fewer_imports():
    import vllm.v1.engine.llm_engine, vllm.v1.worker.cpu_worker, vllm.renderers.hf
heavy = {"aiohttp", "fastapi", "openai", "grpc", "torch._inductor.lowering"}
print(sorted(heavy & sys.modules.keys()))
import opentelemetry, torch._inductor
later = [importlib.import_module(name) for name in fewer.PLACEHOLDERS]
print({type(module) for module in later} == {types.ModuleType}, utils.get_source is real)
print(any(isinstance(finder, fewer.FasterSearch) for finder in sys.meta_path))
print([fewer.place_of(1), fewer.place_of(1)] == [real(1), real(1)])
import pathlib, transformers
from transformers.utils.import_utils import fetch__all__ as found
texts = [path.read_text() for path in sorted(pathlib.Path(transformers.__file__).parent.glob("models/*/*.py"))[::10]]
texts += ["", "x = 1", "x = '__all__'\\n", "__all__ = ['A']", "__all__ = ['A']\\n__all__ = [\\n  'B',\\n]\\n"]
print(len(texts) > 200, found(texts[-1]), all(found(text) == found.__wrapped__(text) for text in texts))
"""


def test_a_generator_imports_less_and_as_exactly_and_can_import_the_rest_later() -> None:
    env = {**os.environ, **ENV, **vllm_cpu.ENV}
    done = subprocess.run([sys.executable, "-c", RANK], capture_output=True, text=True, check=False, env=env)
    assert done.stdout.splitlines() == ["[]", "True True", "False", "True", "True ['B'] True"], done.stderr


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
