"""vLLM's scheduler, with less Python per sample and step.

A step in which every running sample gets its next token is planned here, and on a CPU also what waiting samples read.
vLLM plans all others: preemptions and what follows them, contexts that a GPU reads in chunks, models whose layers do
not all attend to the whole context. What a step sampled is kept as one tuple per sample, for `take`: vLLM would build
an output object per sample, and further ones from it.

It samples what vLLM's scheduler would. vLLM's interface for this is not public, so the version is checked.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

from vllm._version import __version__
from vllm.v1.core.sched.interface import PauseState
from vllm.v1.core.sched.output import CachedRequestData, NewRequestData, SchedulerOutput
from vllm.v1.core.sched.request_queue import SchedulingPolicy
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.core.sched.utils import remove_all
from vllm.v1.kv_cache_interface import FullAttentionSpec
from vllm.v1.outputs import LogprobsTensors, ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus

from titan_rl.actors.vllm.kept_tokens import last_kept
from titan_rl.wire.context_scores import ContextScore
from titan_rl.wire.types import Finish

WRITTEN_FOR = "0.32.0"


class Prefill(NamedTuple):
    tokens: int  # of a sample's context when it entered the engine
    cached: int  # of these, found in the prefix cache


class Sampled(NamedTuple):
    """What steps did to one sample."""

    id: str
    tokens: list[int]
    logprobs: list[float]
    finish: Finish | None  # once it has ended
    prefill: Prefill | None  # with its first token
    kept: Sequence[bytes] = ()  # its kept sets, if sets are recorded
    context: Sequence[ContextScore] = ()  # of what it read, with its first token, if that is asked for


class Stepped(NamedTuple):
    """What a step did."""

    tokens: int  # sampled: one for each sample in the batch
    read: int  # of contexts that samples read for the first time, then one for each
    samples: list[Sampled]  # those that it is time to report


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
        in_chunks = self.scheduler_config.enable_chunked_prefill or self.scheduler_config.long_prefill_token_threshold
        in_order = self.policy == SchedulingPolicy.FCFS and not self.kv_cache_manager.watermark_blocks
        self._admits = in_order and not in_chunks and not self.use_v2_model_runner
        self._blocks_of = self.kv_cache_manager.coordinator.single_type_managers[0].req_to_blocks
        self._sampled: list[Sampled] = []

    def add_request(self, request: Request) -> None:
        """Let a sample wait, and keep with it what every token of it is compared with."""
        self._remember_ends(request)
        super().add_request(request)

    def go_on(self, request: Request, tokens: list[int], blocks: Sequence[Any]) -> None:
        """Let a sample run that has these tokens already, all but the last of them in these blocks. Without blocks it
        waits, as one that vLLM has preempted."""
        self._remember_ends(request)
        request.append_output_token_ids(tokens)
        request.prefill_stats = None
        id, manager = request.request_id, self.kv_cache_manager.coordinator.single_type_managers[0]
        self.requests[id] = request
        if not blocks:
            request.status, request.num_preemptions = RequestStatus.PREEMPTED, 1
            self.waiting.add_request(request)
            return
        request.status, request.num_computed_tokens = RequestStatus.RUNNING, request.num_tokens - 1
        self.running.append(request)
        self.prev_step_scheduled_req_ids.add(id)
        self._blocks_of[id].extend(blocks)
        manager.num_cached_block[id] = request.num_computed_tokens // self.block_size

    def _remember_ends(self, request: Request) -> None:
        own, all, params = request._output_token_ids, request._all_token_ids, request.sampling_params
        longest = min(len(all) - len(own) + request.max_tokens, self.max_model_len)
        request.ends = own, all, longest, params and params.stop_token_ids  # pyright: ignore[reportAttributeAccessIssue]

    @property
    def plans_plainly(self) -> bool:
        """True if every sample attends to its whole context, and begins by reading all that the cache does not hold."""
        return self._plans and self._admits and self.hash_block_size == self.block_size

    def take(self) -> Stepped:
        """Return what the last step did."""
        sampled, self._sampled = self._sampled, []
        read = sum(one.prefill.tokens - one.prefill.cached - 1 for one in sampled if one.prefill is not None)
        return Stepped(len(sampled), len(sampled) + read, sampled)

    def schedule(self, throttle_prefills: bool = False) -> SchedulerOutput:
        plans = self._plans and self._pause_state == PauseState.UNPAUSED and not self.kv_holding_waiting
        if plans and (planned := self._plan()) is not None:
            return planned
        output = super().schedule(throttle_prefills)
        for id in output.num_scheduled_tokens:
            self.requests[id].num_in_flight_tokens = 0  # a step is over before the next is planned
        return output

    def _plan(self) -> SchedulerOutput | None:
        """Plan one token for every running sample, and the contexts of as many waiting ones as there is room for.
        Return nothing, and change nothing, if vLLM must plan this step."""
        running, waiting = self.running, self.waiting
        room = min(self.max_num_scheduled_tokens, self.scheduler_config.max_num_batched_tokens)
        admits = bool(waiting) and len(running) < self.max_num_active_reqs
        if len(running) > room or not (running or admits):
            return None
        if admits and not (self._admits and waiting.peek_request().status == RequestStatus.WAITING):
            return None
        if (cached := self._next_tokens(running)) is None:
            return None
        counts = dict.fromkeys(cached.req_ids, 1)
        new = self._admit(room - len(running), counts) if admits else []
        self.current_step += 1
        finished, self.finished_req_ids = self.finished_req_ids, set()
        preempted, self.reset_preempted_req_ids = self.reset_preempted_req_ids, set()
        if not self.use_v2_model_runner:
            self.prev_step_scheduled_req_ids = set(counts)
        return SchedulerOutput(
            scheduled_new_reqs=new,
            scheduled_cached_reqs=cached,
            num_scheduled_tokens=counts,
            total_num_scheduled_tokens=sum(counts.values()),
            scheduled_spec_decode_tokens={},
            scheduled_encoder_inputs={},
            finished_req_ids=finished,
            free_encoder_mm_hashes=[],
            preempted_req_ids=preempted,
            new_block_ids_to_zero=self._get_new_block_ids_to_zero(),
        )

    def _next_tokens(self, running: Sequence[Request]) -> CachedRequestData | None:
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
        return CachedRequestData(ids, set(), [], {}, blocks, computed, outputs)

    def _admit(self, room: int, counts: dict[str, int]) -> list[NewRequestData]:
        """Let waiting samples run, in order, until one does not fit, and add their tokens to read to `counts`."""
        admitted = list[NewRequestData]()
        while self.waiting and len(self.running) < self.max_num_active_reqs:
            request = self.waiting.peek_request()
            if request.status != RequestStatus.WAITING or (found := self._begin(request, room)) is None:
                break
            blocks, cached = found
            tokens = len(request._all_token_ids)
            self.waiting.pop_request()
            self.running.append(request)
            request.status, request.num_computed_tokens = RequestStatus.RUNNING, tokens
            if request.prefill_stats and request.num_preemptions <= 0:
                request.prefill_stats.set(
                    num_prompt_tokens=tokens, num_local_cached_tokens=cached, num_external_cached_tokens=0
                )
            id = request.request_id
            admitted.append(
                NewRequestData(id, request.prompt_token_ids, [], request.sampling_params, None, (blocks,), cached, None)
            )
            counts[id] = tokens - cached
            room -= tokens - cached
        return admitted

    def _begin(self, request: Request, room: int) -> tuple[list[int], int] | None:
        """Return the blocks of a sample's context, and how many of its tokens they hold already, or nothing if it does
        not fit."""
        kv, tokens = self.kv_cache_manager, len(request._all_token_ids)
        if not request.block_hashes:  # no full block, so none to find and none to cache
            pool, needed = kv.block_pool, -(-tokens // self.block_size)
            if tokens > room or needed > pool.get_num_free_blocks():
                return None
            blocks = pool.get_new_blocks(needed)
            self._blocks_of[request.request_id].extend(blocks)
            return [block.block_id for block in blocks], 0
        found, cached, _ = kv.get_computed_blocks(request)
        if tokens - cached > room:
            return None
        if kv.allocate_slots(request, tokens - cached, cached, found, full_sequence_must_fit=True) is None:
            return None
        return kv.get_block_ids(request.request_id)[0], cached

    def update_from_output(
        self, scheduler_output: SchedulerOutput, model_runner_output: ModelRunnerOutput
    ) -> dict[int, Any]:
        """Append what was sampled to its samples, and free those that it ends."""
        logprobs = model_runner_output.logprobs
        values = logprobs.logprobs[:, 0].tolist() if logprobs else []  # the sampled token's comes first
        rows = logprobs.cu_num_generated_tokens if logprobs else None
        sets, scored, hashed = last_kept(), model_runner_output.prompt_logprobs_dict, self.hash_block_size
        index, tokens = model_runner_output.req_id_to_index, model_runner_output.sampled_token_ids
        ends: list[Request] = []
        for id in scheduler_output.num_scheduled_tokens:
            request, at = self.requests[id], index[id]
            if not tokens[at]:
                continue  # a part of its context
            own, all, longest, stops = request.ends  # pyright: ignore[reportAttributeAccessIssue]
            (token,) = tokens[at]
            own.append(token)
            all.append(token)
            length = len(all)
            if length % hashed == 0:
                request.update_block_hashes()
            finish = prefill = None
            if request.prefill_stats is not None:
                stats, request.prefill_stats = request.prefill_stats, None
                prefill = Prefill(stats.num_prompt_tokens, stats.num_cached_tokens)
            # Of vLLM's reasons to end, vllm_args.sampling_params sets these alone.
            if stops and token in stops:
                request.status, finish = RequestStatus.FINISHED_STOPPED, "stop"
                ends.append(request)
            elif length >= longest:
                request.status, finish = RequestStatus.FINISHED_LENGTH_CAPPED, "length"
                ends.append(request)
            row = rows[at] if rows else at
            kept = sets[row : row + 1] if sets else ()
            scores = context_scores(scored[id]) if scored and id in scored else ()
            self._sampled.append(Sampled(id, tokens[at], [values[row]], finish, prefill, kept, scores))
        if ends:
            self._free(ends)
        return {}

    def _free(self, ends: Sequence[Request]) -> None:
        """Forget samples that have ended. Of the blocks of each, the last shall be taken for another sample first."""
        blocks = []
        for request in ends:
            blocks += reversed(self.kv_cache_manager.pop_blocks_for_free(request))
            del self.requests[request.request_id]
        self.kv_cache_manager.block_pool.free_blocks(blocks)
        self.finished_req_ids.update(request.request_id for request in ends)
        self.running = remove_all(self.running, set(ends))


def context_scores(found: LogprobsTensors | None) -> Sequence[ContextScore]:
    """Return vLLM's prompt log-probs: of each token first its own, then that of the most likely one."""
    if found is None:
        return ()
    pairs = zip(found.logprobs.tolist(), found.logprob_token_ids.tolist(), strict=True)
    return [ContextScore(own, best, most) for (own, most), (_, best) in pairs]
