"""A reward made of weighted components, and the scorer that judges answers by it, in any process.

    Rubric (data: names, weights, the grader) -> Scorer (its functions, imported) -> a Judgement per answer

The components of an answer are added with their weights. The grader is called too, logged, and never trained on.
"""

import asyncio
import inspect
import math
import sysconfig
import traceback
from collections import Counter
from collections.abc import Callable, Collection, Coroutine, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from titan_rl.tasks.reward_shapes import Component, ComponentScore, component
from titan_rl.tasks.rewards import BUILT_IN, Answered, number
from titan_rl.wire.errors import RunError
from titan_rl.wire.types import Judgement, Prompt

GRADER = "grader"
"""The name of the grader's number among the parts of a verdict."""
OUTSIDE = (str(Path(__file__).parents[1]), sysconfig.get_paths()["stdlib"])
"""Folders whose code is not the user's."""
PACKAGES = tuple({sysconfig.get_paths()[name] for name in ("purelib", "platlib")})

Found = ComponentScore | Exception


@dataclass(frozen=True, slots=True)
class Rubric:
    parts: tuple[tuple[str, float], ...]  # names of reward functions, and their weights
    grader: str = ""
    arguments: tuple[tuple[str, bool | int | float | str], ...] = ()  # for built-in verifiers

    @property
    def names(self) -> list[str]:
        return [name for name, _ in self.parts] + ([self.grader] if self.grader else [])

    @property
    def simple(self) -> bool:
        """Return True if it is one of the rewards that return at once and cannot hang."""
        return not self.grader and [(name in BUILT_IN, weight) for name, weight in self.parts] == [(True, 1.0)]

    @property
    def labels(self) -> list[str]:
        """Return the components' names as they are logged: of a function, its own if that is unique."""
        short = [name.rpartition(":")[2] for name, _ in self.parts]
        counts = Counter([*short, GRADER])
        return [own if counts[own] == 1 else name for own, (name, _) in zip(short, self.parts, strict=True)]

    @property
    def weights(self) -> dict[str, float]:
        """Return the components' weights by their labels."""
        return {label: weight for label, (_, weight) in zip(self.labels, self.parts, strict=True)}


class JudgeRequest(NamedTuple):
    """Answers of one group to judge in another process. Without a prompt: only import the rubric."""

    rubric: Rubric
    prompt: Prompt | None = None
    answers: Sequence[Answered] = ()
    rows: Sequence[int] = ()  # indices of the answers to judge
    ungraded: Sequence[int] = ()  # rows that the grader has failed on
    seconds: float | None = None


class RewardUnusable(RunError):
    """A reward that cannot be imported: no answer will ever have one."""

    def __init__(self, rubric: Rubric, found: str) -> None:
        names = ", ".join(f'"{name}"' for name in rubric.names)
        super().__init__(
            f"task.reward: expected {names} to be imported, found {found}",
            "Each process of task.reward_workers imports it. It imported when the run was checked: its file, or a "
            "package that it needs, has changed since.",
        )


class Scorer:
    """Imports the functions of a rubric, and calls them."""

    def __init__(self, rubric: Rubric) -> None:
        arguments = dict(rubric.arguments)
        self._parts = [component(name, arguments) for name, _ in rubric.parts]
        self._weights = [weight for _, weight in rubric.parts]
        self._labels = rubric.labels if len(rubric.parts) > 1 else [""]
        self._grader = component(rubric.grader, arguments) if rubric.grader else None
        self._runner: asyncio.Runner | None = None  # one loop for all calls: clients that the user keeps belong to it

    @property
    def at_once(self) -> bool:
        """Return True if answers are judged together: by a function of all, or by an async one."""
        return any(each.at_once or each.asynchronous for each in [*self._parts, *filter(None, [self._grader])])

    def verdicts(
        self,
        prompt: Prompt,
        answers: Sequence[Answered],
        rows: Sequence[int],
        *,
        ungraded: Collection[int] = (),
        seconds: float | None = None,
        at: Callable[[str, bool], None] = lambda name, has_deadline: None,
    ) -> Iterator[tuple[int, Judgement]]:
        """Yield a verdict for each of `rows`, as soon as it is known. `seconds`: deadline of one async call. `at` is
        called before each call that may take as long, with its name and whether it ends itself when it is late: a
        function of all answers, an async one, the grader; and with "" when all answers have one."""
        found = [self._together(part, prompt, answers, rows, seconds, at) for part in self._parts]
        graded = [row for row in rows if row not in ungraded] if self._grader is not None else []
        grades = self._together(self._grader, prompt, answers, graded, seconds, at) if self._grader and graded else {}
        if grades or any(found):
            at("", False)
        for row in rows:
            own = [
                together[row] if together else _called(part, prompt, answers[row])
                for part, together in zip(self._parts, found, strict=True)
            ]
            grade = grades.get(row)
            if self._grader is not None and row in graded and not grades:
                at(GRADER, False)
                grade = _called(self._grader, prompt, answers[row])
            yield row, self._verdict(own, grade)

    def _together(
        self,
        part: Component,
        prompt: Prompt,
        answers: Sequence[Answered],
        rows: Sequence[int],
        seconds: float | None,
        at: Callable[[str, bool], None],
    ) -> dict[int, Found]:
        """Return a component's scores of these rows, if it judges them together; else nothing."""
        if part.at_once:
            at(GRADER if part is self._grader else part.name, False)
            return dict(zip(rows, self._of_all(part, prompt, answers, rows), strict=True))
        if not part.asynchronous:
            return {}
        at(GRADER if part is self._grader else part.name, True)

        async def one(row: int) -> Found:
            try:
                async with asyncio.timeout(seconds):
                    return part.read(await part.call(prompt, answers[row]))
            except TimeoutError as error:
                return TimeoutError(str(error) or f"{part.name} did not return within {seconds:g} s")
            except Exception as error:
                return error

        async def every() -> list[Found]:
            return await asyncio.gather(*map(one, rows))

        return dict(zip(rows, self._run(every()), strict=True))

    def _of_all(self, part: Component, prompt: Prompt, answers: Sequence[Answered], rows: Sequence[int]) -> list[Found]:
        try:
            value = part.call(prompt, answers)
            if inspect.isawaitable(value):
                value = self._run(_awaited(value))
            scores = part.read(value)
            if len(scores) != len(answers):
                raise ValueError(
                    f"task.reward: expected {part.name!r} to return {len(answers)} rewards, found {len(scores)}"
                )
        except Exception as error:
            return [error] * len(rows)
        bad = ValueError(f"task.reward: expected {part.name!r} to return finite numbers, found one that is not")
        return [bad if math.isnan(scores[row].value or 0.0) else scores[row] for row in rows]

    def _run(self, coroutine: Coroutine[Any, Any, Any]) -> Any:
        self._runner = self._runner or asyncio.Runner()
        return self._runner.run(coroutine)

    def _verdict(self, found: Sequence[Found], grade: Found | None) -> Judgement:
        parts, total, applied = dict[str, float](), 0.0, False
        feedback = "\n".join(each.feedback for each in found if isinstance(each, ComponentScore) and each.feedback)
        failed = next(
            ((part, each) for part, each in zip(self._parts, found, strict=True) if isinstance(each, Exception)), None
        )
        for label, weight, score in zip(self._labels, self._weights, found, strict=True):
            if isinstance(score, ComponentScore):
                parts |= score.more
                if score.value is not None:
                    total, applied = total + weight * score.value, True
                    parts |= {label: score.value} if label else {}
        error = error_text(*failed) if failed else ""
        if not failed and not applied:
            error = "no reward function applies to this answer: all returned None"
        if not error:
            try:
                total = number(total, "the weighted sum")
            except ValueError as unusable:
                error = str(unusable)
        if isinstance(grade, ComponentScore) and grade.value is not None:
            parts |= {GRADER: grade.value}
        reward = math.nan if error else total
        if self._grader is not None and isinstance(grade, Exception):
            error = error or f"the grader: {error_text(self._grader, grade)}"
        hung = failed is not None and isinstance(failed[1], TimeoutError)
        return Judgement(reward, parts, error, hung, feedback)


def judge_once(part: Component, prompt: Prompt, answer: Answered) -> None:
    """Call a function on one answer, or on two copies of it if it judges all answers at once. Raise its
    error, or ValueError if it returns no finite number. It need not apply to this answer."""
    value = part.call(prompt, [answer] * 2 if part.at_once else answer)
    if part.at_once or part.asynchronous:
        value = asyncio.run(_awaited(value)) if inspect.isawaitable(value) else value
    scores = part.read(value)
    if part.at_once and len(scores) != 2:
        raise ValueError(f"task.reward: expected {part.name!r} to return 2 rewards for 2 answers, found {len(scores)}")
    if any(math.isnan(score.value or 0.0) for score in (scores if part.at_once else [scores])):
        raise ValueError(f"task.reward: expected {part.name!r} to return finite numbers, found one that is not")


async def _awaited(value: Any) -> Any:
    return await value


def _called(part: Component, prompt: Prompt, answer: Answered) -> Found:
    """Return the score of one call, or its exception: a sys.exit in user code ends only this call."""
    try:
        return part.read(part.call(prompt, answer))
    except Exception as error:
        return error
    except BaseException as error:
        return RuntimeError(repr(error))


def error_text(part: Component, error: Exception) -> str:
    """Return the text of an exception, and its place in the user's code."""
    text = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
    return f"{'' if part.name in text else f'{part.name}: '}{text}{users_place(error)}"


def users_place(error: BaseException) -> str:
    """Return " at FILE:LINE", the innermost line of the user's code that an exception passed, or "". A line of an
    installed package counts if there is no other. An exception of another process carries its place."""
    if place := getattr(error, "place", ""):
        return f" at {place}"
    frames = [f for f in traceback.extract_tb(error.__traceback__) if not f.filename.startswith((*OUTSIDE, "<"))]
    frames = [frame for frame in frames if not frame.filename.startswith(PACKAGES)] or frames
    return f" at {frames[-1].filename}:{frames[-1].lineno}" if frames else ""
