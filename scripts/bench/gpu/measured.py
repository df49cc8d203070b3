"""What checks and profiles on a GPU share: the device, rows of a report, norms and times."""

import json
import os
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch

from titan_rl.wire.gpus import PLANNED

DEVICE = os.environ.get(PLANNED, "cuda")
ON_CPU = DEVICE == "cpu"
GIB = 2**30


_rows: dict[str, Any] = {"mode": "", "wrong": 0}


def begin(mode: str) -> None:
    """Name the check whose rows follow."""
    _rows["mode"] = mode


def wrong() -> int:
    """Return how many rows were WRONG."""
    return _rows["wrong"]


def say(what: str, found: float | str, against: str = "", ok: bool | None = None) -> None:
    """Print one row: a quantity, its value, the bound with the reason for it, and whether it holds."""
    verdict = {True: "ok", False: "WRONG", None: ""}[ok]
    _rows["wrong"] += verdict == "WRONG"
    row = {"check": _rows["mode"], "what": what, "found": found, "against": against, "verdict": verdict}
    print(json.dumps(row), flush=True)


def say_equal(what: str, found: object, true: object, against: str) -> None:
    say(what, "equal" if found == true else "different", against, found == true)


def say_within(what: str, found: float, bound: float, why: str) -> None:
    say(what, found, f"<= {bound:.2g}: {why}", found <= bound)


def relative(found: torch.Tensor, true: torch.Tensor) -> float:
    """Return the norm of the difference over the norm of `true`. It is not finite if `found` is not."""
    return float((found.double() - true.double()).norm() / true.double().norm().clamp(min=1e-300))


def synchronize() -> None:
    if not ON_CPU:
        torch.cuda.synchronize()


def seconds_of(run: Callable[[], object]) -> float:
    """Return the wall seconds of one call, with all that it started on the device."""
    synchronize()
    began = time.perf_counter()
    run()
    synchronize()
    return time.perf_counter() - began


def milliseconds(run: Callable[[], object], repeats: int = 5, warm: int = 2) -> float:
    """Return the median over `repeats` calls, by the device's events."""
    for _ in range(warm):
        run()
    if ON_CPU:
        return 1e3 * seconds_of(run)
    found = []
    for _ in range(repeats):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        run()
        end.record()
        end.synchronize()
        found.append(start.elapsed_time(end))
    return sorted(found)[len(found) // 2]


def kernel_times(run: Callable[[], object]) -> Sequence[tuple[str, float, int]]:
    """Return name, milliseconds and launches of each kernel of one call, the longest first."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA]) as found:
        run()
        synchronize()
    events = device_events(found.key_averages())
    return [(event.key, event.self_device_time_total / 1e3, event.count) for event in events]


def device_events(events: Iterable[Any]) -> list[Any]:
    """Return the averages of what the device itself did, the longest first. The profiler's averages also have the
    runtime's calls, such as cudaLaunchKernel, and the names that a program gave to stretches of its work."""
    on_device = (each for each in events if each.device_type.name == "CUDA" and not each.is_user_annotation)
    return sorted(on_device, key=lambda event: -event.self_device_time_total)
