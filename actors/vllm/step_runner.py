"""vLLM's model runner on a CPU, with less Python and fewer small tensors per sample and step.

What enters and leaves the batch is written row by row into arrays at once; a step in which every sample reads one token
is prepared from these arrays; of the sampled tokens only the log-prob is looked up. vLLM's own methods do this for
models and settings that are not `plain`, and for samples that come back after a preemption.

It computes what vLLM's runner would, to the last bit. step_scheduler.py refuses versions that this was not written for.
"""

from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby, islice
from typing import Any, cast

import numpy as np
import torch
from vllm.sampling_params import SamplingParams, SamplingType
from vllm.v1.core.sched.output import NewRequestData, SchedulerOutput
from vllm.v1.kv_cache_interface import FullAttentionSpec, SlidingWindowSpec
from vllm.v1.outputs import LogprobsTensors, SamplerOutput
from vllm.v1.sample.logits_processor import LogitsProcessors
from vllm.v1.sample.metadata import SamplingMetadata
from vllm.v1.sample.ops.topk_topp_sampler import apply_top_k_top_p
from vllm.v1.sample.sampler import Sampler
from vllm.v1.worker.cpu_model_runner import CPUModelRunner
from vllm.v1.worker.gpu_input_batch import CachedRequestState

BLOCK = 16  # seeds of noise that are drawn at once
PAD_SLOT = -1
NO_RANKS = torch.empty(0)


def noise_seeds(seed: int, first: list[int]) -> Iterator[int]:
    """Yield the numbers that vLLM draws from a sample's generator, one for each token, given the first BLOCK of them.

    vLLM's kernel derives the noise of a token from such a number. Many at once are the same numbers, and most samples
    end within the first block.
    """
    yield from first
    generator = torch.Generator().manual_seed(seed)
    torch.randint(0, 2**31, (BLOCK,), generator=generator)
    while True:
        yield from torch.randint(0, 2**31, (BLOCK,), generator=generator).tolist()


def first_noise_seeds(seeds: Sequence[int], generator: torch.Generator) -> list[list[int]]:
    """Return the first BLOCK numbers of each seed, which a generator draws that is seeded anew for each."""
    blocks = torch.empty(len(seeds), BLOCK, dtype=torch.int64)
    for seed, block in zip(seeds, blocks.unbind(), strict=True):
        block.random_(0, 2**31, generator=generator.manual_seed(seed))
    return blocks.tolist()


def sample_by_seeds(
    logits_RV: torch.Tensor, numbers: torch.Tensor | Mapping[int, Iterator[int]], k: Any, p: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return a token for each row and the log-probs that it was drawn from, as vLLM's sampler does on a CPU."""
    logits_RV = apply_top_k_top_p(logits_RV, k, p).float()
    if not isinstance(numbers, torch.Tensor):
        seeds = [0] * len(logits_RV)  # of a greedy sample: vLLM takes its token from the logits
        for row, own in numbers.items():
            seeds[row] = next(own)
        numbers = torch.tensor(seeds)
    return torch.ops._C.fused_gumbel_argmax(logits_RV, numbers), logits_RV.log_softmax(dim=-1)


def sampled_logprobs(logprobs: torch.Tensor, num_logprobs: int, token_ids: torch.Tensor) -> LogprobsTensors:
    """Return the tokens and their log-probs. vLLM also counts the tokens that are at least as likely."""
    if num_logprobs:
        return Sampler.gather_logprobs(logprobs, num_logprobs, token_ids)
    tokens_R1 = token_ids.unsqueeze(-1)
    return LogprobsTensors(tokens_R1, logprobs.gather(-1, tokens_R1), NO_RANKS)


def unpenalized() -> SamplingMetadata:
    """Return the settings of vLLM's sampler for samples from whole distributions, without temperatures and noise."""
    none = torch.empty(0)
    return SamplingMetadata(
        temperature=None,
        all_greedy=False,
        all_random=False,
        top_p=None,
        top_k=None,
        generators={},
        max_num_logprobs=0,  # the sampled token's only
        no_penalties=True,
        prompt_token_ids=None,
        frequency_penalties=none,
        presence_penalties=none,
        repetition_penalties=none,
        output_token_ids=[],
        allowed_token_ids_mask=None,
        bad_words_token_ids={},
        logitsprocs=LogitsProcessors(),
    )


class StepRunner(CPUModelRunner):
    def initialize_kv_cache(self, kv_cache_config: Any, *arguments: Any, **named: Any) -> None:
        super().initialize_kv_cache(kv_cache_config, *arguments, **named)
        groups, sampler = kv_cache_config.kv_cache_groups, self.sampler.topk_topp_sampler
        special = (
            self.speculative_config,
            self.lora_config,
            self.uses_mrope,
            self.is_pooling_model,
            self.enable_prompt_embeds,
            self.supports_mm_inputs,
            self.use_async_scheduling,
            self.model_config.is_encoder_decoder,
            self.parallel_config.pipeline_parallel_size > 1,
            self.parallel_config.data_parallel_size > 1,
            self.dcp_world_size > 1,
            self.cache_config.use_replayssm,
            self.sampler.logprobs_mode != "processed_logprobs",
            sampler.use_fp64_gumbel,
            sampler.forward != sampler.forward_cpu,
            len(groups) != 1,
        )
        kinds = (FullAttentionSpec, SlidingWindowSpec)
        self.plain = not any(special) and isinstance(groups[0].kv_cache_spec, kinds)
        if self.plain:
            sampler.forward, self.sampler.gather_logprobs = sample_by_seeds, sampled_logprobs
        self._shared = torch.Generator()
        self._positions = self.positions.numpy()
        self._seq_lens = self.seq_lens.numpy()
        self._known_lens = self.optimistic_seq_lens_cpu.numpy()

    def _update_states(self, scheduler_output: SchedulerOutput) -> Any:
        if not self.plain:
            return super()._update_states(scheduler_output)
        batch, new = self.input_batch, scheduler_output.scheduled_new_reqs
        if scheduler_output.scheduled_cached_reqs.resumed_req_ids:
            super()._update_states(scheduler_output)
            for one, noise in zip(new, self._noise_of(new), strict=True):
                self.requests[one.req_id].generator = noise
                if noise is not None:
                    batch.generators[batch.req_id_to_index[one.req_id]] = noise
            return None
        self._leave(scheduler_output)
        self._go_on(scheduler_output)
        self._enter(new)
        batch.condense()
        batch.refresh_metadata()
        return None

    def go_on(self, new: Sequence[NewRequestData], sampled: Sequence[list[int]]) -> None:
        """Put samples into the batch that have these tokens already. Those without blocks come back as vLLM's preempted
        ones do."""
        for one, noise, tokens in zip(new, self._noise_of(new), sampled, strict=True):
            state = CachedRequestState(
                one.req_id,
                one.prompt_token_ids,
                one.mm_features,
                one.sampling_params,
                cast(Any, noise and islice(noise, len(tokens), None)),
                one.block_ids,
                one.num_computed_tokens,
                tokens,
            )
            self.requests[one.req_id] = state
            if one.num_computed_tokens:
                self.input_batch.add_request(state)
        self.input_batch.refresh_metadata()

    def _noise_of(self, new: Sequence[NewRequestData]) -> list[Any]:
        """Return the noise of each sample, or nothing for a greedy one."""
        params = [one.sampling_params for one in new]
        seeds = [p.seed if p and p.sampling_type == SamplingType.RANDOM_SEED else None for p in params]
        firsts = iter(first_noise_seeds([seed for seed in seeds if seed is not None], self._shared))
        return [None if seed is None else noise_seeds(seed, next(firsts)) for seed in seeds]

    def _leave(self, output: SchedulerOutput) -> None:
        """Take the samples out of the batch that have ended, and those that this step leaves out."""
        batch, planned = self.input_batch, output.num_scheduled_tokens
        for id in output.finished_req_ids:
            self.requests.pop(id, None)
            self.num_prompt_logprobs.pop(id, None)
        ids = [id for id in batch.req_id_to_index if id not in planned]
        if not ids:
            return
        rows = [batch.req_id_to_index.pop(id) for id in ids]
        for row in rows:
            batch.batch_update_builder.removed_append(row)
            batch._req_ids[row] = batch.req_output_token_ids[row] = None
            batch.generators.pop(row, None)
        for id in ids:
            batch.num_logprobs.pop(id, None)
        for kind in (batch.greedy_reqs, batch.random_reqs, batch.top_p_reqs, batch.top_k_reqs):
            kind.difference_update(ids)
        table = batch.block_table[0]
        table.block_table.np[rows, : table.num_blocks_per_row[rows].max()] = 0
        table.num_blocks_per_row[rows] = 0

    def _go_on(self, output: SchedulerOutput) -> None:
        """Give the samples that are in the batch what they have got since the last step."""
        batch, cached = self.input_batch, output.scheduled_cached_reqs
        index = batch.req_id_to_index
        away = (
            [] if len(index) == len(cached.req_ids) else [i for i, id in enumerate(cached.req_ids) if id not in index]
        )
        for id, blocks in zip(cached.req_ids, cached.new_block_ids, strict=True):
            if blocks is not None:
                for own, more in zip(self.requests[id].block_ids, blocks, strict=True):
                    own.extend(more)
                if id in index:
                    batch.block_table.append_row(blocks, index[id])
        for i in away:  # a step had no room for them
            state = self.requests[cached.req_ids[i]]
            state.num_computed_tokens = cached.num_computed_tokens[i]
            batch.add_request(state)
        rows = [index[id] for id in cached.req_ids]
        batch.num_computed_tokens_cpu[rows] = cached.num_computed_tokens

    def _enter(self, new: Sequence[NewRequestData]) -> None:
        """Put new samples into the batch. Those of a request share their context, and come one after the other."""
        if not new:
            return
        batch, rows, states = self.input_batch, list[int](), list[CachedRequestState]()
        for one, noise in zip(new, self._noise_of(new), strict=True):
            state = CachedRequestState(
                one.req_id,
                one.prompt_token_ids,
                one.mm_features,
                one.sampling_params,
                noise,
                one.block_ids,
                one.num_computed_tokens,
                [],
            )
            self.requests[one.req_id] = state
            params = one.sampling_params
            assert params is not None
            if params.prompt_logprobs is not None:
                self.num_prompt_logprobs[one.req_id] = params.prompt_logprobs
            row = batch._register_add_request(state)
            if row == len(batch._req_ids):
                batch._req_ids.append(one.req_id)
                batch.req_output_token_ids.append(state.output_token_ids)
                batch.spec_token_ids.append([])
            else:
                batch._req_ids[row] = one.req_id
                batch.req_output_token_ids[row] = state.output_token_ids
            batch.req_id_to_index[one.req_id] = row
            if noise is not None:
                batch.generators[row] = noise
            rows.append(row)
            states.append(state)
        self._write_contexts(rows, states)
        self._write_settings(rows, states)

    def _write_contexts(self, rows: list[int], states: list[CachedRequestState]) -> None:
        batch, table = self.input_batch, self.input_batch.block_table[0]
        lengths = [state.num_prompt_tokens for state in states]
        batch.num_prompt_tokens[rows] = lengths
        batch.num_tokens_no_spec[rows] = lengths
        batch.num_computed_tokens_cpu[rows] = [state.num_computed_tokens for state in states]
        held = [len(state.block_ids[0]) for state in states]
        table.num_blocks_per_row[rows] = held
        at = 0
        for _, same in groupby(zip(states, held, strict=True), key=lambda one: (id(one[0].prompt_token_ids), one[1])):
            group = [state for state, _ in same]
            mine, length, blocks = rows[at : at + len(group)], lengths[at], held[at]
            batch.token_ids_cpu[mine, :length] = group[0].prompt_token_ids
            batch.is_token_ids[mine, :length] = True
            table.block_table.np[mine, :blocks] = [state.block_ids[0] for state in group]
            at += len(group)

    def _write_settings(self, rows: list[int], states: list[CachedRequestState]) -> None:
        batch = self.input_batch
        all = [(state.req_id, cast(SamplingParams, state.sampling_params)) for state in states]
        greedy = {id for id, params in all if params.sampling_type == SamplingType.GREEDY}
        batch.greedy_reqs |= greedy
        batch.random_reqs.update(id for id, _ in all if id not in greedy)
        batch.temperature_cpu[rows] = [0.0 if id in greedy else params.temperature for id, params in all]
        batch.top_p_cpu[rows] = [params.top_p for _, params in all]
        batch.top_p_reqs.update(id for id, params in all if params.top_p < 1)
        top_k = [params.top_k if 0 < params.top_k < self.input_batch.vocab_size else 0 for _, params in all]
        batch.top_k_cpu[rows] = [k or batch.vocab_size for k in top_k]
        batch.top_k_reqs.update(id for (id, _), k in zip(all, top_k, strict=True) if k)
        batch.num_logprobs.update((id, params.logprobs or 0) for id, params in all)

    def _prepare_inputs(self, scheduler_output: SchedulerOutput, num_scheduled_tokens: np.ndarray) -> Any:
        batch = self.input_batch
        n = batch.num_reqs
        if not self.plain or scheduler_output.total_num_scheduled_tokens != n:
            return super()._prepare_inputs(scheduler_output, num_scheduled_tokens)
        rows, computed, table = self.arange_np[:n], batch.num_computed_tokens_cpu[:n], batch.block_table[0]
        self.input_ids.np[:n] = batch.token_ids_cpu[rows, computed]
        self._positions[:n] = computed
        self.query_start_loc.np[: n + 1] = self.arange_np[: n + 1]
        self.query_start_loc.np[n + 1 :] = n
        for lengths in (self._seq_lens, self._known_lens):
            np.add(computed, 1, out=lengths[:n])
            lengths[n:] = 0
        self.discard_request_mask.np[:n] = self._known_lens[:n] < batch.num_tokens_no_spec[:n]
        slots, size = table.slot_mapping.np, table.block_size
        slots[:n] = table.block_table.np[rows, computed // size].astype(np.int64) * size + computed % size
        slots[n:] = PAD_SLOT
        return self.query_start_loc.gpu[:n], None, 1

    def _bookkeeping_sync(
        self,
        scheduler_output: SchedulerOutput,
        sampler_output: SamplerOutput,
        logits: Any,
        hidden_states: Any,
        num_scheduled_tokens: int,
    ) -> Any:
        batch = self.input_batch
        n = batch.num_reqs
        if not self.plain or self.discard_request_mask.np[:n].any():
            return super()._bookkeeping_sync(
                scheduler_output, sampler_output, logits, hidden_states, num_scheduled_tokens
            )
        rows, ends, sampled = self.arange_np[:n], batch.num_tokens_no_spec[:n], sampler_output.sampled_token_ids
        batch.token_ids_cpu[rows, ends] = sampled[:, 0].numpy()
        batch.is_token_ids[rows, ends] = True
        ends += 1
        tokens = sampled.tolist()
        for own, token in zip(cast(list[list[int]], batch.req_output_token_ids), tokens, strict=True):
            own += token
        found = sampler_output.logprobs_tensors
        scores = self._get_prompt_logprobs_dict(
            hidden_states[:num_scheduled_tokens], scheduler_output.num_scheduled_tokens
        )
        return (
            {},
            None,
            found and found.tolists(),
            tokens,
            scores,
            batch.req_ids.copy(),
            batch.req_id_to_index.copy(),
            [],
        )
