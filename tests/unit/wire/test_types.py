import pickle
from dataclasses import replace
from typing import Any

import numpy as np

from titan_rl.wire.manifest import Manifest, PickledOnce, Publication
from titan_rl.wire.types import Group, Prompt, Rollout, Sample


def test_a_sample_with_more_columns_keeps_everything_else() -> None:
    routes = np.zeros((2, 1, 1), np.uint8)
    sample = Sample([5, 2], [0, 1], {"behaviour": [0.0, -0.1]}, prompt=1, sequence=7, extras={"routes": routes})
    found = sample.with_columns(advantage=[0.0, 0.5])
    assert found.columns == {"behaviour": [0.0, -0.1], "advantage": [0.0, 0.5]}
    assert replace(found, columns=sample.columns) == sample


def test_a_group_of_a_chat_shows_its_question() -> None:
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "1 < 2?"}]
    prompt = Prompt(3, "<|system|>Be brief.<|user|>1 < 2?", [1], "yes", messages=messages)
    group = Group(prompt, [Rollout([], "<b>yes", 0.0)]).with_rewards([1.0])
    assert str(group) == "prompt 3: 1 < 2?\n    1.000  <b>yes"
    assert ">1 &lt; 2?</th>" in group._repr_html_()
    assert ">&lt;b&gt;yes</td>" in group._repr_html_()
    assert replace(prompt, messages=()).question == prompt.text


def test_a_list_is_pickled_once_and_arrives_plain() -> None:
    pickled: list[int] = []

    class Noted:
        def __reduce__(self) -> tuple[Any, ...]:
            pickled.append(1)
            return str, ("noted",)

    shared = PickledOnce([Noted(), Noted()])
    for _ in range(5):
        arrived = pickle.loads(pickle.dumps(("connect", shared)))[1]
        assert type(arrived) is list
        assert arrived == ["noted", "noted"]
    assert len(pickled) == 2


def test_a_readers_manifests_are_in_the_order_of_the_trainer_ranks() -> None:
    packed = [{reader: Manifest.of(3, 1, 0, rank, ()) for reader in range(2)} for rank in range(4)]
    assert Publication(3, 0, packed, 0.0).of(1) == [runs[1] for runs in packed]
