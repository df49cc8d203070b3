"""Objects of two processes, the tests and the solution, that call each other.

    tests: f(a)   ── call f with list 2 = [3, 1] ──>   solution: a.sort(); return a
                  <── list 2, which is now [1, 3] ──

Plain data passes by value. Lists, dicts and sets are copied to both sides, and each message carries the contents that
have changed, so that both sides see one object. Any other object stays where it is; a proxy (`Remote`) forwards its
attributes, calls, items and operators.

The solution may lie about its own objects, so the tests' side never asks whether one equals, contains or is close to
plain data: `==` and `in` compare here. An operator with plain data gives no plain data, as `obj - 6` could then be 0,
and its result is neither true, false, empty nor zero. Nor are the attributes of a difference: `(obj - 6).value`.
"""

import builtins
import copy
import io
import json
import operator
import queue
import random
import re
import socket
import struct
import sys
import threading
import types
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from enum import Enum
from itertools import chain, islice
from typing import Any

from titan_rl.ext.sandbox import surroundings
from titan_rl.ext.sandbox.plain_data import (
    CONTAINERS,
    CONTAINERS_BY_NAME,
    DATA,
    DATA_BY_NAME,
    EXACT,
    SCALARS,
    exact_value,
    fill,
    is_error,
    items_of,
    named_tuple,
)

MAX_MESSAGE_BYTES = 16 << 20
MAX_ITEMS = 100_000
READABLE = (io.IOBase, re.Pattern, re.Match, random.Random, queue.Queue, types.SimpleNamespace)
"""Types of the tests' arguments whose public attributes the solution may use."""
DESCRIPTIONS = ("__name__", "__qualname__", "__doc__", "__dict__")
"""Special names whose values pass. Those of the tests' functions and classes do, except `__dict__`."""
REPLACEABLE = ((sys, "stdout"), (sys, "stderr"), (sys, "stdin"), (builtins, "print"), (builtins, "input"))
"""What tests may redirect or patch: the solution then uses the tests' object."""
DIFFERENCES = frozenset(
    f"__{p}{name}__" for name in ("sub", "xor", "mod", "truediv", "floordiv") for p in ("", "r", "i")
)
"""Operators whose result tells, with an expected value as the other operand, whether both are equal."""
SET_DIFFERENCES = ("difference", "symmetric_difference")
BINARY = "add sub mul matmul truediv floordiv mod divmod pow lshift rshift and xor or"
UNARY = "neg pos abs invert round int float complex index"
COMPARISONS = "eq ne lt le gt ge"
TEXTS = "str repr format"
SINGLE = {type(NotImplemented): "NotImplemented", type(...): "Ellipsis"}
OTHERS = "call getitem setitem delitem next reversed hash enter aenter aiter anext"


class RemoteError(Exception):
    """The other process has ended, or its message cannot be read or believed."""


class RemoteType(type):
    """The type of proxies of classes."""

    __peer__: "Peer"

    def __getattr__(cls, name: str) -> Any:
        return _attribute(cls, name)

    def __setattr__(cls, name: str, value: Any) -> None:
        cls.__peer__.ask("set", cls, name, value)

    @property
    def __doc__(cls) -> Any:  # pyright: ignore[reportIncompatibleVariableOverride]
        return _attribute(cls, "__doc__")

    def __call__(cls, /, *arguments: Any, **keywords: Any) -> Any:
        return cls.__peer__.ask("__call__", cls, *arguments, **keywords)

    def __iter__(cls) -> Iterator[Any]:
        return cls.__peer__.ask("__iter__", cls)

    def __bool__(cls) -> bool:
        return True

    def __len__(cls) -> int:
        return cls.__peer__.ask("__len__", cls)

    def __getitem__(cls, key: Any) -> Any:
        return cls.__peer__.ask("__getitem__", cls, key)


class Remote(metaclass=RemoteType):
    """The base of all proxies. A proxy's class has the special methods that the object's class defines."""

    __peer__: "Peer"
    __plain__ = False  # the object's class extends a type of plain data
    __mixed__ = False  # the result of an operator with plain data, which may be a value that a test expects
    __difference__ = False  # mixed by one of DIFFERENCES, or read of such a result
    __compares__ = False  # a method of that kind

    def __getattr__(self, name: str) -> Any:
        return _attribute(self, name)

    def __setattr__(self, name: str, value: Any) -> None:
        if _is_special(name):
            object.__setattr__(self, name, value)  # Python itself sets __traceback__
        else:
            self.__peer__.ask("set", self, name, value)

    def __repr__(self) -> str:
        return _text("__repr__")(self)

    def __str__(self) -> str:
        return _text("__str__")(self)

    def __copy__(self) -> Any:
        return self.__peer__.ask("copy", self)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return self.__peer__.ask("deepcopy", self)


def _attribute(of: Any, name: str) -> Any:
    if _is_special(name) and name not in DESCRIPTIONS:
        raise AttributeError(name)
    found = of.__peer__.ask("get", of, name)
    if isinstance(found, Remote) and name in SET_DIFFERENCES:
        found.__compares__ = True
    return found if isinstance(of, type) or not of.__difference__ else _checked(found)


def _checked(found: Any) -> Any:
    """Return an attribute, an item or an answer of a difference. It must not be empty or zero, as every wrong program
    can make it, and is a difference too."""
    if isinstance(found, Remote):
        found.__difference__ = found.__mixed__ = True
    elif _is_nothing(found):
        raise RemoteError("the difference of an object and plain data is zero")
    return found


def _is_nothing(value: Any) -> bool:
    """Return True for truth values, zeros, and for containers and texts of nothing else."""
    if isinstance(value, str):
        return value in ("set()", "frozenset()", "True", "False") or not any(c.isalnum() and c != "0" for c in value)
    if isinstance(value, (list, tuple, set, frozenset, dict)):
        return all(map(_is_nothing, value.values() if isinstance(value, dict) else value))
    return value is not None and not isinstance(value, (Remote, type)) and (value is True or not value)


def _description(name: str) -> property:
    return property(lambda self: _attribute(self, name))


def _is_special(name: str) -> bool:
    return name.startswith("__") and name.endswith("__")


def _forward(name: str) -> Callable[..., Any]:
    return lambda self, /, *arguments, **keywords: self.__peer__.ask(name, self, *arguments, **keywords)


def _read(name: str) -> Callable[..., Any]:
    """Forward what reads an object."""

    def method(self: Any, /, *arguments: Any, **keywords: Any) -> Any:
        result = self.__peer__.ask(name, self, *arguments, **keywords)
        compared = self.__compares__ and not all(isinstance(each, Remote) for each in arguments)
        return _checked(result) if compared or self.__difference__ else result

    return method


def _compare(name: str) -> Callable[..., Any]:
    def method(self: Remote, other: Any) -> Any:
        if isinstance(other, Remote):
            equal = self.__peer__.ask(name, self, other)
            if name == "__eq__" and equal is True and self.__peer__.ask("equals anything", self):
                raise RemoteError("an object that equals everything")
            return equal
        plain = self.__peer__.ask("plain", self) if self.__plain__ and not self.__mixed__ else self
        return NotImplemented if isinstance(plain, Remote) else getattr(type(plain), name)(plain, other)

    return method


def _operate(name: str) -> Callable[..., Any]:
    def method(self: Remote, *others: Any) -> Any:
        result = self.__peer__.ask(name, self, *others)
        if result is NotImplemented or all(isinstance(each, Remote) and not each.__mixed__ for each in (self, *others)):
            return result
        if not isinstance(result, Remote) or name in ("__divmod__", "__rdivmod__"):
            raise RemoteError(f"{name} of an object and plain data gave plain data")
        result.__mixed__ = True
        result.__difference__ = name in DIFFERENCES or any(
            getattr(each, "__difference__", False) for each in (self, *others)
        )
        return result

    return method


def _bool(self: Any) -> bool:
    if self.__mixed__:
        raise RemoteError("the result of an object and plain data was asked whether it is true")
    return self.__peer__.ask("__bool__", self)


def _text(name: str) -> Callable[..., str]:
    def method(self: Any, *arguments: Any) -> str:
        text = self.__peer__.ask(name, self, *arguments)
        if self.__mixed__ and (_is_zero(text) or _is_nothing(text)):
            raise RemoteError(f"{name} of the result of an object and plain data is zero")
        return text

    return method


def _is_zero(text: Any) -> bool:
    try:
        return float(text) == 0
    except ValueError:
        return False


def _iterate(self: Any) -> Iterator[Any]:
    if self.__difference__:
        items = self.__peer__.ask("items", self)
        return iter(_checked(items))
    items = self.__peer__.ask("__iter__", self)
    if not self.__mixed__:
        return items
    try:
        return chain([next(items)], items)
    except StopIteration:
        raise RemoteError("the result of an object and plain data has no items") from None


def _length(self: Any) -> int:
    """Return an object's length, which must be the number of its items."""
    length = self.__peer__.ask("__len__", self)
    if self.__mixed__ and length == 0:
        raise RemoteError("the result of an object and plain data has no items")
    is_collection = _defined(type(self), "__iter__") and not _defined(type(self), "__next__")
    if is_collection and length != len(self.__peer__.ask("items", self)):
        raise RemoteError("__len__ is not the number of items")
    return length


def _exit(self: Any, *error: Any) -> bool:
    self.__peer__.ask("__exit__", self, *error[:2], None)
    return False  # otherwise a solution could suppress an AssertionError


async def _exit_async(self: Any, *error: Any) -> bool:
    await self.__peer__.ask("__aexit__", self, *error[:2], None)
    return False


def _await(self: Any) -> Iterator[Any]:
    return self.__peer__.ask("await", self)
    yield


async def _awaited(remote: Any) -> Any:
    return await remote


METHODS: Mapping[str, Callable[..., Any]] = {
    **{f"__{name}__": _forward(f"__{name}__") for name in OTHERS.split()},
    **{f"__{name}__": _compare(f"__{name}__") for name in COMPARISONS.split()},
    **{f"__{name}__": _operate(f"__{name}__") for name in UNARY.split()},
    **{f"__{prefix}{name}__": _operate(f"__{prefix}{name}__") for name in BINARY.split() for prefix in ("", "r", "i")},
    **{f"__{name}__": _text(f"__{name}__") for name in TEXTS.split()},
    **{name: _forward(name) for name in ("send", "throw")},  # a generator's
    **{name: _read(name) for name in ("__call__", "__getitem__", "__next__")},
    **{"__bool__": _bool, "__iter__": _iterate, "__len__": _length},
    **{"__exit__": _exit, "__aexit__": _exit_async, "__await__": _await},
}
"""Special methods of proxies. There is no __contains__: `in` iterates, and compares here."""


def _equals_anything(value: Any) -> bool:
    try:
        return bool(value == object())
    except Exception:
        return False


OPERATIONS: Mapping[str, Callable[..., Any]] = {
    "get": getattr,
    "set": setattr,
    "equals anything": _equals_anything,
    "items": lambda each: list(islice(each, MAX_ITEMS)),
    "plain": exact_value,
    "copy": copy.copy,
    "deepcopy": copy.deepcopy,
}


def _replaceable() -> list[Any]:
    return [getattr(module, name, None) for module, name in REPLACEABLE]


class Peer:
    """One end of the connection. One end asks, and answers what the other asks meanwhile."""

    def __init__(self, connection: socket.socket, serves: Mapping[str, Callable[..., Any]] | None = None) -> None:
        """`serves`: more operations of the solution's end. The tests' end grants less."""
        self._connection = connection
        self._is_tests_end = serves is None
        self._operations = {**OPERATIONS, **(serves or {})}
        if self._is_tests_end:
            surroundings.share_seeds(self.ask)
        else:
            self._surrounded = surroundings.Surrounded(self.ask)
            self._operations |= {"replace": self._replace, "surround": self._surrounded.take, "seed": random.seed}
        self._next = int(self._is_tests_end)  # one end gives even numbers, the other odd ones
        self._objects: dict[int, Any] = {}
        self._numbers: dict[int, int] = {}  # by id()
        self._contents: dict[int, list[Any]] = {}  # items of containers, as the other end knows them
        self._unsent: list[int] = []
        self._descriptions: dict[int, list[Any]] = {}  # from the last message, for proxies and copies
        self._loop: Any = None
        self._lock = threading.RLock()
        self._originals = _replaceable()
        self._replaced: list[Any] = [None] * len(self._originals)
        self._surroundings = surroundings.Surroundings()

    def ask(self, operation: str, /, *arguments: Any, **keywords: Any) -> Any:
        with self._lock:
            if self._is_tests_end:
                self._pass_replacements()
            self._send("ask", operation, arguments, keywords)
            while True:
                kind, value, *rest = self._receive()
                if kind == "ask":
                    self._answer(value, *rest)
                elif kind == "value":
                    return value
                else:
                    raise self._raised(value, operation) from None

    def _pass_replacements(self) -> None:
        """Let the solution print to, and read from, what the tests have put in the place of stdout and stdin."""
        replaced = [None if new is old else new for new, old in zip(_replaceable(), self._originals, strict=True)]
        if not all(map(operator.is_, replaced, self._replaced)):
            self._replaced = replaced
            self.ask("replace", *replaced)
        if changes := self._surroundings.changes():
            self.ask("surround", changes)

    def _replace(self, *values: Any) -> None:
        for (module, name), new, old in zip(REPLACEABLE, values, self._originals, strict=True):
            setattr(module, name, old if new is None else new)

    def serve(self) -> None:
        """Answer until the other end is closed."""
        self._surrounded.begin()  # not before: while the solution is imported, nothing is answered
        while True:
            try:
                _, *rest = self._receive()
            except RemoteError:
                return
            self._answer(*rest)
            with suppress(Exception):
                self._originals[0].flush()  # the process is killed when the tests have ended

    def _raised(self, error: Any, operation: str) -> BaseException:
        """Return the error that an operation raises here. The end of an iteration that is none would end a test's loop
        before it has compared anything."""
        ends = {"await": StopAsyncIteration, **dict.fromkeys(("__next__", "send", "throw"), StopIteration)}
        if isinstance(error, StopIteration | StopAsyncIteration) and not isinstance(error, ends.get(operation, ())):
            return RemoteError(f"raised {type(error).__name__}")
        return error if isinstance(error, Exception) else RemoteError(f"raised {type(error).__name__}")

    def _answer(self, operation: str, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> None:
        try:
            answer = "value", self._perform(operation, *arguments, **keywords)
        except BaseException as error:
            answer = "raised", error.with_traceback(None)
        try:
            self._send(*answer)
        except (TypeError, ValueError, RecursionError) as error:
            self._send("raised", ValueError(f"{error}"))

    def _perform(self, operation: str, /, *arguments: Any, **keywords: Any) -> Any:
        if self._is_tests_end and operation in surroundings.SHARED:
            return surroundings.SHARED[operation](*arguments)
        if self._is_tests_end and not self._passed(arguments[0]):
            raise TypeError(f"the solution may not {operation} an object that the tests did not pass to it")
        if operation == "__getitem__":
            return operator.getitem(*arguments)  # also Class[parameter]
        if operation in METHODS:
            return getattr(type(arguments[0]), operation)(*arguments, **keywords)
        if operation == "await":
            return self._run(*arguments)
        if operation in ("get", "set") and self._is_tests_end:
            _check_access(operation, *arguments[:2])
        return self._operations[operation](*arguments)

    def _passed(self, target: Any) -> bool:
        """Return True for an object of this end that the other end knows. With `type`, for one, the solution could make
        objects of which the tests' process believes that they equal anything."""
        number = self._numbers.get(id(target))
        return number is not None and number % 2 == self._next % 2

    def _run(self, awaitable: Any) -> Any:
        import asyncio

        if self._loop is None:
            self._loop = asyncio.new_event_loop()
        return self._loop.run_until_complete(_awaited(awaitable))

    def _encoded(self, value: Any) -> Any:
        """Return a value as JSON: scalars as they are, the rest as [tag, parts], objects by their number."""
        kind = type(value)
        if value is None or kind in (bool, float, str) or (kind is int and -(1 << 63) < value < 1 << 63):
            return value
        if kind in DATA:
            return [kind.__name__, self._all_encoded(DATA[kind][0](value))]
        name = value.__name__ if isinstance(value, type) else SINGLE.get(kind, "")
        if name and getattr(builtins, name, None) is value:
            return ["builtin", [name]]
        if id(value) in self._numbers:
            return self._numbered(value)
        if issubclass(kind, SCALARS) and not issubclass(kind, Enum):
            return self._encoded(exact_value(value))
        if kind.__bases__ == (tuple,) and (fields := getattr(kind, "_fields", None)):
            return ["namedtuple", self._all_encoded([kind.__name__, fields, *exact_value(value)])]
        if kind.__module__ == "numpy" and hasattr(value, "tolist"):
            return self._encoded(value.tolist())
        if isinstance(value, BaseException) and getattr(builtins, kind.__name__, None) is kind:
            return ["error", self._all_encoded([kind.__name__, *value.args])]
        if isinstance(value, types.ModuleType):
            raise TypeError("a module does not pass: tests import the modules that they use")
        return self._numbered(value)

    def _numbered(self, value: Any) -> list[Any]:
        if id(value) not in self._numbers:
            number, self._next = self._next, self._next + 2
            self._objects[number], self._numbers[id(value)] = value, number
            self._unsent.append(number)
        return ["object", self._numbers[id(value)]]

    def _all_encoded(self, values: Any) -> list[Any]:
        return [self._encoded(each) for each in values]

    def _described(self, value: Any) -> list[Any]:
        """Return what the other end needs to make its copy of a container, or its proxy."""
        kind = type(value)
        if kind in CONTAINERS:
            items = self._contents[self._numbers[id(value)]] = items_of(value)
            return [kind.__name__, self._all_encoded(items)]
        if isinstance(value, type):
            bases = [each for each in value.__bases__ if each.__module__ != "builtins" or issubclass(each, Exception)]
            special = [name for name in METHODS if _defined(value, name)]
            is_plain = issubclass(value, tuple(EXACT))
            return ["class", [value.__name__, self._all_encoded(bases), special, is_plain]]
        if isinstance(value, types.CoroutineType):
            return ["coroutine", [self._numbered(kind)]]
        arguments = value.args if isinstance(value, BaseException) else ()
        return ["instance", [self._numbered(kind), *self._all_encoded(arguments)]]

    def _decoded(self, value: Any) -> Any:
        if not isinstance(value, list):
            return value
        tag, parts = value
        if tag == "object":
            return self._objects[parts] if parts in self._objects else self._create(parts)
        decoded = [self._decoded(each) for each in parts]
        if tag == "builtin":
            known = getattr(builtins, decoded[0])
            return known if isinstance(known, type) or type(known) in SINGLE else RemoteError(decoded[0])
        if tag == "error":
            return _error(*decoded)
        if tag == "namedtuple":
            return named_tuple(decoded[0], decoded[1])(*decoded[2:])
        return DATA_BY_NAME[tag](*decoded)

    def _create(self, number: int) -> Any:
        """Make an object of the other end: an empty copy of a container, or a proxy."""
        if number % 2 == self._next % 2:
            raise ValueError("a number that this end gives")
        tag, parts = self._descriptions[number]
        if tag in CONTAINERS_BY_NAME:
            made = CONTAINERS_BY_NAME[tag]()
            self._contents[number] = []
        elif tag == "class":
            name, bases, special, is_plain = parts
            bases = tuple(each for each in map(self._decoded, bases) if isinstance(each, RemoteType) or is_error(each))
            bases = bases if any(issubclass(each, Remote) for each in bases) else (Remote, *bases)
            methods = {name: METHODS[name] for name in special if name in METHODS}
            own = {"__peer__": self, "__plain__": is_plain is True}
            described = {name: _description(name) for name in ("__doc__", "__dict__")}
            made = RemoteType(str(name), bases, {**own, **described, **methods})
        else:
            kind, *arguments = map(self._decoded, parts)
            if not isinstance(kind, RemoteType):
                raise TypeError("an object has no class")
            made: Any = kind.__new__(kind)  # type: ignore[call-arg]
            if isinstance(made, BaseException):
                object.__setattr__(made, "args", tuple(arguments))
        self._objects[number], self._numbers[id(made)] = made, number
        if tag == "coroutine":
            made = _awaited(made)
        return made

    def _forget(self, number: int) -> None:
        if self._contents.pop(number, None) is not None:
            del self._numbers[id(self._objects.pop(number))]

    def _changes(self) -> tuple[list[int], list[int]]:
        """Return the containers with other items than the other end knows, and those to which nothing here refers any
        more, so that both ends need not share them."""
        changed, unused = [], []
        for number, before in [*self._contents.items()]:
            is_unused = sys.getrefcount(self._objects[number]) == 2  # self._objects and the argument
            items = items_of(self._objects[number])
            if len(items) != len(before) or not all(map(operator.is_, items, before)):
                changed.append(number)
            elif is_unused:
                unused.append(number)
                self._forget(number)
        return changed, unused

    def _send(self, kind: str, value: Any, *rest: Any) -> None:
        self._unsent, unused = self._changes()
        if kind == "ask":
            arguments, keywords = rest
            header = [value, self._all_encoded(arguments), {key: self._encoded(each) for key, each in keywords.items()}]
        else:
            header = [self._encoded(value)]
        sent = [[number, *self._described(self._objects[number])] for number in self._unsent]  # grows meanwhile
        text = json.dumps([kind, header, sent, unused]).encode()
        if len(text) > MAX_MESSAGE_BYTES:
            raise ValueError(f"expected at most {MAX_MESSAGE_BYTES >> 20} MiB, found {len(text) >> 20}")
        try:
            self._connection.sendall(struct.pack("I", len(text)) + text)
        except OSError as error:
            raise RemoteError("the solution's process has ended") from error

    def _receive(self) -> tuple[Any, ...]:
        (size,) = struct.unpack("I", self._exactly(4))
        if size > MAX_MESSAGE_BYTES:
            raise RemoteError("a message is too long")
        try:
            return self._read(self._exactly(size))
        except RemoteError:
            raise
        except BaseException as error:
            raise RemoteError(f"a message that cannot be read: {error!r}") from None

    def _read(self, text: bytes) -> tuple[Any, ...]:
        kind, header, sent, unused = json.loads(text)
        for number in unused:
            self._forget(number)
        self._descriptions = {number: [tag, parts] for number, tag, parts in sent}
        filled = [(number, parts) for number, (tag, parts) in self._descriptions.items() if tag in CONTAINERS_BY_NAME]
        for number, parts in filled:
            each = self._decoded(["object", number])
            fill(each, [self._decoded(item) for item in parts])
            self._contents[number] = items_of(each)
        if kind != "ask":
            return kind, self._decoded(header[0])
        operation, arguments, keywords = header
        decoded = {key: self._decoded(each) for key, each in keywords.items()}
        return kind, operation, tuple(self._decoded(each) for each in arguments), decoded

    def _exactly(self, size: int) -> bytes:
        read = bytearray()
        while len(read) < size:
            more = b""
            with suppress(OSError):
                more = self._connection.recv(size - len(read))
            if not more:
                raise RemoteError("the solution's process has ended")
            read += more
        return bytes(read)


def _defined(kind: type, name: str) -> Any:
    """Return what a class, or a base of it but `object`, defines as a name. None: nothing."""
    return next((each.__dict__[name] for each in kind.__mro__ if name in each.__dict__ and each is not object), None)


def _check_access(operation: str, target: Any, name: Any) -> None:
    """Let the solution use the public attributes of objects of the tests' own and READABLE classes. Those of others,
    for example a generator's frame, would reach the tests."""
    kind, name = type(target), str(name)
    if operation == "get" and name in DESCRIPTIONS[:3] and kind in (types.FunctionType, type):
        return
    if kind.__module__ == "unittest.mock":
        is_open = operation == "get" and not hasattr(kind, name)  # the records of its calls stay
    else:
        replaces = operation == "set" and callable(getattr(kind, name, None))
        is_open = (kind.__module__ == "__main__" or issubclass(kind, READABLE)) and not replaces
    if not is_open or isinstance(target, type) or name.startswith("_"):
        raise AttributeError(f"the solution may not {operation} {name!r} of a {kind.__name__}")


def _error(name: str, *arguments: Any) -> Exception:
    kind = getattr(builtins, name, None)
    if isinstance(kind, type) and issubclass(kind, Exception):
        with suppress(TypeError):
            return kind(*arguments)
    return RemoteError(f"{name}: {arguments}")
