"""scripts/bench_async.py: what its figures depend on. The measuring itself is run by hand."""

import asyncio
import xml.etree.ElementTree as xml
from collections.abc import Sequence

from bench.async_learning import CORRECTED, UNCORRECTED, missing, plot
from bench.long_tailed import drawn_length, generate_long_tailed
from titan_rl.wire.types import Completion, Request, Sampling


def curves(points: Sequence[tuple[int, int, str, int, float]]) -> list[dict[str, str]]:
    keys = ("seed", "lag", "correction", "step", "score")
    rows = [dict(zip(keys, point, strict=True)) | {"samples": 256 * point[3]} for point in points]
    return [{key: str(value) for key, value in row.items()} for row in rows]


def test_a_group_of_drawn_lengths_comes_back_whole_and_in_order() -> None:
    class Engine:
        """Answers the last sample first, with as many tokens as allowed; each token is the sample's seed."""

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
    samples = asyncio.run(generate_long_tailed(engine.generate, request))
    assert [sample.tokens[0] for sample in samples] == request.seeds
    lengths = [len(sample.tokens) for sample in samples]
    assert lengths == [drawn_length("prompt-3", k, 160) for k in range(4)]
    assert len(set(lengths)) > 1
    assert len(engine.ids) == 4


def test_lengths_are_the_same_in_every_run_and_have_a_long_tail() -> None:
    lengths = sorted(drawn_length(f"prompt-{i}", k, 160) for i in range(100) for k in range(8))
    assert lengths == sorted(drawn_length(f"prompt-{i}", k, 160) for i in range(100) for k in range(8))
    assert 1 <= lengths[0] <= lengths[-1] <= 160
    assert 30 <= lengths[400] <= 45
    assert lengths[760] > 2.5 * lengths[400]


def test_only_curves_that_lack_steps_are_run_again() -> None:
    whole, cut_short = (0, 0, "none", 10, 0.9), (0, 1, "none", 5, 0.8)
    lagging = {"rollout.lag": 1, "rollout.pace": "false"}
    assert missing(curves([whole, cut_short]), seeds=1, steps=10, lags=[0, 1]) == {
        (0, 1, "corrected"): lagging | CORRECTED,
        (0, 1, "none"): lagging | UNCORRECTED,
    }
    assert len(missing([], seeds=3, steps=60, lags=[0, 1, 2, 4])) == 21


def test_the_plot_has_a_line_a_curve_and_dashes_what_is_uncorrected() -> None:
    every = [(0, "none"), (2, "corrected"), (2, "none")]
    points = [(seed, *how, step, 0.6 + 0.01 * step) for seed in range(3) for how in every for step in (0, 5, 10)]
    root = xml.fromstring(plot(curves(points)))
    lines = [element for element in root if element.tag.endswith("polyline")]
    assert ["stroke-dasharray" in line.attrib for line in lines] == [False, False, True]
    places = [tuple(map(float, place.split(","))) for place in lines[0].attrib["points"].split()]
    width, height = float(root.attrib["width"]), float(root.attrib["height"])
    assert len(places) == 3
    assert all(0 < x < width and 0 < y < height for x, y in places)
    assert places[0][1] > places[-1][1]  # a better score is further up
