"""vLLM's engine core in this process: samples in, sampled tokens out, without vLLM's objects for each of them.

vLLM's LLMEngine validates and builds every sample from its text-level form, and turns every sampled token into a
RequestOutput with its FlatLogprobs. All samples of a request that start from its context differ only in their seed, so
vLLM validates the first and the others are copies. What a step sampled is read from the scheduler.
"""

import gc
from collections.abc import Callable, Iterable, Mapping
from copy import copy
from typing import Any

from vllm import EngineArgs, LLMEngine

from titan_rl.actors.vllm.step_scheduler import Sampled, StepScheduler
from titan_rl.actors.vllm.vllm_args import sampling_params
from titan_rl.wire.types import Request


class EngineCore:
    def __init__(self, args: Mapping[str, Any]) -> None:
        self.llm: Any = LLMEngine.from_engine_args(EngineArgs(**args))
        self._client = self.llm.engine_core
        core = self._client.engine_core
        self._scheduler: StepScheduler = core.scheduler
        self._inputs, self._tasks = self.llm.input_processor, self.llm.get_supported_tasks()
        if core.request_block_hasher is not None:
            core.request_block_hasher = hash_prompts_once(core.request_block_hasher)
        gc.set_threshold(50_000)  # samples make many objects and no cycles; Python's 700 costs 5% of the host time

    def enqueue(self, request: Request, begun: Mapping[str, tuple[int, list[int]]], salt: str) -> None:
        """Add samples of a request: by the id that `step` calls it, each sample's index and its tokens so far."""
        fresh: Any = None  # a sample without tokens, as vLLM validated it
        for id, (nth, tokens) in begun.items():
            if fresh is not None and not tokens:
                made = copy(fresh)
                made.request_id = id
                made.sampling_params = copy(fresh.sampling_params)
                made.sampling_params.seed = request.seeds[nth]
            else:
                params = sampling_params(request.sampling, request.seeds[nth], begun=len(tokens))
                context = [*request.tokens, *tokens]
                prompt = {"type": "token", "prompt_token_ids": context, "cache_salt": salt}
                made = self._inputs.process_inputs(id, prompt, params, self._tasks)
                fresh = fresh if tokens else made
            self._client.add_request(made)

    def abort(self, ids: Iterable[str]) -> None:
        self._client.abort_requests([*ids])

    def step(self) -> list[Sampled]:
        """Sample one token for every sample in the batch."""
        self._client.get_output()
        return self._scheduler.take()


def hash_prompts_once(hasher: Callable[[Any], list[Any]]) -> Callable[[Any], list[Any]]:
    """Return vLLM's hasher of a sample's blocks, made to hash the prompt that consecutive samples share only once."""
    last: tuple[Any, Any, list[Any]] = (None, None, [])

    def hash_blocks(sample: Any) -> list[Any]:
        nonlocal last
        if sample.num_computed_tokens or sample.num_output_tokens:
            return hasher(sample)
        if sample.prompt_token_ids is not last[0] or sample.cache_salt != last[1]:
            last = sample.prompt_token_ids, sample.cache_salt, hasher(sample)
        return last[2][:]

    return hash_blocks
