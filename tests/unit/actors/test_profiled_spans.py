"""Spans as ranges of a profiler: NVTX on a GPU, torch.profiler where a trace is taken, none elsewhere."""

import random
from collections.abc import Callable, Iterator
from contextlib import suppress

import pytest
import torch

from titan_rl.actors.endpoint import show_spans_to_profilers
from titan_rl.wire.spans import Stretch, span

NAMES = ("step", "forward", "backward", "catch up")


class Failed(Exception):
    pass


@pytest.fixture(autouse=True)
def alone() -> Iterator[None]:
    """Leave this process's recorder as it was."""
    yield
    span.ranges = None
    span.take()


def work(rng: random.Random, depth: int, expected: list[str], now_open: Callable[[], list[str]]) -> None:
    """Open and close drawn spans, some of which raise; write the name of each that has a range."""
    before = now_open()
    for _ in range(rng.randint(0, 3) if depth else 0):
        name, kind = rng.choice(NAMES), rng.choice(("main", "main", "main", "lane", "id", "stretch"))
        ranged = kind in ("main", "stretch")
        opened = {
            "main": lambda name=name: span(name, tokens=96),
            "lane": lambda name=name: span(name, lane="weights"),
            "id": lambda name=name: span(name, id=7),
            "stretch": lambda name=name: Stretch(span, name, lambda: {"turns": 1}),
        }[kind]()
        with suppress(Failed), opened:
            expected.extend([name] if ranged else [])
            assert now_open() == [*before, *([name] if ranged else [])]
            work(rng, depth - 1, expected, now_open)
            if rng.random() < 0.3:
                raise Failed
        assert now_open() == before


@pytest.mark.parametrize("seed", range(20))
def test_ranges_nest_as_their_spans_do_also_when_these_raise(monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    pushed, stack = list[str](), list[str]()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda.nvtx, "range_push", lambda name: (pushed.append(name), stack.append(name)))
    monkeypatch.setattr(torch.cuda.nvtx, "range_pop", stack.pop)
    show_spans_to_profilers()
    expected = list[str]()
    work(random.Random(seed), 4, expected, lambda: list(stack))
    assert pushed == expected
    assert stack == []


def test_without_a_gpu_or_a_trace_there_are_no_ranges(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    show_spans_to_profilers()
    assert span.ranges is None


def test_a_trace_has_the_names_of_spans_also_of_one_in_which_it_ends() -> None:
    show_spans_to_profilers(traced=True)
    profile = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU])
    with span("step"):
        with profile, span("forward"), suppress(Failed), span("backward"):
            raise Failed
        span.take()
    assert {"forward", "backward"} <= {event.name for event in profile.events() or ()}
    assert [each.name for each in span.take().spans] == ["step"]
