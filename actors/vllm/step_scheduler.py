"""vLLM's scheduler, with less Python per sample and step.

A step in which every running sample gets its next token is planned here; vLLM plans all others: prefills, preemptions,
models whose layers do not all attend to the whole context. What a step sampled is kept as one tuple per sample, for
`take`: vLLM would build an output object per sample, and further ones from it.

It samples what vLLM's scheduler would. vLLM's interface for this is not public, so the version is checked.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

from vllm._version import __version__
from vllm.v1.core.sched.interface import PauseState
from vllm.v1.core.sched.output import CachedRequestData, SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.core.sched.utils import remove_all
from vllm.v1.kv_cache_interface import FullAttentionSpec
from vllm.v1.outputs import LogprobsTensors, ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus

from titan_rl.actors.vllm.kept_tokens import last_kept
from titan_rl.wire.context_scores import ContextScore
from titan_rl.wire.types import Finish

WRITTEN_FOR = "0.32.0"
FINISHES: dict[RequestStatus, Finish] = {
    RequestStatus.FINISHED_STOPPED: "stop",
    RequestStatus.FINISHED_LENGTH_CAPPED: "length",
}


class Prefill(NamedTuple):
    tokens: int  # of a sample's context when it entered the engine
    cached: int  # of these, found in the prefix cache


class Sampled(NamedTuple):
    """What a step did to one sample."""

    id: str
    token: int
    logprob: float
    finish: Finish | None  # once it has ended
    prefill: Prefill | None  # with its first token
    kept: bytes | None = None  # its kept set, if sets are recorded
    context: Sequence[ContextScore] = ()  # of what it read, with its first token, if that is asked for


class StepScheduler(Scheduler):
    def __init__(self, *arguments: Any, **named: Any) -> None:
        if __version__.partition("+")[0] != WRITTEN_FOR:
            raise RuntimeError(f"actors/vllm/step_scheduler.py: expected vLLM {WRITTEN_FOR}, found {__version__}")
        super().__init__(*arguments, **named)
        config = self.vllm_config
        unknown = {
            "speculative_config": config.speculative_config,
            "kv_transfer_config": config.kv_transfer_config,
            "ec_transfer_config": config.ec_transfer_config,
            "lora_config": config.lora_config,
            "async_scheduling": self.scheduler_config.async_scheduling,
            "pipeline_parallel_size": self.use_pp,
            "aux_output_config": self.aux_output_connector,
            "kv_cache_events": self.enable_kv_cache_events,
            "log_stats": self.log_stats,
        }
        if used := [name for name, value in unknown.items() if value]:
            raise RuntimeError(f"expected vLLM without {', '.join(used)}, which step_scheduler.py does not plan for")
        groups = self.kv_cache_config.kv_cache_groups
        whole_context = len(groups) == 1 and isinstance(groups[0].kv_cache_spec, FullAttentionSpec)
        self._plans = whole_context and self.dcp_world_size == 1 and not self.has_mamba_layers
        self._sampled: list[Sampled] = []

    def take(self) -> list[Sampled]:
        """Return what was sampled since the last call."""
        sampled, self._sampled = self._sampled, []
        return sampled

    def schedule(self, throttle_prefills: bool = False) -> SchedulerOutput:
        running, room = self.running, min(self.max_num_scheduled_tokens, self.scheduler_config.max_num_batched_tokens)
        full = len(running) >= self.max_num_active_reqs or not (self.waiting or self.kv_holding_waiting)
        if self._plans and full and 0 < len(running) <= room and self._pause_state == PauseState.UNPAUSED:
            return self._next_tokens(running) or super().schedule(throttle_prefills)
        return super().schedule(throttle_prefills)

    def _next_tokens(self, running: Sequence[Request]) -> SchedulerOutput | None:
        """Plan one token for every running sample. Return nothing, and change nothing, if vLLM must plan this step."""
        ids = [request.request_id for request in running]
        computed = [request.num_computed_tokens for request in running]
        if any(len(request._all_token_ids) != done + 1 for request, done in zip(running, computed, strict=True)):
            return None
        if not self.use_v2_model_runner and not self.prev_step_scheduled_req_ids.issuperset(ids):
            return None
        starts = [i for i, done in enumerate(computed) if done % self.block_size == 0]
        if len(starts) > self.kv_cache_manager.block_pool.get_num_free_blocks():
            return None
        blocks: list[tuple[list[int], ...] | None] = [None] * len(ids)
        ends = [i for i, done in enumerate(computed) if (done + 1) % self.block_size == 0]  # full blocks are cached
        for i in [*starts, *ends]:
            new = self.kv_cache_manager.allocate_slots(running[i], 1)
            assert new is not None
            blocks[i] = blocks[i] or new.get_block_ids(allow_none=True)
        outputs = [len(request._output_token_ids) for request in running]
        for request in running:
            request.num_computed_tokens += 1
        self.current_step += 1
        finished, self.finished_req_ids = self.finished_req_ids, set()
        preempted, self.reset_preempted_req_ids = self.reset_preempted_req_ids, set()
        if not self.use_v2_model_runner:
            self.prev_step_scheduled_req_ids = set(ids)
        return SchedulerOutput(
            scheduled_new_reqs=[],
            scheduled_cached_reqs=CachedRequestData(ids, set(), [], {}, blocks, computed, outputs),
            num_scheduled_tokens=dict.fromkeys(ids, 1),
            total_num_scheduled_tokens=len(ids),
            scheduled_spec_decode_tokens={},
            scheduled_encoder_inputs={},
            finished_req_ids=finished,
            free_encoder_mm_hashes=[],
            preempted_req_ids=preempted,
            new_block_ids_to_zero=self._get_new_block_ids_to_zero(),
        )

    def update_from_output(
        self, scheduler_output: SchedulerOutput, model_runner_output: ModelRunnerOutput
    ) -> dict[int, Any]:
        """Append what was sampled to its samples, and free those that it ends."""
        logprobs = model_runner_output.logprobs
        values = logprobs.logprobs[:, 0].tolist() if logprobs else []  # the sampled token's comes first
        rows = logprobs.cu_num_generated_tokens if logprobs else None
        sets = last_kept()
        index, tokens = model_runner_output.req_id_to_index, model_runner_output.sampled_token_ids
        stopped: set[Request] = set()
        for id in scheduler_output.num_scheduled_tokens:
            request, at = self.requests[id], index[id]
            request.num_in_flight_tokens = 0
            if not tokens[at]:
                continue  # a part of its context
            (token,) = tokens[at]
            request._output_token_ids.append(token)
            request._all_token_ids.append(token)
            if len(request._all_token_ids) % self.hash_block_size == 0:
                request.update_block_hashes()
            finish = prefill = None
            if (stats := request.take_prefill_stats()) is not None:
                prefill = Prefill(stats.num_prompt_tokens, stats.num_cached_tokens)
            if (ended := self._ended(request, token)) is not None:
                request.status, finish = ended, FINISHES[ended]
                self._free_request(request)
                stopped.add(request)
            row = rows[at] if rows else at
            kept = sets[row] if sets else None
            scores = context_scores(model_runner_output.prompt_logprobs_dict.get(id))
            self._sampled.append(Sampled(id, token, values[row], finish, prefill, kept, scores))
        self.running = remove_all(self.running, stopped)
        return {}

    def _ended(self, request: Request, token: int) -> RequestStatus | None:
        """Return why `token` ends its sample. Of vLLM's reasons, vllm_args.sampling_params sets these alone."""
        params = request.sampling_params
        if params and params.stop_token_ids and token in params.stop_token_ids:
            return RequestStatus.FINISHED_STOPPED
        if len(request._output_token_ids) >= request.max_tokens or len(request._all_token_ids) >= self.max_model_len:
            return RequestStatus.FINISHED_LENGTH_CAPPED
        return None


def context_scores(found: LogprobsTensors | None) -> Sequence[ContextScore]:
    """Return vLLM's prompt log-probs: of each token first its own, then that of the most likely one."""
    if found is None:
        return ()
    pairs = zip(found.logprobs.tolist(), found.logprob_token_ids.tolist(), strict=True)
    return [ContextScore(own, best, most) for (own, most), (_, best) in pairs]
