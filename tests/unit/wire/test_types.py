import pickle

from titan_rl.wire.types import Completion


def test_a_completion_crosses_processes_unchanged() -> None:
    sent = Completion([5, 2], [-0.1, float("-inf")], [3, 4], "length", replica="generator1")
    arrived = pickle.loads(pickle.dumps(sent, protocol=5))
    assert arrived == sent
    assert type(arrived) is Completion
