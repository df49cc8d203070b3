"""Records the experts that a mixture of experts sent each token to.

On a CPU each router reports its choice, and the rows of a step are cut by request. A step has rows for the tokens that
it computes. It has none for cached tokens, and has them again when a preemption or a weight update dropped their keys
and values. On a GPU vLLM's model runner V2 returns all rows of a sample when it ends (`enable_return_routed_experts`),
also for cached tokens. Of a token that is read again it keeps the first row.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from titan_rl.actors.vllm.engine import ColumnRecorder, OpenRequest
from titan_rl.ext.routing_replay.routes import Routes, id_type, known, unknown_rows

if TYPE_CHECKING:
    from torch import Tensor
    from vllm import CompletionOutput

Recorded = list[tuple[int, np.ndarray]]
"""Rows of consecutive tokens, [N, layers, K], and the number of the first one in its sequence. Later entries count."""


def engine_args(*, on_cpu: bool) -> dict[str, Any]:
    return {} if on_cpu else {"enable_return_routed_experts": True}


class RouteRecorder(ColumnRecorder):
    """Records the routes of the tokens that samples read."""

    def __init__(self, *, on_cpu: bool) -> None:
        self.args, self._on_cpu = engine_args(on_cpu=on_cpu), on_cpu
        self._recorded: dict[str, Recorded] = {}  # by the id of a sample in vLLM; on a GPU none

    def begin(self, llm: Any) -> None:
        model = llm.vllm_config.model_config
        self._type = id_type(model.get_num_experts())
        self._dense = getattr(model.hf_config, "first_k_dense_replace", 0)  # first layers, which have no experts
        if self._on_cpu:
            self._record(llm.model_executor.driver_worker.worker.model_runner)

    def left(self, id: str, open: OpenRequest, index: int, last: "CompletionOutput | None" = None) -> None:
        """Record the tokens that a sample has read so far; on a GPU vLLM returns them with its `last` output."""
        sample, recorded = open.samples[index], self.take(id, None if last is None else last.routed_experts)
        if not recorded or not sample.tokens:
            return
        read, before = len(open.request.tokens) + len(sample.tokens) - 1, sample.extras.get("routes")
        cached = before.cached if before else open.prefills[index].cached
        sample.extras["routes"] = routes_of(read, recorded, before, cached=cached, sample=f"sample {id}")

    def dropped(self, id: str) -> None:
        self._recorded.pop(id, None)

    def take(self, id: str, returned: np.ndarray | None = None) -> Recorded:
        """Return the recorded rows of a sample; on a GPU all rows, which vLLM has `returned` at its end."""
        if returned is not None:
            return [(0, returned[:, self._dense :].astype(self._type))]  # vLLM's 255 may be an expert
        return self._recorded.pop(id, [])

    def _record(self, runner: Any) -> None:
        import torch
        from vllm.model_executor.layers.fused_moe.runner.moe_runner import MoERunner

        layers = [module for module in runner.model.modules() if isinstance(module, MoERunner)]
        step = dict[int, "Tensor"]()
        for number, layer in enumerate(layers):
            layer.router.set_capture_fn(lambda ids, number=number: step.__setitem__(number, ids.clone()))
        execute = runner.execute_model

        def execute_and_record(scheduled: Any, *arguments: Any, **named: Any) -> Any:
            step.clear()
            result = execute(scheduled, *arguments, **named)
            if scheduled.total_num_scheduled_tokens:
                rows = torch.stack([step[number] for number in range(len(layers))], 1).numpy().astype(self._type)
                for id, first, own in cut(rows, scheduled, runner.input_batch.req_ids):
                    sample = id.partition("-")[0]  # vLLM adds a suffix to the id of a request
                    self._recorded.setdefault(sample, []).append((first, own))
            return result

        runner.execute_model = execute_and_record


def cut(rows: np.ndarray, scheduled: Any, order: Sequence[str]) -> list[tuple[str, int, np.ndarray]]:
    """Return the rows of each request of a step, and the number of its first token in this step.

    `scheduled` is vLLM's SchedulerOutput; the rows of the requests are in `order`."""
    counts, cached = scheduled.num_scheduled_tokens, scheduled.scheduled_cached_reqs
    first = dict(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
    first |= {new.req_id: new.num_computed_tokens for new in scheduled.scheduled_new_reqs}
    if sorted(order) != sorted(counts) or len(rows) != sum(counts.values()):
        expected = f"{sum(counts.values())} tokens of requests {', '.join(sorted(counts))}"
        raise RuntimeError(f"expected the experts of {expected}, found {len(rows)} of {', '.join(order)}")
    ends = np.cumsum([counts[id] for id in order])
    return [(id, first[id], own) for id, own in zip(order, np.split(rows, ends[:-1]), strict=True)]


def routes_of(read: int, recorded: Recorded, before: Routes | None, *, cached: int, sample: str) -> Routes:
    """Return the routes of the `read` tokens of a sample, `recorded` here or `before` by another engine.

    Raise RuntimeError if there are more rows, or if one is missing after the first `cached` tokens."""
    rows = unknown_rows(read, recorded[0][1])
    parts = [*([(before.cached, before.ids)] if before else []), *recorded]
    for first, ids in parts:
        if first + len(ids) > read:
            raise RuntimeError(f"{sample}: expected the experts of {read} tokens, found a row of token {read}")
        rows[first : first + len(ids)] = ids
    there = known(rows)
    begin = int(there.argmax()) if there.any() else read
    if begin > cached or not there[begin:].all():
        missing = cached if begin > cached else begin + int(there[begin:].argmin())
        raise RuntimeError(f"{sample}: expected the experts of tokens {cached} to {read - 1}, found none of {missing}")
    return Routes(begin, rows[begin:])
