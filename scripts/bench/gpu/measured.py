"""What the parts of gpu_bare.py share: the device, rows of the report, norms and times.

A part talks to gpu_bare.py by lines of stdout: BEGUN and a name, then ROW and JSON for each row.
"""

import json
import os
import time
from collections.abc import Callable, Sequence

import torch

from titan_rl.wire.gpus import PLANNED

DEVICE = os.environ.get(PLANNED, "cuda")
ON_CPU = DEVICE == "cpu"
GIB = 2**30


def begin(mode: str) -> None:
    """Tell that the rows from here on are this mode's."""
    print(f"BEGUN {mode}", flush=True)


def say(what: str, found: float | str, against: str = "", ok: bool | None = None) -> None:
    """Report one row: a quantity, its value, the bound with the reason for it, and whether it holds."""
    shown = f"{found:.4g}" if isinstance(found, float) else str(found)
    row = [what, shown, against, {True: "ok", False: "WRONG", None: ""}[ok]]
    print(f"ROW {json.dumps(row)}", flush=True)


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
    events = sorted(found.key_averages(), key=lambda event: -event.self_device_time_total)
    return [(event.key, event.self_device_time_total / 1e3, event.count) for event in events]
