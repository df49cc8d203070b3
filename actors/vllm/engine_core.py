"""vLLM's engine core in this process: samples in, sampled tokens out, without vLLM's objects for each of them.

vLLM's LLMEngine validates and builds every sample from its text-level form, and turns every sampled token into a
RequestOutput with its FlatLogprobs. All samples of a request that start from its context differ only in their seed, so
vLLM validates the first and the others are copies. What a step sampled is read from the scheduler.
"""

import gc
from collections import deque
from collections.abc import Collection, Iterator, Mapping
from copy import copy
from itertools import groupby
from typing import Any

from vllm import EngineArgs, LLMEngine
from vllm.v1.core.sched.output import NewRequestData
from vllm.v1.metrics.stats import PrefillStats
from vllm.v1.request import Request as Waiting
from vllm.v1.utils import ConstantList

from titan_rl.actors.vllm.plain_batch import PlainBatch
from titan_rl.actors.vllm.plain_blocks import PlainBlocks
from titan_rl.actors.vllm.plain_samples import Entry
from titan_rl.actors.vllm.step_scheduler import Sampled, Stepped, StepScheduler
from titan_rl.actors.vllm.vllm_args import sampling_params
from titan_rl.wire.types import Request


class EngineCore:
    """Samples of vLLM's model: plain ones as rows of arrays, as long as all are plain and fit, and else vLLM's way."""

    def __init__(self, args: Mapping[str, Any], *, records_kept: bool) -> None:
        self.llm: Any = LLMEngine.from_engine_args(EngineArgs(**args))
        self._client = self.llm.engine_core
        self._core = core = self._client.engine_core
        self._scheduler: StepScheduler = core.scheduler
        self._inputs, self._tasks = self.llm.input_processor, self.llm.get_supported_tasks()
        self._runner = core.model_executor.driver_worker.worker.model_runner
        self._plain = None if records_kept else plain_batch(self._scheduler, self._runner)
        self._grown: list[Sampled] = []  # by samples that vLLM has taken over
        gc.set_threshold(50_000)  # samples make many objects and no cycles; Python's 700 costs 5% of the host time

    def enqueue(self, request: Request, begun: Mapping[str, tuple[int, list[int]]], salt: str) -> None:
        """Add samples of a request: by the id that `step` calls it, each sample's index and its tokens so far."""
        plain = self._plain
        if plain is None or not plain.takes(request) or self._scheduler.has_unfinished_requests():
            self._leave_to_vllm()
            for made in self._made(request, begun, salt):
                self._scheduler.add_request(made)
            return
        if self._scheduler.has_finished_requests():
            self._client.get_output()  # vLLM's batch forgets them
        for tokens, same in groupby(begun.items(), key=lambda one: one[1][1]):  # those without tokens enter together
            samples = deque((id, nth) for id, (nth, _) in same)
            plain.add(Entry(request, salt, [*tokens], samples))

    def abort(self, ids: Collection[str]) -> None:
        """Forget samples. What they have got is lost unless `grown` was called before."""
        if self._plain is not None:
            self._plain.withdraw(ids)
        self._client.abort_requests([*ids])

    def step(self) -> Stepped:
        """Sample one token for every sample in the batch."""
        if self._plain is not None and self._plain.busy:
            if (stepped := self._plain.step()) is not None:
                return stepped
            self._leave_to_vllm()
        self._client.get_output()
        tokens, read, samples = self._scheduler.take()
        grown, self._grown = self._grown, []
        return Stepped(tokens, read, grown + samples)

    def grown(self) -> list[Sampled]:
        """Return what unfinished samples have got, as far as no step has returned it."""
        grown, self._grown = self._grown, []
        return grown + (self._plain.grown() if self._plain is not None else [])

    def lengths(self) -> Mapping[str, int]:
        """Return how many tokens of unfinished samples no step has returned, of those that have any."""
        if self._grown:
            return {one.id: len(one.tokens) for one in self._grown}
        return self._plain.lengths() if self._plain is not None else {}

    def sleep(self, level: int) -> None:
        """Stop sampling, and free what vLLM's sleep of this level frees. Unfinished samples wait."""
        self._leave_to_vllm()
        self.llm.sleep(level=level, mode="keep")

    def reset_prefix_cache(self) -> None:
        """Drop all keys and values. Samples that have begun recompute theirs."""
        if self._plain is not None:
            self._plain.restart()
        self.llm.reset_prefix_cache(reset_running_requests=True)

    def _leave_to_vllm(self) -> None:
        """Let vLLM go on with all samples, until none is left."""
        if self._plain is None or not self._plain.busy:
            return
        self._grown += self._plain.grown()
        left, waiting = self._plain.leave()
        entered = list[NewRequestData]()
        for _, same in groupby(left, key=lambda one: id(one.entry)):
            group = [*same]
            entry = group[0].entry
            samples = {one.id: (one.nth, entry.begun) for one in group}
            all_made = [*self._made(entry.request, samples, entry.salt)]  # copies of the first, which has no tokens yet
            for one, made in zip(group, all_made, strict=True):
                self._scheduler.go_on(made, one.tokens, one.blocks)
                entered.append(NewRequestData.from_request(made, ([block.block_id for block in one.blocks],)))
        self._runner.go_on(entered, [one.tokens for one in left])
        for entry in waiting:
            samples = {id: (nth, entry.begun) for id, nth in entry.samples}
            for made in self._made(entry.request, samples, entry.salt):
                self._scheduler.add_request(made)

    def _made(self, request: Request, begun: Mapping[str, tuple[int, list[int]]], salt: str) -> Iterator[Waiting]:
        """Yield vLLM's requests for samples."""
        fresh: Any = None  # a sample without tokens, as vLLM validated it
        for id, (nth, tokens) in begun.items():
            if fresh is not None and not tokens:
                yield another(fresh, id, request.seeds[nth])
                continue
            params = sampling_params(request.sampling, request.seeds[nth], begun=len(tokens))
            context = [*request.tokens, *tokens]
            prompt = {"type": "token", "prompt_token_ids": context, "cache_salt": salt}
            made, _ = self._core.preprocess_add_request(self._inputs.process_inputs(id, prompt, params, self._tasks))
            fresh = fresh if tokens else made
            yield made


def plain_batch(scheduler: StepScheduler, runner: Any) -> PlainBatch | None:
    """Return a batch of plain samples, or nothing where vLLM would plan or run them in another way than it does."""
    cache, manager = scheduler.cache_config, scheduler.kv_cache_manager.coordinator.single_type_managers[0]
    plain = getattr(runner, "plain", False) and scheduler.plans_plainly and not manager.records_new_block_ids
    if not plain or runner.input_batch.block_table[0].block_size != scheduler.block_size:
        return None
    blocks = PlainBlocks(scheduler.kv_cache_manager.block_pool, scheduler.block_size, cache.prefix_caching_hash_algo)
    room = min(scheduler.max_num_scheduled_tokens, scheduler.scheduler_config.max_num_batched_tokens)
    return PlainBatch(runner, blocks, scheduler.max_num_active_reqs, room)


def another(sample: Waiting, id: str, seed: int) -> Waiting:
    """Return one more sample of the context of a sample that still waits. It shares with it what vLLM only reads."""
    made = Waiting.__new__(Waiting)
    made.__dict__.update(sample.__dict__)
    made.request_id = id
    made.sampling_params = copy(sample.sampling_params)
    made.sampling_params.seed = seed  # pyright: ignore[reportOptionalMemberAccess]
    made.events, made.spec_token_ids, made._prompt_embeds_per_block_hashes = [], [], {}
    made._output_token_ids, made._all_token_ids = [], [*sample._all_token_ids]
    made.output_token_ids, made.all_token_ids = ConstantList(made._output_token_ids), ConstantList(made._all_token_ids)
    made.block_hashes, made.prefill_stats = [*sample.block_hashes], PrefillStats()
    return made
