"""The simulated ranks of bench_scale.py have the endpoints of the real ones, and its engine keeps their promises."""

import inspect
import xml.etree.ElementTree as xml
from typing import Any

import pytest
from monarch._src.actor.endpoint import EndpointProperty
from monarch.actor import Actor

from bench.scale_growth import WAYS, exponent, plot, points_of, rows_of
from bench.simulated_engine import SimulatedEngine, length_of
from bench.simulated_ranks import SimulatedGenerator, SimulatedTrainer
from titan_rl.actors.model_rank import ModelRank
from titan_rl.actors.vllm.generator import Generator
from titan_rl.wire.types import Request, Sampling

PACE = 0.5  # so that times are exact


def endpoints(actor: type[Actor]) -> dict[str, inspect.Signature]:
    found = {name: each for name, each in vars(actor).items() if isinstance(each, EndpointProperty)}
    return {name: inspect.signature(each._method) for name, each in found.items()}


@pytest.mark.parametrize(("real", "simulated"), [(Generator, SimulatedGenerator), (ModelRank, SimulatedTrainer)])
def test_simulated_ranks_have_the_endpoints_of_the_real_ones(real: type[Actor], simulated: type[Actor]) -> None:
    expected: Any = endpoints(real)
    assert len(expected) > 10
    assert endpoints(simulated) == expected
    interleaved = [{name: vars(a)[name]._explicit_response_port for name in expected} for a in (real, simulated)]
    assert interleaved[0] == interleaved[1], "Monarch's concurrent endpoints have one, others do not"


def asked(id: str, *seeds: int, most: int = 16) -> Request:
    return Request(id, [1, 2], list(seeds), Sampling(most))


def test_a_simulated_request_ends_with_its_longest_sample_and_not_before_there_are_weights() -> None:
    engine = SimulatedEngine(100, PACE)
    engine.add([asked("a", 1, 2), asked("b", 3)], 0.0)
    assert engine.end() is None
    assert engine.step(50.0) == []
    engine.set_version(0, 100.0)
    ends = [100 + PACE * max(length_of(seed, 16) for seed in seeds) for seeds in ((1, 2), (3,))]
    assert engine.end() == min(ends)
    done = engine.step(100.0 + 16 * PACE)
    assert sorted(each.id for each in done) == ["a", "b"]
    for each in done:
        assert all(c.finish == "length" and set(c.versions) == {0} for c in each.completions)
        assert [len(c.tokens) for c in each.completions] == [len(c.logprobs) for c in each.completions]
    assert engine.end() is None


def test_what_a_simulated_engine_gives_back_another_finishes_with_the_same_tokens() -> None:
    whole, first, second = (SimulatedEngine(100, PACE) for _ in range(3))
    for engine in (whole, first, second):
        engine.set_version(0, 0.0)
    for engine in (whole, first):
        engine.add([asked("a", 1, 2, most=64)], 0.0)
    (done,) = whole.step(64 * PACE)
    first.set_version(1, 6 * PACE)
    (withdrawn,) = first.withdraw(["a", "b"], 8 * PACE)
    assert [(c.finish, c.versions) for c in withdrawn.completions] == [("abort", [0] * 6 + [1] * 2)] * 2
    second.add([Request("a~1", [1, 2], [1, 2], Sampling(64), withdrawn.completions)], 8 * PACE)
    (moved,) = second.step(80 * PACE)
    assert [c.tokens for c in moved.completions] == [c.tokens for c in done.completions]
    assert not first.busy


def test_costs_grow_by_their_exponents() -> None:
    assert exponent({n: 3 * n for n in (8, 32, 128)}) == pytest.approx(1)
    assert exponent({n: 0.1 * n * n for n in (8, 32, 128)}) == pytest.approx(2)
    rows = [
        row
        for way in WAYS
        for n in (8, 32)
        for row in rows_of("now", way, n, {"a step: CPU s": [n / 100, n / 50], "a step: wall s": [n / 10]})
    ]
    assert points_of(rows, "now", "lag 1", "a step: CPU s") == {8: 0.12, 32: 0.48}
    assert points_of(rows, "then", "lag 1", "a step: CPU s") == {}
    assert plot(rows, "then") == ""
    drawn = plot(rows, "now")
    assert xml.fromstring(drawn).tag.endswith("svg")
    assert drawn.count("N^1.00") == 2 * len(WAYS)
