"""Imports of torch, TorchTitan and vLLM that cost fewer seconds: a rank's start is mostly imports.

Importing this module imports none of them.
"""

import atexit
import gc
import json
import logging
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial, wraps
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any


@contextmanager
def without_gc() -> Iterator[None]:
    """Disable garbage collection during imports. They allocate a million objects that stay alive, and scanning those
    again and again takes a quarter of the time. Freezing them afterwards saves another second of collections."""
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        atexit.register(gc.unfreeze)  # else Triton reports everything that is never freed, at the process's end
        gc.enable()


@contextmanager
def compile_deferred() -> Iterator[None]:
    """Make functions that are passed to torch.compile during imports compile at their first call.

    TorchTitan compiles FlexAttention at import, which imports inductor and AOT autograd (0.5 CPU seconds), although a
    model with another attention never calls it. Not for a run that compiles its model: a compiled model cannot
    trace a function that is compiled inside it."""
    import torch

    real = torch.compile

    def deferred(function: Callable[..., Any] | None = None, **settings: Any) -> Any:
        if function is None:  # used as a decorator with arguments
            return partial(deferred, **settings)
        compiled: list[Callable[..., Any]] = []

        @wraps(function)
        def first(*args: Any, **kwargs: Any) -> Any:
            if not compiled:
                compiled.append(real(function, **settings))
            return compiled[0](*args, **kwargs)

        return first

    torch.compile = deferred
    try:
        yield
    finally:
        torch.compile = real


def import_vllm_model(folder: str) -> None:
    """Import the model's class here and register it. vLLM would import it in another process first, if its cache on
    this machine does not know the class: 7 CPU seconds. vLLM does so to be able to fork after that, which we never do.
    """
    from vllm import ModelRegistry

    (name,) = json.loads((Path(folder) / "config.json").read_text())["architectures"]
    # A model that reads images names a class that needs torchvision; pixels come from the one that needs Pillow.
    with without_torchvision(), unlogged("transformers.utils.import_utils", "requires torchvision"):
        ModelRegistry.register_model(name, ModelRegistry.models[name].load_model_cls())


@contextmanager
def unlogged(name: str, words: str) -> Iterator[None]:
    """Drop the messages of a logger that have these words."""

    def kept(record: logging.LogRecord) -> bool:
        return words not in record.getMessage()

    logger = logging.getLogger(name)
    logger.addFilter(kept)
    try:
        yield
    finally:
        logger.removeFilter(kept)


class Absent(ModuleType):
    """Stands for a package that is not installed. Its names can be imported; using one raises a TypeError."""

    def __getattr__(self, name: str) -> "Absent":
        if name.startswith("__"):
            raise AttributeError(name)
        return Absent(f"{self.__name__}.{name}")


@contextmanager
def without_torchvision() -> Iterator[None]:
    """Let modules be imported that name torchvision, where it is not installed: models with vision name it,
    and only their text part is used."""
    if find_spec("torchvision") is not None:
        yield
        return
    from transformers.utils.import_utils import is_torchvision_available

    is_torchvision_available()  # remembers that it is missing
    names = ("torchvision", "torchvision.transforms", "torchvision.transforms.v2", "torchvision.io")
    sys.modules.update({name: Absent(name) for name in names})
    try:
        yield
    finally:
        for name in names:
            del sys.modules[name]


def use_given_threads() -> None:
    """Compute on OMP_NUM_THREADS threads: in a forked rank OpenMP has read the variable of the fork server."""
    import torch

    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
