"""What the engine records of vLLM's truncated sampling."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from titan_rl.actors.vllm.vllm_args import sampling_params
from titan_rl.ext.kept_sets.kept_sets import KeptSets, size_of
from titan_rl.ext.kept_sets.ranks import kept_tokens
from titan_rl.ext.kept_sets.ranks.kept_tokens import KeptTokens, kept_sets
from titan_rl.wire.types import Sampling


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


def test_the_gpu_sampler_records_by_the_ids_of_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its signature is vLLM's; that it is called on a GPU this way no test here can show."""
    from vllm.v1.worker.gpu.sample.sampler import Sampler

    logits = torch.tensor([[-float("inf"), 0.0, -1.0], [0.0, 0.0, 0.0]])
    monkeypatch.setattr(Sampler, "sample", lambda self, logits: (torch.tensor([1, 0]), logits))
    monkeypatch.setattr(Sampler, "__call__", lambda self, logits, input_batch: self.sample(logits)[0])
    assert kept_tokens.engine_args(on_cpu=False) == kept_tokens.engine_args(on_cpu=False) == {}
    batch: Any = SimpleNamespace(req_ids=["7-9a8b7c6d", "11-0a1b2c3d"])
    Sampler.__call__(Sampler.__new__(Sampler), logits, batch)
    assert kept_tokens.last_kept == {"7": b"\1\0\0\0\2\0\0\0", "11": b""}


def test_a_row_is_truncated_as_its_request_asks_wherever_the_batch_moves_it() -> None:
    from vllm import SamplingParams
    from vllm.v1.sample.logits_processor import BatchUpdate, MoveDirectionality

    def asked(sample: str, top_k: int, temperature: float = 1.0) -> SamplingParams:
        truncation = kept_tokens.Truncation(sample, top_k, 1.0)
        return SamplingParams(temperature=temperature, extra_args=truncation._asdict())

    (kind,) = kept_tokens.engine_args(on_cpu=True)["logits_processors"]
    sizes = SimpleNamespace(get_vocab_size=lambda: 4)
    processor = kind(SimpleNamespace(model_config=sizes), torch.device("cpu"), False)

    def kept(rows: int) -> dict[str, int]:
        kept_tokens.last_kept.clear()
        processor.apply(torch.arange(4.0 * rows).view(rows, 4))
        return {sample: size_of(found) for sample, found in kept_tokens.last_kept.items()}

    added = [(0, asked("a", 1), None, []), (1, asked("b", 2), None, []), (2, asked("greedy", 2, 0.0), None, [])]
    processor.update_state(BatchUpdate(3, removed=[], added=added, moved=[]))
    assert kept(3) == {"a": 1, "b": 2, "greedy": 0}
    moved = [(1, 2, MoveDirectionality.SWAP), (2, 0, MoveDirectionality.UNIDIRECTIONAL)]
    processor.update_state(BatchUpdate(2, removed=[0], added=[], moved=moved))
    assert kept(2) == {"b": 2, "greedy": 0}
    processor.update_state(None)
    assert kept(2) == {"b": 2, "greedy": 0}


def test_a_sample_that_the_processor_truncates_is_whole_for_vllm() -> None:
    sampling = Sampling(8, 0.7, top_p=0.9, top_k=5, min_p=0.1)
    vllms = sampling_params(sampling, 3, begun=0, **KeptTokens(on_cpu=False).request_args("17", sampling))
    ours = sampling_params(sampling, 3, begun=0, **KeptTokens(on_cpu=True).request_args("17", sampling))
    assert (vllms.top_p, vllms.top_k, vllms.min_p, vllms.extra_args) == (0.9, 5, 0.1, None)
    assert (ours.top_p, ours.top_k, ours.min_p) == (1.0, 0, 0.1)
    assert ours.extra_args == {"sample": "17", "top_k": 5, "top_p": 0.9}
