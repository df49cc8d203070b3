"""Tests and the solution that they judge, in two processes.

    process 1: the tests ── call f(3) ──> the solution's process
                         <── 6 ──────────
                         ── passed, failures ──> the host, on a descriptor that the solution does not have

A solution can print, exit, patch modules or search its memory: it finds neither the tests nor the verdict.
"""

import ast
import builtins
import importlib
import json
import os
import signal
import socket
import sys
import types
from collections.abc import Iterator
from contextlib import suppress
from functools import partial
from typing import Any, NoReturn

from titan_rl.ext.sandbox.inside import Pipes, content, execute, fresh_main, print_error, take_descriptors
from titan_rl.ext.sandbox.remote import Peer, Remote

MAX_FAILURES = 5
MAX_FAILURE_CHARACTERS = 300
LIBRARIES = {**{name: name for name in sys.stdlib_module_names}, "np": "numpy", "numpy": "numpy"}


def examine(pipes: Pipes, packages: str) -> dict[str, Any]:
    """Run the tests, as process 1, and return how many passed. The solution runs in a child."""
    ours, theirs = socket.socketpair()
    solution = os.fork()
    if solution == 0:
        os.close(pipes.tests)
        code = content(pipes.code)
        ours.close()
        take_descriptors(pipes, keep=theirs.fileno())
        _serve(code, socket.socket(fileno=3), packages)
    theirs.close()
    asked = json.loads(content(pipes.tests))  # read after the fork: the solution's memory has no test
    for descriptor, standard in ((pipes.stdin, 0), (pipes.stdout, 1), (pipes.stderr, 2)):
        os.dup2(descriptor, standard)
    passed, failures = _judge(Peer(ours), asked["setup"], asked["tests"], packages)
    os.kill(solution, signal.SIGKILL)
    return {"exit_code": 0, "tests": {"passed": passed, "failures": failures[:MAX_FAILURES]}}


def _judge(peer: Peer, setup: str, tests: list[str], packages: str) -> tuple[int, list[str]]:
    passed, failures = 0, list[str]()
    module = fresh_main(packages)
    if any("assertSetEqual" in text for text in (setup, *tests)):
        _compare_sets_here()
    try:
        module.__dict__.update(_bound(peer, [setup, *tests]))
        sys.modules["solution"] = _Solution(peer)
        execute(setup, module, "<setup>")
    except BaseException as error:
        return 0, [_shown("setup", error)]
    for number, test in enumerate(tests):
        try:
            execute(test, module, f"<test {number}>")
            passed += 1
        except SystemExit as error:  # unittest.main ends so, with False or 0 if all tests passed
            if error.code:
                failures.append(_shown(f"test {number}", error))
            else:
                passed += 1
        except BaseException as error:
            failures.append(_shown(f"test {number}", error))
    return passed, failures


def _compare_sets_here() -> None:
    """Have unittest compare sets of items: it calls `difference` of the solution's object."""
    import unittest

    equal = unittest.TestCase.assertSetEqual

    def compared(self: unittest.TestCase, first: Any, second: Any, msg: Any = None) -> None:
        first, second = (set(each) if issubclass(type(each), Remote) else each for each in (first, second))
        equal(self, first, second, msg)

    unittest.TestCase.assertSetEqual = compared  # type: ignore[method-assign]


class _Solution(types.ModuleType):
    """The module `solution`, for tests that import it."""

    def __init__(self, peer: Peer) -> None:
        super().__init__("solution")
        self._peer = peer

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return self._peer.ask("global", name)


def _bound(peer: Peer, texts: list[str]) -> Iterator[tuple[str, Any]]:
    """Yield the names that the tests use. A module or built-in that the tests use is never the
    solution's, which could define the `math` or the `all` that judges it, unless the tests use nothing else."""
    nodes = [*_nodes(texts)]
    used = {node.id for node in nodes if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load)}
    attributes = [node for node in nodes if isinstance(node, ast.Attribute)]
    libraries = {node.value.id for node in attributes if isinstance(node.value, ast.Name)} & LIBRARIES.keys()
    names = peer.ask("names")
    for name in sorted(used):
        if name in libraries:
            with suppress(ImportError):
                yield name, importlib.import_module(LIBRARIES[name])
        elif name in names and (used == {name} or not hasattr(builtins, name)):
            yield name, peer.ask("global", name)


def _nodes(texts: list[str]) -> Iterator[ast.AST]:
    for text in texts:
        with suppress(SyntaxError):  # the test fails when it is executed
            yield from ast.walk(ast.parse(text))


def _serve(code: str, connection: socket.socket, packages: str) -> NoReturn:
    """Be the solution's process: import its code, without what `if __name__ == "__main__"` guards, and answer the
    tests."""
    module = fresh_main(packages, "solution")

    def names() -> list[str]:
        return [name for name, value in module.__dict__.items() if not isinstance(value, types.ModuleType)]

    try:
        peer = Peer(connection, {"names": names, "global": partial(getattr, module)})
        execute(code, module)
        peer.serve()
    except BaseException as error:
        print_error(error)
    os._exit(1)


def _shown(what: str, error: BaseException) -> str:
    text = f"{what}: {type(error).__name__}"
    with suppress(BaseException):  # the text of the solution's error, which it may refuse
        text += f": {error}" if str(error) else ""
    return text[:MAX_FAILURE_CHARACTERS]
