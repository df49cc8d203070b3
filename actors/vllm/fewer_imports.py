"""Imports of vLLM on a CPU without what an engine of token ids never runs: 2 CPU seconds instead of 4.

    with fewer_imports():
        import vllm ...

vLLM 0.32 imports all of its servers, parsers and compilers with its engine. While the body runs,
- a package that vLLM can do without is as if it were not installed (MISSING, UNPATCHED);
- a module that such an engine never calls is a placeholder (PLACEHOLDERS), which raises when something of it is called;
- torch.compile and its like return what they are given (COMPILERS): such an engine runs it uncompiled anyway;
- transformers finds the names that its models export by one search, instead of line by line and twice (FasterSearch),
  and the installed packages without an object for each of their files (distributions_by_package);
- torch notes where an operator was defined without reading that file (place_of).

Afterwards everything can be imported as ever. Importing this module imports the standard library only, and nothing of
titan_rl: a zygote runs it, too.
"""

import importlib.abc
import importlib.metadata
import os
import re
import sys
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import wraps
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType
from typing import Any, NoReturn
from unittest.mock import patch

UNPATCHED = "torch._inductor"
"""vLLM corrects it as soon as vLLM is imported (vllm/env_override.py), and goes on without it if it cannot be imported.
An engine that was launched with TORCHDYNAMO_DISABLE=1 compiles nothing."""
MISSING = ("opentelemetry",)  # traces of requests: vllm/tracing/otel.py
PLACEHOLDERS = (
    # torch's compiler, which imports sympy and all of DTensor and FSDP
    "torch._dynamo._trace_wrapped_higher_order_op",
    "torch._dynamo.symbolic_convert",
    "torch._inductor.custom_graph_pass",
    # models of transformers, instead of their configs
    "transformers.conversion_mapping",
    "transformers.distributed.fsdp",
    "transformers.distributed.tensor_parallel",
    "transformers.models.auto.image_processing_auto",
    # servers and texts
    "vllm.connections",  # HTTP clients; imports aiohttp
    "vllm.entrypoints.mcp.tool_server",  # tools of chats; imports openai
    "vllm.multimodal.media.connector",  # downloads of images and sounds; imports aiohttp
    "vllm.parser.engine.adapters",  # reasoning and tool calls in texts; imports openai, fastapi, xgrammar's grammars
    "vllm.renderers.chat_utils",  # chat templates; imports openai
    "vllm.tokenizers.hf",
    "vllm.transformers_utils.processor",  # of images and sounds
    "vllm.v1.structured_output.backend_xgrammar",
    # GPUs, several engines, one model of another family
    "vllm.compilation.cudagraph_pool",
    "vllm.distributed.device_communicators.pynccl_allocator",
    "vllm.distributed.kv_transfer.kv_connector.v1.decode_bench_connector",
    "vllm.kernels.triton.activation",
    "vllm.model_executor.warmup.kernel_warmup",
    "vllm.models.deepseek_v4.common.eplb_util",
    "vllm.v1.worker.gpu.warmup",
    # formats of weights, and drafts of tokens
    "vllm.model_executor.layers.quantization.compressed_tensors.utils",
    "vllm.v1.spec_decode.dflash",
    "vllm.v1.spec_decode.draft_model",
)
COMPILERS = {
    "torch": ("compile",),
    "torch.compiler": ("allow_in_graph", "assume_constant_result", "disable"),
}
"""Functions of torch that mark others for its compiler, by module. Each of them imports the compiler."""
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


class Withdrawal(importlib.abc.MetaPathFinder):
    """Withdraws the placeholders inside torch's compiler if something imports the compiler after all."""

    def find_spec(self, fullname: str, path: Any, target: Any = None) -> ModuleSpec | None:
        if fullname in ("torch._dynamo", "torch._inductor"):
            for name in PLACEHOLDERS:
                if name.startswith("torch.") and isinstance(sys.modules.get(name), Placeholder):
                    del sys.modules[name]
        return None


class FasterSearch(importlib.abc.MetaPathFinder):
    """Gives transformers.utils.import_utils a faster `fetch__all__`, which transformers calls for 3,000 files, and a
    `create_import_structure_from_path` that reads each folder once."""

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
            module.create_import_structure_from_path = once_per_folder(module.create_import_structure_from_path)

        spec.loader.exec_module = execute_and_replace
        return spec


def exported_names(of_lines: Any) -> Any:
    """Return `of_lines`, transformers' reader of the last __all__ in a text, made to look at no line before it."""

    @wraps(of_lines)
    def fetch(text: str) -> list[str]:
        return of_lines(text[text.rfind("\n__all__") + 1 :])

    return fetch


def once_per_folder(structure_of: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Return `structure_of`, which takes the path of a folder or of a file in it, made to remember what it returned.
    Nobody writes to that."""
    found: dict[str, Any] = {}

    @wraps(structure_of)
    def remembered(path: Any) -> Any:
        folder = os.path.dirname(path) if os.path.isfile(path) else os.fspath(path)
        if folder not in found:
            found[folder] = structure_of(folder)
        return found[folder]

    return remembered


def distributions_by_package() -> dict[str, list[str]]:
    """Return what importlib.metadata.packages_distributions() does, 8 times as fast: that one makes an object of each
    installed file."""
    found = defaultdict[str, list[str]](list)
    for distribution in importlib.metadata.distributions():
        facts = distribution.read_text("METADATA") or distribution.read_text("PKG-INFO") or ""
        packages = set((distribution.read_text("top_level.txt") or "").split())
        if not packages:
            paths = [line.split(",", 1)[0] for line in (distribution.read_text("RECORD") or "").splitlines()]
            packages = {path.removesuffix(".py").partition("/")[0] for path in paths if path.endswith(".py")}
        if name := re.search(r"^Name: *(.+?) *$", facts, re.MULTILINE):
            for package in packages:
                found[package].append(name[1])
    return dict(found)


def uncompiled(function: Any = None, **_: Any) -> Any:
    """Return a function as it is, or a decorator that does."""
    return uncompiled if function is None else function


def place_of(stacklevel: int) -> str:
    """Return what torch._library.utils.get_source does, "FILE:LINE" of a caller. That one asks `inspect`, which looks
    at every module that is imported and reads the file."""
    frame = sys._getframe(stacklevel)
    return f"{frame.f_code.co_filename}:{frame.f_lineno}"


@contextmanager
def fewer_imports() -> Iterator[None]:
    """Import vLLM in the body. Where an engine may compile, this changes nothing; where vLLM is imported already, what
    else is imported is not compiled."""
    if os.environ.get("TORCHDYNAMO_DISABLE") != "1":
        yield
        return
    with ExitStack() as stack:
        if "vllm" not in sys.modules:
            _import_unpatched()
            _hide(stack)
        for module, names in COMPILERS.items():
            for name in names:
                stack.enter_context(patch(f"{module}.{name}", uncompiled))
        yield


def _hide(stack: ExitStack) -> None:
    """Hide what is not to be imported, and replace what is slow, until the stack ends."""
    hidden: dict[str, Any] = dict.fromkeys(MISSING) | {name: Placeholder(name) for name in PLACEHOLDERS}
    hidden = {name: module for name, module in hidden.items() if name not in sys.modules}
    sys.modules.update(hidden)
    for name in hidden:
        stack.callback(sys.modules.pop, name, None)
    for finder in (FasterSearch(), Withdrawal()):
        sys.meta_path.insert(0, finder)
        stack.callback(sys.meta_path.remove, finder)
    stack.enter_context(patch("importlib.metadata.packages_distributions", distributions_by_package))
    stack.enter_context(patch("torch._library.utils.get_source", place_of))


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
