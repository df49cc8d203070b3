"""Describes problems of a config, and refuses a run: one line per problem, exit code 2, no traceback."""

import functools
import re
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from pathlib import Path
from typing import Any, NoReturn, ParamSpec, TypeVar

from rich.columns import Columns
from rich.console import Console
from rich.padding import Padding

from titan_rl.config.changes import valued
from titan_rl.config.sections import Config
from titan_rl.config.toml import NO_CONFIG, as_toml, planned, shipped, variants
from titan_rl.record.plan_view import print_trimmed
from titan_rl.wire.counted import counted

MOST_CHARACTERS = 4000
"""Of a line: the text of an error, or the name of a key, may have any number."""
RELATIVE = re.compile("found none at|No module named")  # problems that another current folder would solve
MOST_LINES = 100
P = ParamSpec("P")
T = TypeVar("T")


def problem(config: Config, key: str, expected: str) -> str:
    """Return the line that refuses the value of a key."""
    return f"{key}: expected {expected}, found {written(valued(config, key))}"


def written(value: Any) -> str:
    """Write a key's value as TOML has it, but 2.0 as 2."""
    return f"{value:g}" if isinstance(value, float) else as_toml(value)


class ConfigRefused(ValueError):
    """A config cannot be run; `problems` has a line for each reason."""

    def __init__(self, source: str, problems: Sequence[str]) -> None:
        lines = [f"{counted(len(problems), 'problem')} in {printable(source) or 'the config'}", *problems[:MOST_LINES]]
        super().__init__("\n  - ".join(lines))
        self.problems = list(problems)


_raises: ContextVar[bool] = ContextVar("raises", default=False)


@contextmanager
def raising() -> Iterator[None]:
    """Have `refuse` raise ConfigRefused within the body: the caller is a program of the user's."""
    token = _raises.set(True)
    try:
        yield
    finally:
        _raises.reset(token)


def refuse(source: str, problems: Sequence[str]) -> NoReturn:
    """Print one unwrapped line per problem, so that logs and editors show each of them whole, and exit."""
    if _raises.get():
        raise ConfigRefused(source, problems)
    console = Console(stderr=True, highlight=False, markup=False, soft_wrap=True)
    console.print(
        f"titan_rl: {counted(len(problems), 'problem')} in {printable(source) or 'the command line'}", style="bold red"
    )
    for problem in problems[:MOST_LINES]:
        line = " ".join(problem[:MOST_CHARACTERS].splitlines())
        more = f" ... ({len(problem):,} characters)" if len(problem) > MOST_CHARACTERS else ""
        console.print(f"  - {printable(line)}{more}", style="red")
    if left := len(problems[MOST_LINES:]):
        console.print(f"  and {left:,} more", style="red")
    if any(problem.startswith(NO_CONFIG) for problem in problems):
        console.print("shipped configs:")
        print_shipped(console)
    elif elsewhere(source) and any(RELATIVE.search(problem) for problem in problems):
        here, there = (printable(str(path)) for path in (Path.cwd(), Path(source).parent.resolve()))
        console.print(f"paths and modules are relative to the current folder, {here}; the config is in {there}")
    raise SystemExit(2)


def print_shipped(console: Console) -> None:
    """Print the names of the shipped configs: files, their variants, and planned ones."""
    few, unproven = sorted(variants()), planned()
    print_names(console, [name for name in shipped() if name not in (*few, *unproven)])
    console.print("variants of them (variants.toml):")
    print_names(console, few)
    console.print("planned, never run on the hardware that they are for:")
    print_names(console, unproven)


def print_names(console: Console, names: Sequence[str]) -> None:
    """Print names in columns."""
    print_trimmed(console, Padding(Columns(names, column_first=True, padding=(0, 2)), (0, 0, 0, 2)))


def elsewhere(source: str) -> bool:
    """Return True if a config's file is in another folder than the current one."""
    with suppress(OSError, ValueError):
        return Path(source).is_file() and not Path(source).parent.samefile(".")
    return False


def printable(text: str) -> str:
    """Escape what a terminal would act on, or could not show."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def refusing(function: Callable[P, T]) -> Callable[P, T]:
    """Refuse a run if checking it fails in a way that no check foresaw: name the error, and where it was raised. Our
    own errors pass."""

    @functools.wraps(function)
    def checked(*args: P.args, **kwargs: P.kwargs) -> T:
        try:
            return function(*args, **kwargs)
        except (KeyboardInterrupt, SystemExit):
            raise
        except BaseException as error:
            if type(error).__module__.startswith("titan_rl."):
                raise
            frame = traceback.extract_tb(error.__traceback__)[-1]
            found = f"{type(error).__name__}: {error} ({frame.filename}:{frame.lineno})"
            refuse("", [f"expected input that can be checked, found {found}"])

    return checked
