"""Shares settings of the tests' process with the solution's, whose warnings and log records it passes to the tests.

tests:    os.environ["HOME"] = "/x"; random.seed(7)   ── sent before the next call ──>   solution
solution: warnings.warn("old"); logger.error("bad")   ── sent at once ──>   tests: assertWarns, assertLogs
"""

import json
import os
import random
import sys
import threading
import warnings
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any

Ask = Callable[..., Any]
"""Asks the other process to perform an operation."""


class Surroundings:
    """The settings of this process that tests change, as the solution's process knows them."""

    def __init__(self) -> None:
        self._sent = _settings()

    def changes(self) -> str:
        """Return the changes since the last call as JSON, or ""."""
        found = _settings()
        changed = {key: value for key, value in found.items() if value != self._sent[key]}
        if "environ" in changed:
            before, now = self._sent["environ"], found["environ"]
            differ = [key for key in {**before, **now} if now.get(key) != before.get(key)]
            changed["environ"] = {os.fsdecode(key): os.fsdecode(now[key]) if key in now else None for key in differ}
        self._sent = found
        return json.dumps(changed) if changed else ""


def _settings() -> dict[str, Any]:
    return {
        "recursion": sys.getrecursionlimit(),
        "environ": vars(os.environ)["_data"].copy(),  # to decode it takes as long as a call
        "folder": _folder(),
        "decimal": _decimal(),
        "levels": _levels(),
    }


def _folder() -> str:
    with suppress(OSError):  # it was removed
        return os.getcwd()
    return ""


def _decimal() -> list[Any]:
    if "decimal" not in sys.modules:
        return []
    context = sys.modules["decimal"].getcontext()
    return [context.prec, context.rounding]


def _levels() -> dict[str, int] | None:
    """Return the levels of loggers by name; None if nothing here logs."""
    logging = sys.modules.get("logging")
    if logging is None or not hasattr(logging, "root"):
        return None
    named = {name: each.level for name, each in [*logging.root.manager.loggerDict.items()] if hasattr(each, "level")}
    return {"": logging.root.level, **{name: level for name, level in named.items() if level}}


class Surrounded:
    """The solution's end."""

    def __init__(self, ask: Ask) -> None:
        self._ask, self._levels = ask, dict[str, int]()
        self._thread = threading.get_ident()
        self._logs = False

    def begin(self) -> None:
        """Let the tests have all warnings: their process filters them."""
        warnings.simplefilter("always")
        show = warnings.showwarning

        def shared(message: Warning | str, category: type[Warning], *rest: Any, **keywords: Any) -> None:
            show(message, category, *rest, **keywords)
            self._pass_on("warn", str(message), category)

        warnings.showwarning = shared

    def take(self, text: str) -> None:
        """Take over changes of the tests' process."""
        changed: Mapping[str, Any] = json.loads(text)
        if limit := changed.get("recursion"):
            sys.setrecursionlimit(limit)
        for key, value in changed.get("environ", {}).items():
            if value is None:
                os.environ.pop(key, None)
            else:
                os.environ[key] = value
        if changed.get("folder"):
            with suppress(OSError):
                os.chdir(changed["folder"])
        if changed.get("decimal"):
            import decimal

            decimal.getcontext().prec, decimal.getcontext().rounding = changed["decimal"]
        if changed.get("levels") is not None:
            self._take_levels(changed["levels"])

    def _take_levels(self, levels: dict[str, int]) -> None:
        import logging

        if not self._logs:
            handle = logging.Logger.callHandlers

            def shared(logger: logging.Logger, record: logging.LogRecord) -> None:
                handle(logger, record)
                self._pass_on("log", record.name, record.levelno, record.getMessage())

            logging.Logger.callHandlers = shared  # pyright: ignore[reportAttributeAccessIssue]
            self._logs = True
        for name in {**self._levels, **levels}:
            if (level := levels.get(name, 0)) != self._levels.get(name, logging.WARNING if not name else 0):
                logging.getLogger(name).setLevel(level)
        self._levels = levels

    def _pass_on(self, operation: str, *values: Any) -> None:
        if threading.get_ident() == self._thread:  # another thread has nothing to do with what the tests wait for
            self._ask(operation, *values)


def warn(text: Any, category: Any) -> None:
    """Warn in the tests' process, as the solution did."""
    if type(text) is str and isinstance(category, type) and issubclass(category, Warning):
        warnings.warn(text, category, stacklevel=1)


def log(name: Any, level: Any, text: Any) -> None:
    """Log in the tests' process, as the solution did."""
    import logging

    if type(name) is type(text) is str and type(level) is int:
        logger = logging.getLogger(None if name == "root" else name)
        if logger.isEnabledFor(level):
            logger.handle(logger.makeRecord(logger.name, level, "solution", 0, text, (), None))


SHARED: Mapping[str, Callable[..., None]] = {"warn": warn, "log": log}
"""Operations by which the solution's process may act in the tests' process."""


def share_seeds(ask: Ask) -> None:
    """Let random.seed of the tests seed the solution's generator too."""
    seed = random.seed

    def seeded(a: Any = None, version: int = 2) -> None:
        seed(a, version)
        if a is None or type(a) in (int, float, str):
            ask("seed", a)

    random.seed = seeded
