"""What the engine records of vLLM's truncated sampling."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from titan_rl.actors.vllm import kept_tokens
from titan_rl.actors.vllm.kept_tokens import kept_sets
from titan_rl.wire.kept_sets import KeptSets, size_of


@given(st.integers(0, 2**32), st.integers(1, 20), st.sampled_from([5, 40, 300]))
def test_sets_are_the_finite_entries_of_each_row(seed: int, rows: int, vocabulary: int) -> None:
    rng = np.random.default_rng(seed)
    kept = rng.random((rows, vocabulary)) < rng.choice([0.01, 0.3, 1.0], (rows, 1))
    kept[np.arange(rows), rng.integers(vocabulary, size=rows)] = True
    logprobs = torch.from_numpy(np.where(kept, rng.standard_normal(kept.shape), -np.inf))
    sets = kept_sets(logprobs)
    counts, ids = KeptSets.of(sets).ids()
    for row, found in enumerate(np.split(ids, counts.cumsum()[:-1])):
        whole = kept[row].all()
        assert found.tolist() == ([] if whole else np.flatnonzero(kept[row]).tolist())
        assert size_of(sets[row]) == (0 if whole else kept[row].sum())
        assert len(sets[row]) <= 4 * (1 + -(-vocabulary // 32))


def test_a_row_that_is_not_a_number_has_no_set() -> None:
    assert kept_sets(torch.tensor([[float("nan")] * 3, [0.0, -float("inf"), 1.0]])) == [b"", b"\0\0\0\0\2\0\0\0"]


def test_both_of_vllms_samplers_are_recorded_once(monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.v1.sample.sampler import Sampler
    from vllm.v1.worker.gpu.sample.sampler import Sampler as SamplerV2

    answers = (torch.tensor([1]), torch.tensor([[-float("inf"), 0.0, -1.0]]))
    for kind in (Sampler, SamplerV2):
        monkeypatch.setattr(kind, "sample", lambda self, logits: answers if len(logits) else (answers[0], None))
    kept_tokens.record_kept_tokens(on_cpu=False)
    kept_tokens.record_kept_tokens(on_cpu=False)
    for kind in (Sampler, SamplerV2):
        sample: Any = kind.sample
        assert sample(SimpleNamespace(), [0.5])[0] is answers[0]
        assert kept_tokens.last_kept() == [b"\1\0\0\0\2\0\0\0"]
        sample(SimpleNamespace(), [])
        assert kept_tokens.last_kept() == []
