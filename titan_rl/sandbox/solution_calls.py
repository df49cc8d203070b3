"""Tests and the solution that they judge, in two processes: only plain data passes between them.

    process 1: the tests ── call f(3) ──> the solution's process
                         <── 6 ──────────
                         ── passed, failures ──> the host, on a descriptor that the solution has not

A solution can print, exit, patch modules or build objects that equal everything: the test's `assert f(3) == 6` compares
plain data in a process that the solution has never been in. What is no plain data stays there, as a Remote; it equals
no plain data.
"""

import builtins
import importlib
import json
import os
import signal
import socket
import struct
import sys
import types
from collections.abc import Callable, Iterator, Mapping
from decimal import Decimal
from fractions import Fraction
from itertools import islice
from typing import Any, NoReturn

from titan_rl.sandbox.inside import Pipes, content, execute, fresh_main, print_error, take_descriptors

MOST_BYTES = 16 << 20  # of one message
MOST_ITEMS = 100_000  # of an iterator
SHOWN = 5  # failures
SHOWN_CHARACTERS = 300


class RemoteError(Exception):
    """The solution raised an error that is no built-in one, or is gone."""


class Remote:
    """An object of the other process: what is done to it is done there."""

    def __init__(self, peer: "Peer", number: int) -> None:
        self.__dict__.update(_peer=peer, _number=number)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return self._peer.ask("get", self._number, name)

    def __setattr__(self, name: str, value: Any) -> None:
        self._peer.ask("set", self._number, name, value)

    def __call__(self, *arguments: Any, **keywords: Any) -> Any:
        return self._peer.ask("call", self._number, list(arguments), keywords)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Remote) and self._peer.ask("eq", self._number, other) is True

    def __lt__(self, other: object) -> bool:
        return self._peer.ask("lt", self._number, other) is True if isinstance(other, Remote) else NotImplemented

    def __hash__(self) -> int:
        return hash(self._number)

    def __bool__(self) -> bool:
        return self._peer.ask("bool", self._number) is True

    def __len__(self) -> int:
        return self._peer.ask("len", self._number)

    def __getitem__(self, key: Any) -> Any:
        return self._peer.ask("item", self._number, key)

    def __contains__(self, item: Any) -> bool:
        return self._peer.ask("contains", self._number, item) is True

    def __iter__(self) -> Iterator[Any]:
        return iter(self._peer.ask("list", self._number))

    def __next__(self) -> Any:
        found = self._peer.ask("next", self._number)
        if not found:
            raise StopIteration
        return found[0]

    def __str__(self) -> str:
        return self._peer.ask("str", self._number)

    __repr__ = __str__


OPERATIONS: Mapping[str, Callable[..., Any]] = {
    "get": getattr,
    "set": setattr,
    "call": lambda function, arguments, keywords: function(*arguments, **keywords),
    "eq": lambda one, other: bool(one == other),
    "lt": lambda one, other: bool(one < other),
    "bool": bool,
    "len": len,
    "item": lambda each, key: each[key],
    "contains": lambda each, item: item in each,
    "list": lambda each: list(islice(each, MOST_ITEMS)),
    "next": lambda each: list(islice(each, 1)),
    "str": str,
}


class Peer:
    """One end of the connection. Both ends ask and answer; the tests' end answers calls of what it has passed only."""

    def __init__(self, connection: socket.socket, operations: Mapping[str, Callable[..., Any]]) -> None:
        self._connection, self._operations = connection, operations
        self._objects: list[Any] = []
        self._remotes: dict[int, Remote] = {}

    def ask(self, operation: str, number: int, *arguments: Any) -> Any:
        self._send(["ask", operation, number, [self._encoded(each) for each in arguments]])
        while True:
            kind, *rest = self._receive()
            if kind == "ask":
                self._answer(*rest)
            elif kind == "raised":
                raise _error(*rest)
            else:
                try:
                    return self._decoded(rest[0])
                except BaseException as error:  # no data, or a module that exits when it is imported
                    raise RemoteError(f"the solution's answer: {error!r}") from None

    def serve(self) -> None:
        """Answer until the other end is closed."""
        while True:
            try:
                _, *rest = self._receive()
            except RemoteError:
                return
            self._answer(*rest)
            sys.stdout.flush()  # the process is killed when the tests have ended

    def offer(self, value: Any) -> None:
        """Make an object known before anything is asked: it gets the next number."""
        self._objects.append(value)

    def _answer(self, operation: str, number: int, arguments: list[Any]) -> None:
        try:
            target = self._objects[number]
            found = self._operations[operation](target, *(self._decoded(each) for each in arguments))
            answer = ["value", self._encoded(found)]
        except BaseException as error:
            answer = ["raised", type(error).__name__, str(error)[:SHOWN_CHARACTERS]]
        self._send(answer)

    def _encoded(self, value: Any) -> Any:
        """Return a value as JSON: exact scalars as they are, the rest as [tag, content]."""
        if value is None or type(value) in (bool, int, float, str):
            return value
        for kind, (tag, into) in PLAIN.items():
            if isinstance(value, kind):
                plain = into(value)
                return [tag, [self._encoded(each) for each in plain] if isinstance(plain, list) else plain]
        if isinstance(value, Remote):
            return ["yours", value.__dict__["_number"]]
        if isinstance(value, types.ModuleType) and value.__name__.isidentifier():
            return ["module", value.__name__]
        if type(value).__module__ == "numpy":
            return self._encoded(value.tolist())
        for number, known in enumerate(self._objects):
            if known is value:
                return ["mine", number]
        self._objects.append(value)
        return ["mine", len(self._objects) - 1]

    def _decoded(self, value: Any) -> Any:
        if not isinstance(value, list):
            return value
        tag, inner = value
        if tag == "yours":
            return self._objects[inner]
        if tag == "mine":
            return self._remotes.setdefault(inner, Remote(self, int(inner)))
        if tag == "module" and str(inner).isidentifier():
            return importlib.import_module(inner)  # this process's own
        return BUILT[tag]([self._decoded(each) for each in inner] if isinstance(inner, list) else inner)

    def _send(self, message: list[Any]) -> None:
        text = json.dumps(message).encode()
        if len(text) > MOST_BYTES:
            raise ValueError(f"expected at most {MOST_BYTES >> 20} MiB, found {len(text) >> 20}")
        try:
            self._connection.sendall(struct.pack("I", len(text)) + text)
        except OSError as error:
            raise RemoteError("the solution's process has ended") from error

    def _receive(self) -> list[Any]:
        (size,) = struct.unpack("I", self._exactly(4))
        if size > MOST_BYTES:
            raise RemoteError("a message is too long")
        return json.loads(self._exactly(size))

    def _exactly(self, size: int) -> bytes:
        found = bytearray()
        while len(found) < size:
            more = self._connection.recv(size - len(found))
            if not more:
                raise RemoteError("the solution's process has ended")
            found += more
        return bytes(found)


PLAIN: Mapping[type, tuple[str, Callable[[Any], Any]]] = {
    bool: ("bool", int),
    int: ("int", lambda value: int.__add__(value, 0)),
    float: ("float", lambda value: float.__add__(value, 0.0)),
    str: ("str", lambda value: "".join(str.__iter__(value))),
    list: ("list", lambda value: list(list.__iter__(value))),
    tuple: ("tuple", lambda value: list(tuple.__iter__(value))),
    set: ("set", lambda value: list(set.__iter__(value))),
    frozenset: ("frozenset", lambda value: list(frozenset.__iter__(value))),
    dict: ("dict", lambda value: list(dict.items(value))),
    bytes: ("bytes", bytes.hex),
    complex: ("complex", lambda value: [value.real, value.imag]),
    range: ("range", lambda value: [value.start, value.stop, value.step]),
    Decimal: ("Decimal", str),
    Fraction: ("Fraction", str),
}
"""Types whose values pass as data, those of subclasses too, and their content."""
BUILT: Mapping[str, Callable[[Any], Any]] = {
    **{kind.__name__: kind for kind in (bool, int, float, str, list, tuple, set, frozenset, dict, Decimal, Fraction)},
    "bytes": bytes.fromhex,
    "complex": lambda parts: complex(*parts),
    "range": lambda parts: range(*parts),
}


def examine(pipes: Pipes, packages: str) -> dict[str, Any]:
    """Run the tests, as process 1, and return how many passed. The solution runs in a child."""
    ours, theirs = socket.socketpair()
    solution = os.fork()
    if solution == 0:
        os.close(pipes.tests)
        code = content(pipes.code)
        ours.close()
        take_descriptors(pipes, keep=theirs.fileno())
        _be_asked(code, socket.socket(fileno=3), packages)
    theirs.close()
    asked = json.loads(content(pipes.tests))  # read after the fork: the solution's memory has no test
    for descriptor, standard in ((pipes.stdin, 0), (pipes.stdout, 1), (pipes.stderr, 2)):
        os.dup2(descriptor, standard)
    passed, failures = _judge(Peer(ours, {"call": OPERATIONS["call"]}), asked, packages)
    os.kill(solution, signal.SIGKILL)
    return {"exit_code": 0, "tests": {"passed": passed, "failures": failures[:SHOWN]}}


def _judge(peer: Peer, asked: Mapping[str, Any], packages: str) -> tuple[int, list[str]]:
    passed, failures = 0, list[str]()
    module = fresh_main(packages)
    try:
        names = peer.ask("call", 0, [], {})
        module.__dict__.update(_bound(names, peer, asked))
        sys.modules["solution"] = module  # for tests that import it
        execute(asked["setup"], module, "<setup>")
    except BaseException as error:
        return 0, [_shown("setup", error)]
    for number, test in enumerate(asked["tests"]):
        try:
            execute(test, module, f"<test {number}>")
            passed += 1
        except SystemExit as error:  # of unittest.main, whose code is 0 or False if all passed
            if error.code:
                failures.append(_shown(f"test {number}", error))
            else:
                passed += 1
        except BaseException as error:
            failures.append(_shown(f"test {number}", error))
    return passed, failures


def _bound(names: list[str], peer: Peer, asked: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yield what the tests know of the solution: its names, without those that Python or its library already gives a
    meaning. Otherwise a solution could replace the `all` or the `math` that judges it."""
    text = "\n".join([asked["setup"], *asked["tests"]])
    for name in names:
        if not str(name).isidentifier() or name.startswith("__"):
            raise RemoteError(f"the solution's names: {name!r}")  # __builtins__ would be what judges
        if name in sys.stdlib_module_names and f"{name}." in text:
            yield name, importlib.import_module(name)
        elif not hasattr(builtins, name):
            yield name, peer.ask("get", 1, name)


def _be_asked(code: str, connection: socket.socket, packages: str) -> NoReturn:
    """Be the solution's process: run its code, and answer the tests."""
    module = fresh_main(packages)
    try:
        peer = Peer(connection, OPERATIONS)
        peer.offer(lambda: [name for name in module.__dict__ if not name.startswith("__")])
        peer.offer(module)
        execute(code, module)
        peer.serve()
    except BaseException as error:
        print_error(error)
    os._exit(1)


def _error(name: str, text: str) -> Exception:
    kind = getattr(builtins, str(name), None)
    if isinstance(kind, type) and issubclass(kind, Exception):
        try:
            return kind(text)
        except TypeError:  # UnicodeDecodeError wants more
            pass
    return RemoteError(f"{name}: {text}")


def _shown(what: str, error: BaseException) -> str:
    text = f"{what}: {type(error).__name__}{f': {error}' if str(error) else ''}"
    return text[:SHOWN_CHARACTERS]
