"""Records which tokens truncated sampling kept: a kept set for each token that a step samples, by the sample's id.

On a CPU the logits processor below truncates in vLLM's place, by vLLM's own function: it sees which request has which
row of a batch. vLLM's model runner V2, which GPUs use, calls its processors before the temperature, so its sampler is
wrapped instead. `return_sampling_mask` is no way out: it refuses requests without a top_k, as evaluations are.
"""

from functools import wraps
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from titan_rl.actors.vllm.engine import ColumnRecorder
from titan_rl.ext.kept_sets.kept_sets import WORD, packed
from titan_rl.wire.types import Completion, Sampling

if TYPE_CHECKING:
    from torch import Tensor

last_kept: dict[str, bytes] = {}
"""Kept sets that the engine has not taken yet. A sample without one was not truncated."""


class Truncation(NamedTuple):
    """What a request asks of the processor, in the extra_args of its sampling parameters."""

    sample: str
    top_k: int  # 0: all
    top_p: float


class KeptTokens(ColumnRecorder):
    """Records the kept set of each sampled token. Make one per process, before its engine."""

    def __init__(self, *, on_cpu: bool) -> None:
        self.args, self._truncates = engine_args(on_cpu=on_cpu), on_cpu

    def request_args(self, id: str, sampling: Sampling) -> dict[str, Any]:
        """On a CPU the processor truncates the sample, and vLLM does not."""
        if not self._truncates:
            return {}
        truncation = Truncation(id, sampling.top_k, sampling.top_p)
        return {"top_p": 1.0, "top_k": 0, "extra_args": truncation._asdict()}

    def sampled(self, id: str, sample: Completion) -> None:
        sample.extras.setdefault("kept", []).append(last_kept.pop(id, b""))


def engine_args(*, on_cpu: bool) -> dict[str, Any]:
    """Return the arguments of an engine that records kept sets. Call this once per process, before it is built."""
    if not on_cpu:
        _wrap_gpu_sampler()
        return {}
    from vllm.v1.sample.logits_processor import LogitsProcessor

    class Truncate(_Truncate, LogitsProcessor):
        pass

    return {"logits_processors": [Truncate]}


class _Truncate:
    """Truncates each row of a batch as its request asks, after its temperature."""

    def __init__(self, vllm_config: Any, device: Any, is_pin_memory: bool) -> None:
        self._rows: dict[int, Truncation] = {}
        self._vocab_size = vllm_config.model_config.get_vocab_size()

    def is_argmax_invariant(self) -> bool:
        return True  # so it is called after the temperature, and not where all samples are greedy

    def update_state(self, batch_update: Any) -> None:
        if batch_update is None:
            return
        rows = self._rows
        for row in batch_update.removed:
            rows.pop(row, None)
        for row, params, _, _ in batch_update.added:
            truncation = params.extra_args
            greedy = params.temperature == 0
            rows[row] = Truncation(
                truncation["sample"], 0 if greedy else truncation["top_k"], 1.0 if greedy else truncation["top_p"]
            )
        for a, b, direction in batch_update.moved:
            from_a, from_b = rows.pop(a, None), rows.pop(b, None)
            if from_a is not None:
                rows[b] = from_a
            if from_b is not None and direction.name == "SWAP":
                rows[a] = from_b

    def apply(self, logits: "Tensor") -> "Tensor":  # [R, V]
        import torch
        from vllm.v1.sample.ops.topk_topp_sampler import apply_top_k_top_p

        rows = [self._rows[row] for row in range(len(logits))]
        k = p = None
        if any(row.top_k for row in rows):
            k = torch.tensor([min(row.top_k, self._vocab_size) or self._vocab_size for row in rows])
        if any(row.top_p < 1 for row in rows):
            p = torch.tensor([row.top_p for row in rows])
        logits = apply_top_k_top_p(logits, k, p)
        last_kept.update(zip((row.sample for row in rows), kept_sets(logits), strict=True))
        return logits


def _wrap_gpu_sampler() -> None:
    """Make the sampler of model runner V2 record the distribution that it samples from."""
    from vllm.v1.worker.gpu.sample.sampler import Sampler

    sampler: Any = Sampler
    if hasattr(sampler.sample, "__wrapped__"):  # an earlier engine of this process has done it
        return
    sample, call, distributions = sampler.sample, sampler.__call__, list[Any]()

    @wraps(sample)
    def sample_and_keep(*arguments: Any, **named: Any) -> Any:
        tokens, distribution = sample(*arguments, **named)
        distributions.append(distribution)
        return tokens, distribution

    @wraps(call)
    def call_and_record(self: Any, logits: Any, input_batch: Any) -> Any:
        distributions.clear()
        output = call(self, logits, input_batch)
        for distribution in distributions:
            ids = (id.rpartition("-")[0] for id in input_batch.req_ids)  # vLLM adds a suffix to the id of a request
            last_kept.update(zip(ids, kept_sets(distribution), strict=False))
        return output

    sampler.sample, sampler.__call__ = sample_and_keep, call_and_record


def kept_sets(distribution_RV: "Tensor") -> list[bytes]:
    """Return each row's kept set: the tokens whose logit, or log-prob, is finite."""
    kept_RV = distribution_RV > -float("inf")
    counts = kept_RV.sum(1).cpu().numpy()
    vocabulary = kept_RV.shape[1]
    sets = [b""] * len(counts)  # nothing dropped, or not a number
    if not len(cut := np.flatnonzero((counts > 0) & (counts < vocabulary))):
        return sets
    few = cut[counts[cut] <= vocabulary // 32]
    for row in np.setdiff1d(cut, few):
        sets[row] = packed(kept_RV[int(row)].cpu().numpy())
    ids = kept_RV[few.tolist()].nonzero()[:, 1].cpu().numpy().astype(WORD).tobytes()  # row by row, ascending
    end = 0
    for row in few:
        begin, end = end, end + WORD.itemsize * int(counts[row])
        sets[row] = ids[begin:end]
    return sets
