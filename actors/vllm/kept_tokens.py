"""Records which tokens vLLM's truncated sampling kept, step by step: a kept set for each row that was sampled.

vLLM has the sets as the finite values of the distribution that it samples from. It returns them itself
(`return_sampling_mask`) from model runner V2 only, and only if every request has a top_k and a temperature, which an
evaluation's have not.
"""

from typing import TYPE_CHECKING, Any

import numpy as np

from titan_rl.wire.kept_sets import WORD, packed

if TYPE_CHECKING:
    from torch import Tensor

_last: list[bytes] = []


def record_kept_tokens(*, on_cpu: bool) -> None:
    """Record what every later step keeps, in this process. Call this before the engine is built."""
    from vllm.v1.sample.sampler import Sampler

    kinds: list[Any] = [Sampler]
    if not on_cpu:  # a CPU has no model runner V2, whose sampler imports torch's compiler
        from vllm.v1.worker.gpu.sample.sampler import Sampler as SamplerV2

        kinds.append(SamplerV2)
    for kind in kinds:
        if kind.sample.__name__ != "recorded":  # an earlier engine of this process has done it
            kind.sample = _recording(kind.sample)


def last_kept() -> list[bytes]:
    """Return the sets of the rows of the last step; nothing if they are not recorded."""
    return _last


def _recording(sample: Any) -> Any:
    def recorded(*arguments: Any, **named: Any) -> Any:
        tokens, distribution = sample(*arguments, **named)
        _last[:] = [] if distribution is None else kept_sets(distribution)
        return tokens, distribution

    return recorded


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
