"""Values from clients: any bytes and any JSON are accepted, or refused by BadInput."""

import struct
from contextlib import suppress
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from titan_rl.ext.tinker import messages
from titan_rl.ext.tinker.messages import BadInput, Packed
from titan_rl.ext.tinker.protobuf import field, fields
from titan_rl.wire.types import Completion

VOCAB, LONGEST = 50, 16


def tensor(values: np.ndarray, dtype: int) -> bytes:
    return field(1, values.tobytes()) + field(3, dtype) + field(4, len(values))


def datum(tokens: list[int], **inputs: list[float]) -> bytes:
    chunks = [field(1, field(1, np.array(part, "<i4").tobytes())) for part in (tokens[:1], tokens[1:])]
    message = b"".join(field(1, chunk) for chunk in chunks)
    for name, values in inputs.items():
        dtype = 2 if name == "target_tokens" else 1
        array = np.array(values, "<i8" if dtype == 2 else "<f4")
        message += field(2, field(1, name) + field(2, tensor(array, dtype)))
    return message


def request(loss: str, *data: bytes, **config: float) -> bytes:
    message = field(1, "model") + field(2, 3) + b"".join(field(3, each) for each in data) + field(4, loss)
    for name, value in config.items():
        message += field(7, field(1, name) + field(2, field(1, float(value))))
    return message


GOOD = request("ppo", datum([1, 2, 3], target_tokens=[2, 3, 4], logprobs=[0, -1, -2], advantages=[0, 1, 1]))
JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats(allow_nan=False) | st.text(max_size=5),
    lambda values: st.lists(values, max_size=4) | st.dictionaries(st.text(max_size=3), values, max_size=3),
    max_leaves=8,
)


def test_a_request_is_read() -> None:
    assert messages.address(GOOD) == ("model", 3)
    call = messages.forward_backward(GOOD, VOCAB, LONGEST)
    (only,) = call.data
    assert call.backward
    assert (only.tokens.tolist(), only.targets.tolist()) == ([1, 2, 3], [2, 3, 4])
    assert (only.behaviour.tolist(), only.advantage.tolist()) == ([0, -1, -2], [0, 1, 1])
    loss = messages.forward_backward(GOOD + request("ppo", clip_low_threshold=0.7), VOCAB, LONGEST).loss
    assert (loss.low, loss.high) == (pytest.approx(0.3), 0.2)
    assert not messages.forward_backward(GOOD + field(6, 1), VOCAB, LONGEST).backward


@given(st.data())
def test_a_damaged_request_is_refused_or_read(data: st.DataObject) -> None:
    damaged = bytearray(GOOD)
    for _ in range(data.draw(st.integers(1, 4))):
        damaged[data.draw(st.integers(0, len(damaged) - 1))] = data.draw(st.integers(0, 255))
    with suppress(BadInput):
        messages.address(bytes(damaged))
    with suppress(BadInput):
        messages.forward_backward(bytes(damaged), VOCAB, LONGEST)


@given(JSON, st.sampled_from(["temperature", "top_p", "top_k", "max_tokens", "seed", "stop", "learning_rate", "eps"]))
def test_any_json_is_refused_or_read(value: Any, name: str) -> None:
    for body in ({"sampling_params": value}, {"sampling_params": {name: value}}, {"prompt_logprobs": value}):
        with suppress(BadInput):
            sampling, _, _ = messages.sampling_of(body, 8, [2], lambda text: [*text.encode()])
            assert 1 <= sampling.max_new_tokens <= 8
    for body in ({"adam_params": value}, {"adam_params": {name: value}}):
        with suppress(BadInput):
            assert messages.adam_step(body).eps > 0
    for prompt in (value, {"chunks": value}, {"chunks": [value]}, {"chunks": [{"tokens": value}]}):
        with suppress(BadInput):
            assert 0 < len(messages.prompt_of({"prompt": prompt}, VOCAB, LONGEST)) < LONGEST


@pytest.mark.parametrize(
    ("message", "expected"),
    [
        (request("ppo"), "data: expected at least one datum"),
        (request("ppo", b"", clip_low_threshold=1.5), "clip_low_threshold: expected a number from 0 to 1, found 1.5"),
        (request("ppo", b"", beta=1.5), "loss_fn_config: expected clip_low_threshold or clip_high_threshold for ppo"),
        (request("cross_entropy", b"", clip_low_threshold=0.5), "loss_fn_config: expected no key for cross_entropy"),
        (request("cross_entropy", field(1, field(2, b"png"))), "expected tokens only, found an image or sound"),
        (request("cross_entropy", datum([1], target_tokens=[1], advantages=[1])), "expected one of target_tokens, "),
    ],
)
def test_refusals(message: bytes, expected: str) -> None:
    with pytest.raises(BadInput, match=expected):
        messages.forward_backward(message, VOCAB, LONGEST)


@pytest.mark.parametrize("shards", [1, 2])
def test_targets_may_be_other_tokens_than_the_input(shards: int) -> None:
    """As in the cookbook's loop, where targets of a prompt are 0. Each place predicts its own target. Log-probs come
    back in the order of the data."""
    rng = np.random.default_rng(0)
    data = []
    for length in (3, 1, 9, 5):
        tokens, targets = rng.integers(0, VOCAB, (2, length)).tolist()
        weights = rng.standard_normal(length).tolist()
        data.append(datum(tokens, target_tokens=targets, weights=weights))
    call = messages.forward_backward(request("cross_entropy", *data), VOCAB, LONGEST)
    packed = Packed.of(call.data, shards, LONGEST, 2, 0)
    read = 0
    for batch in packed.batches:
        for rows in batch.microbatches:
            for row, column in np.argwhere(rows.sequences >= 0):
                number = rows.samples[rows.sequences[row, column]]
                at = rows.positions.reshape(-1)[rows.places[row, column]]
                own = call.data[number]
                assert rows.tokens.reshape(-1)[rows.places[row, column]] == own.tokens[at]
                assert rows.targets[row, column] == own.targets[at]
                assert rows.weights[row, column] == own.weights[at]
                read += 1
            assert not rows.weights[rows.sequences < 0].any()
    assert read == 18
    answers = [[rows.targets.astype(np.float32) for rows in batch.microbatches] for batch in packed.batches]
    for found, own in zip(packed.logprobs(answers), call.data, strict=True):
        assert found.tolist() == own.targets.tolist()


def test_answers_have_the_librarys_layout() -> None:
    call = messages.forward_backward(request("cross_entropy", datum([1, 2], target_tokens=[2, 3])), VOCAB, LONGEST)
    answer = messages.forward_backward_output([np.array([-1, -2], np.float32)], call.data, call.loss, 3.0)
    found = fields(answer)
    assert struct.unpack("<d", fields(found[3][0])[2][0])[0] == 3
    record = fields(found[2][0])
    arrays = {fields(entry)[1][0]: fields(fields(entry)[2][0])[1][0] for entry in record[2]}
    assert {name: np.frombuffer(data, "<f4").tolist() for name, data in arrays.items()} == {
        b"logprobs": [-1, -2],
        b"elementwise_loss": [1, 2],
    }


def test_a_stop_text_may_span_tokens() -> None:
    completion = Completion([1, 2, 3, 4], [-1.0] * 4, [0] * 4, "length")
    decode = "abcde".__getitem__
    ended = messages.ended_by_text(completion, ["cd"], lambda ids: "".join(map(decode, ids)))
    assert (ended.tokens, ended.finish, len(ended.logprobs)) == ([1, 2, 3], "stop", 3)
    assert messages.ended_by_text(completion, ["ea"], lambda ids: "".join(map(decode, ids))) is completion
