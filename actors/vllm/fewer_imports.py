"""Imports of vLLM on a CPU without what an engine of token ids never runs: 3 CPU seconds instead of 4.

    with fewer_imports():
        import vllm ...

vLLM 0.32 imports all of its servers, parsers and compilers with its engine. While the body runs,
- a package that vLLM can do without is as if it were not installed (MISSING, UNPATCHED);
- a module that only servers call is a placeholder (PLACEHOLDERS), which raises when something of it is called;
- transformers finds the names that its models export by a search instead of line by line (FasterSearch);
- torch notes where an operator was defined without reading that file (place_of).

Afterwards everything can be imported as ever. Importing this module imports the standard library only, and nothing of
titan_rl: a zygote runs it, too.
"""

import importlib.abc
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import wraps
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType
from typing import Any, NoReturn

UNPATCHED = "torch._inductor"
"""vLLM corrects it as soon as vLLM is imported (vllm/env_override.py), and goes on without it if it cannot be imported.
An engine that was launched with TORCHDYNAMO_DISABLE=1 compiles nothing."""
MISSING = ("opentelemetry",)  # traces of requests: vllm/tracing/otel.py
PLACEHOLDERS = (
    "vllm.connections",  # HTTP clients; imports aiohttp
    "vllm.entrypoints.mcp.tool_server",  # tools of chats; imports openai
    "vllm.parser.engine.adapters",  # reasoning and tool calls in texts; imports openai, fastapi, xgrammar's grammars
    "vllm.multimodal.media.connector",  # downloads of images and sounds; imports aiohttp
    "vllm.renderers.chat_utils",  # chat templates; imports openai
)
SEARCHED = "transformers.utils.import_utils"


class Absent(type):
    """The type of whatever a placeholder is asked for: good for annotations and isinstance, and for nothing else."""

    def __call__(cls, *args: Any, **kwargs: Any) -> NoReturn:
        raise not_imported(cls)

    def __getattr__(cls, name: str) -> NoReturn:
        if name.startswith("__"):
            raise AttributeError(name)
        raise not_imported(cls)


def not_imported(absent: Absent) -> RuntimeError:
    return RuntimeError(f"{absent.__module__} was not imported (actors/vllm/fewer_imports.py): expected no use of it")


class Placeholder(ModuleType):
    def __getattr__(self, name: str) -> Absent:
        if name.startswith("__"):
            raise AttributeError(name)
        made = Absent(name, (), {"__module__": self.__name__})
        setattr(self, name, made)
        return made


class FasterSearch(importlib.abc.MetaPathFinder):
    """Gives transformers.utils.import_utils a faster `fetch__all__`, which transformers calls for 3,000 files."""

    def find_spec(self, fullname: str, path: Any, target: Any = None) -> ModuleSpec | None:
        if fullname != SEARCHED:
            return None
        spec = PathFinder.find_spec(fullname, path, target)
        if spec is None or spec.loader is None:
            return None
        execute: Any = spec.loader.exec_module

        def execute_and_replace(module: Any) -> None:
            execute(module)
            module.fetch__all__ = exported_names(module.fetch__all__)

        spec.loader.exec_module = execute_and_replace
        return spec


def exported_names(of_lines: Any) -> Any:
    """Return `of_lines`, transformers' reader of the last __all__ in a text, made to look at no line before it."""

    @wraps(of_lines)
    def fetch(text: str) -> list[str]:
        return of_lines(text[text.rfind("\n__all__") + 1 :])

    return fetch


def place_of(stacklevel: int) -> str:
    """Return what torch._library.utils.get_source does, "FILE:LINE" of a caller. That one asks `inspect`, which looks
    at every module that is imported and reads the file."""
    frame = sys._getframe(stacklevel)
    return f"{frame.f_code.co_filename}:{frame.f_lineno}"


@contextmanager
def fewer_imports() -> Iterator[None]:
    """Import vLLM in the body. Where an engine may compile, or vLLM is imported already, this changes nothing."""
    if os.environ.get("TORCHDYNAMO_DISABLE") != "1" or "vllm" in sys.modules:
        yield
        return
    _import_unpatched()
    hidden: dict[str, Any] = dict.fromkeys(MISSING) | {name: Placeholder(name) for name in PLACEHOLDERS}
    hidden = {name: module for name, module in hidden.items() if name not in sys.modules}
    search = FasterSearch()
    from torch._library import utils as torchs

    real, torchs.get_source = torchs.get_source, place_of
    sys.modules.update(hidden)
    sys.meta_path.insert(0, search)
    try:
        yield
    finally:
        torchs.get_source = real
        sys.meta_path.remove(search)
        for name in hidden:
            del sys.modules[name]


def _import_unpatched() -> None:
    """Import the package vllm itself."""
    hides = UNPATCHED not in sys.modules
    if hides:
        sys.modules[UNPATCHED] = None  # pyright: ignore[reportArgumentType]
    try:
        import vllm  # noqa: F401
    finally:
        if hides:
            del sys.modules[UNPATCHED]
