"""scripts/bench_async.py: what its figures rest on. The measuring itself is run by hand."""

import asyncio
import importlib.util
import sys
import xml.etree.ElementTree as xml
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from titan_rl.wire.types import Completion, Request, Sampling


@pytest.fixture(scope="module")
def bench() -> ModuleType:
    path = Path(__file__).parents[3] / "scripts" / "bench_async.py"
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules[path.stem] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def curves(points: Sequence[tuple[int, int, str, int, float]]) -> list[dict[str, Any]]:
    keys = ("seed", "lag", "correction", "step", "score")
    return [dict(zip(keys, point, strict=True)) | {"samples": 256 * point[3]} for point in points]


def test_a_group_of_drawn_lengths_comes_back_whole_and_in_order(bench: ModuleType) -> None:
    class Engine:
        """Answers the last sample first, with as many tokens as it may; each is the sample's seed."""

        def __init__(self) -> None:
            self.ids: set[str] = set()

        async def generate(self, request: Request) -> list[Completion]:
            self.ids.add(request.id)
            (seed,), n = request.seeds, request.sampling.max_new_tokens
            assert request.sampling.stop_token_ids == ()
            await asyncio.sleep(0.001 * (20 - seed))
            return [Completion([seed] * n, [0.0] * n, [0] * n, "length")]

    engine = Engine()
    request = Request("prompt-3", [1, 2], [11, 12, 13, 14], Sampling(160, stop_token_ids=(2,)))
    samples = asyncio.run(bench.LongTailed(engine).generate(request))
    assert [sample.tokens[0] for sample in samples] == request.seeds
    lengths = [len(sample.tokens) for sample in samples]
    assert lengths == [bench.drawn_length("prompt-3", k, 160) for k in range(4)]
    assert len(set(lengths)) > 1
    assert len(engine.ids) == 4


def test_lengths_are_the_same_in_every_run_and_have_a_long_tail(bench: ModuleType) -> None:
    lengths = sorted(bench.drawn_length(f"prompt-{i}", k, 160) for i in range(100) for k in range(8))
    assert lengths == sorted(bench.drawn_length(f"prompt-{i}", k, 160) for i in range(100) for k in range(8))
    assert 1 <= lengths[0] <= lengths[-1] <= 160
    assert 30 <= lengths[400] <= 45
    assert lengths[760] > 2.5 * lengths[400]


def test_only_curves_that_lack_steps_are_run_again(bench: ModuleType) -> None:
    whole, cut_short = (0, 0, "none", 10, 0.9), (0, 1, "none", 5, 0.8)
    rows = [{key: str(value) for key, value in row.items()} for row in curves([whole, cut_short])]
    lagging = {"rollout.lag": 1, "rollout.pace": "false"}
    assert bench.missing(rows, seeds=1, steps=10, lags=[0, 1]) == {
        (0, 1, "default"): lagging,
        (0, 1, "none"): lagging | bench.UNCORRECTED,
    }
    assert len(bench.missing([], seeds=3, steps=60, lags=[0, 1, 2, 4])) == 21


def test_the_plot_has_a_line_a_curve_and_dashes_what_is_uncorrected(bench: ModuleType, tmp_path: Path) -> None:
    path = tmp_path / "curves.csv"
    every = [(0, "none"), (2, "default"), (2, "none")]
    points = [(seed, *how, step, 0.6 + 0.01 * step) for seed in range(3) for how in every for step in (0, 5, 10)]
    bench.append(path, curves(points))
    root = xml.fromstring(bench.plot(path))
    lines = [element for element in root if element.tag.endswith("polyline")]
    assert ["stroke-dasharray" in line.attrib for line in lines] == [False, False, True]
    places = [tuple(map(float, place.split(","))) for place in lines[0].attrib["points"].split()]
    width, height = float(root.attrib["width"]), float(root.attrib["height"])
    assert len(places) == 3
    assert all(0 < x < width and 0 < y < height for x, y in places)
    assert places[0][1] > places[-1][1]  # a better score is further up
