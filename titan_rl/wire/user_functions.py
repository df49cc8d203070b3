"""Loads the functions that a config names, and calls them with the arguments that they take."""

import inspect
from collections.abc import Callable, Collection, Mapping
from functools import lru_cache
from typing import Any

from titan_rl.wire.parts import module_named


def parameters_of(function: Callable[..., Any]) -> tuple[inspect.Parameter, ...]:
    """Return a function's parameters, without self for a bound method. Cached: reading them takes 0.2 ms."""
    inner = getattr(function, "__func__", None)
    return _parameters(function) if inner is None else _parameters(inner)[1:]


@lru_cache(maxsize=1024)
def _parameters(function: Callable[..., Any]) -> tuple[inspect.Parameter, ...]:
    return tuple(inspect.signature(function).parameters.values())


def _listed(function: Callable[..., Any], name: str) -> tuple[inspect.Parameter, ...]:
    """Return a function's parameters. Raise TypeError if Python cannot list them, as of many builtins."""
    try:
        return parameters_of(function)
    except ValueError:
        raise TypeError(
            f"{name}: expected a function whose arguments Python can list, found {function!r}; call it from your own"
        ) from None


def keywords_of(
    function: Callable[..., Any], offered: Mapping[str, Any], name: str, *, spread: str = ""
) -> dict[str, Any]:
    """Return the offered arguments that a function takes by keyword. One with **keywords takes all of them, or the
    entries of the mapping `spread`. Raise TypeError if it requires any other."""
    keywords: dict[str, Any] = {}
    for p in _listed(function, name):
        if p.kind is p.VAR_KEYWORD:
            keywords |= {k: v for k, v in (offered[spread] if spread else offered).items() if k not in keywords}
        elif p.kind is not p.VAR_POSITIONAL and p.name in offered and p.kind is not p.POSITIONAL_ONLY:
            keywords[p.name] = offered[p.name]
        elif p.default is p.empty and p.kind is not p.VAR_POSITIONAL:
            raise TypeError(f"{name}: expected to require no arguments but {', '.join(offered)}, found {p}")
    return keywords


def argued(function: Callable[..., Any], names: Collection[str], only: str, name: str) -> Callable[[Any], Any]:
    """Return a function of an object that calls a user's function with attributes of the object: each of `names` that
    the function takes by keyword. One that takes none of them, and requires one argument, gets the attribute `only`."""
    parameters = _listed(function, name)
    if not any(p.name in names for p in parameters) and sum(p.default is p.empty for p in parameters) == 1:
        return lambda given: function(getattr(given, only))
    return lambda given: function(**keywords_of(function, {key: getattr(given, key) for key in names}, name))


def load(name: str, key: str) -> Any:
    """Import "module:name". `key` is the config's, for the message."""
    module, colon, attribute = name.partition(":")
    if not (module and colon and attribute) or module.startswith("."):
        raise ValueError(f'{key}: expected "package.module:name", found {name!r}')
    try:
        loaded: Any = module_named(module)
        for part in attribute.split("."):
            loaded = getattr(loaded, part)
    except (ImportError, AttributeError, SyntaxError) as error:
        raise ValueError(f"{key} = {name!r}: {type(error).__name__}: {error}") from error
    except SystemExit as error:
        raise ValueError(f"{key}: expected {name!r} to import, found {error!r}") from error
    if not callable(loaded):
        raise ValueError(f"{key}: expected {name!r} to be a class or a function, found {type(loaded).__name__}")
    return loaded
