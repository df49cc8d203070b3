import pickle
from dataclasses import replace

import pytest

from titan_rl.wire.types import Completion, Request, Sample, Sampling


def test_a_completion_crosses_processes_unchanged() -> None:
    sent = Completion([5, 2], [-0.1, float("-inf")], [3, 4], "length", replica="generator1")
    arrived = pickle.loads(pickle.dumps(sent, protocol=5))
    assert arrived == sent
    assert type(arrived) is Completion


@pytest.mark.parametrize("versions", [[3] * 100, [3] * 60 + [4] * 40])
def test_a_long_completion_crosses_processes_unchanged(versions: list[int]) -> None:
    logprobs = [-k / 7 for k in range(98)] + [float("-inf"), -0.0]
    sent = Completion(list(range(2**40, 2**40 + 100)), logprobs, versions, "stop")
    arrived = pickle.loads(pickle.dumps(sent, protocol=5))
    assert arrived == sent
    assert [type(part) for part in (arrived.tokens[0], arrived.logprobs[0], arrived.versions[0])] == [int, float, int]
    assert str(arrived.logprobs[-1]) == "-0.0"


def test_a_request_crosses_processes_unchanged() -> None:
    begun = [Completion([5], [-0.5], [1], "abort")]
    sent = Request("a", [1, 2], [7], Sampling(9, 0.5, 0.9, (3,)), begun, expected=4, affinity=("b",))
    assert pickle.loads(pickle.dumps(sent, protocol=5)) == sent


def test_a_sample_with_more_columns_keeps_everything_else() -> None:
    sample = Sample([5, 2], [0, 1], {"behaviour": [0.0, -0.1]}, prompt=1, sequence=7)
    found = sample.with_columns(advantage=[0.0, 0.5])
    assert found.columns == {"behaviour": [0.0, -0.1], "advantage": [0.0, 0.5]}
    assert replace(found, columns=sample.columns) == sample
