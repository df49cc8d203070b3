import pickle
from dataclasses import replace

from titan_rl.wire.types import Completion, Sample


def test_a_completion_crosses_processes_unchanged() -> None:
    sent = Completion([5, 2], [-0.1, float("-inf")], [3, 4], "length", replica="generator1")
    arrived = pickle.loads(pickle.dumps(sent, protocol=5))
    assert arrived == sent
    assert type(arrived) is Completion


def test_a_sample_with_more_columns_keeps_everything_else() -> None:
    sample = Sample([5, 2], [0, 1], {"behaviour": [0.0, -0.1]}, prompt=1, sequence=7)
    found = sample.with_columns(advantage=[0.0, 0.5])
    assert found.columns == {"behaviour": [0.0, -0.1], "advantage": [0.0, 0.5]}
    assert replace(found, columns=sample.columns) == sample
