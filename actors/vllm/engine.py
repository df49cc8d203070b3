"""One rank of a vLLM engine, in this process, stepped by its owner.

    add(requests) -> step() ... step() -> [Done, ...]
    withdraw(samples) -> what there is of them, for another engine to go on with
    params() <- written in place by a weight sync, between suspend() and set_version(v)

Every sample of a request is an engine request of its own, with its own seed: what it samples depends on its context,
its seed and the weights, never on its neighbours in the batch. Tensor-parallel ranks hold equal engines, given equal
requests and stepped together.

Importing this module imports neither torch nor vLLM: the controller does so for the types alone.
"""

import gc
import hashlib
import logging
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from titan_rl.actors.vllm import vllm_cpu
from titan_rl.wire.seeds import derive
from titan_rl.wire.types import Completion, EngineStats, Request, Sampling

if TYPE_CHECKING:
    from torch import Tensor

ENV: dict[str, str] = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # the engine core runs here, where its parameters can be written
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
    # vLLM's own use of torch; and the sweeping-up after a process that was ended, as most of them are.
    "PYTHONWARNINGS": "ignore::FutureWarning,ignore::UserWarning:multiprocessing.resource_tracker",
}
"""Launch environment of a generator: vLLM reads it when it is imported."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineSettings:
    model_dir: str  # config.json; weights too under load_format "auto". Tokenizer and generation config are not read
    max_model_len: int
    dtype: Literal["float32", "bfloat16"] = "float32"
    max_num_seqs: int = 256
    tensor_parallel_degree: int = 1
    kv_cache_memory_mb: int = 256  # 0: sized by gpu_memory_utilization
    gpu_memory_utilization: float = 0.9
    block_size: int = 32
    enable_prefix_caching: bool = True
    enforce_eager: bool = True
    sleeps: bool = False  # shares its devices with somebody else: gives their memory back when told to
    seed: int = 0
    load_format: Literal["dummy", "auto"] = "dummy"  # weights come by weight sync, unless "auto" reads the folder's


@dataclass(frozen=True, slots=True)
class EngineInfo:
    """What start-up came to."""

    pid: int
    vllm: str  # version
    shapes: dict[str, tuple[int, ...]]  # of the live parameters of this rank
    nbytes: int  # of those
    kv_tokens: int  # that the KV cache holds
    import_seconds: float
    build_seconds: float


@dataclass(frozen=True, slots=True)
class Done:
    """A request whose last sample has finished."""

    id: str
    completions: list[Completion]  # in the order of the request's seeds; those withdrawn have finish "abort"


class SampleId(NamedTuple):
    request: str
    nth: int  # of its seeds


class Withdrawn(NamedTuple):
    """A sample that was taken out unfinished."""

    sample: SampleId
    begun: Completion


class EngineReport(NamedTuple):
    """How far an engine has come, since start-up and with what is open."""

    steps: int = 0
    seconds: float = 0.0  # in add and step
    read: int = 0  # tokens that the steps computed: prompts that were not cached, then one a sample
    tokens: int = 0  # sampled
    lengths: Mapping[str, Mapping[int, int]] = {}  # tokens so far, by request and index, of unfinished samples


@dataclass(slots=True)
class _Open:
    """A request under way: its samples' lists grow with every step."""

    samples: list[Completion]
    context: int  # tokens
    unfinished: set[int]


class Engine:
    def __init__(self, settings: EngineSettings) -> None:
        if os.environ.get("VLLM_ENABLE_V1_MULTIPROCESSING") != "0":
            raise RuntimeError("expected engine.ENV in this process's launch environment, found it missing")
        began = time.perf_counter()
        with _without_gc():
            _quiet_logging()
            import vllm
            from vllm import EngineArgs, LLMEngine
            from vllm.platforms import current_platform

            on_cpu = current_platform.is_cpu()
            if on_cpu:
                vllm_cpu.patch()
        imported = time.perf_counter()
        args = _engine_args(settings)
        args |= vllm_cpu.ENGINE_ARGS if on_cpu else {"enable_sleep_mode": settings.sleeps}
        self._llm: Any = LLMEngine.from_engine_args(EngineArgs(**args))
        built = time.perf_counter()
        config = self._llm.vllm_config
        if on_cpu:
            vllm_cpu.check_head_size(config.model_config.get_head_size())
        self._vocab_size: int = config.model_config.get_vocab_size()
        self._max_model_len: int = config.model_config.max_model_len
        self._open: dict[str, _Open] = {}
        self._ended: list[Done] = []  # the next step answers with them
        self._stats = EngineStats()
        self._read = 0
        self.version: int | None = None
        self.asleep = False
        self._offloads = settings.sleeps and not on_cpu
        params = self.params()
        self.info = EngineInfo(
            pid=os.getpid(),
            vllm=vllm.__version__,
            shapes={name: tuple(p.shape) for name, p in params.items()},
            nbytes=sum(p.nbytes for p in params.values()),
            kv_tokens=config.cache_config.num_gpu_blocks * config.cache_config.block_size,
            import_seconds=imported - began,
            build_seconds=built - imported,
        )

    @property
    def busy(self) -> bool:
        return bool(self._open or self._ended)

    def check(self, requests: Sequence[Request]) -> None:
        """Raise unless each of these can be sampled exactly as asked."""
        self._serving()
        taken = set(self._open)
        for request in requests:
            if request.id in taken:
                raise ValueError(f"request {request.id}: its id is that of an unfinished request")
            taken.add(request.id)
            if problem := self._problem(request):
                raise ValueError(f"request {request.id}: {problem}")

    def add(self, requests: Sequence[Request]) -> None:
        """All of these enter the batch before the next step, as far as max_num_seqs and the KV cache allow."""
        began = time.perf_counter()
        self.check(requests)
        for request in requests:
            samples = _begun(request)
            unfinished = {i for i, sample in enumerate(samples) if sample.finish == "abort"}
            self._open[request.id] = _Open(samples, len(request.tokens), unfinished)
            for i in sorted(unfinished):
                prompt = {"type": "token", "prompt_token_ids": [*request.tokens, *samples[i].tokens]}
                params = _sampling_params(request.sampling, request.seeds[i], begun=len(samples[i].tokens))
                self._llm.add_request(f"{request.id}#{i}", prompt, params)
            self._end(request.id)
        self._stats.seconds += time.perf_counter() - began

    def step(self) -> list[Done]:
        """Sample a token for every sample in the batch; answer with the requests whose last sample this finished."""
        version = self._serving()
        began = time.perf_counter()
        outputs = self._llm.step() if self._open else []
        self._stats.seconds += time.perf_counter() - began
        self._stats.steps += 1
        self._stats.max_batch = max(self._stats.max_batch, len(outputs))
        for output in outputs:
            id, _, index = output.request_id.rpartition("#")
            self._extend(self._open[id], int(index), output, version)
            self._end(id)
        done, self._ended = self._ended, []
        return done

    def withdraw(self, samples: Sequence[SampleId]) -> list[Withdrawn]:
        """Take samples out as they stand; those that have finished meanwhile stay. Their requests are done once their
        other samples are."""
        taken = [s for s in samples if s.request in self._open and s.nth in self._open[s.request].unfinished]
        self._llm.abort_request([f"{id}#{i}" for id, i in taken])
        withdrawn = [Withdrawn(sample, self._open[sample.request].samples[sample.nth]) for sample in taken]
        for id, i in taken:
            self._open[id].unfinished.remove(i)
            self._end(id)
        return withdrawn

    def abort_all(self) -> list[str]:
        """Forget every unfinished request; answers with their ids."""
        aborted, self._open, self._ended = self._open, {}, []
        self._llm.abort_request([f"{id}#{i}" for id, r in aborted.items() for i in r.unfinished])
        return list(aborted)

    def report(self) -> EngineReport:
        lengths = {id: {i: len(r.samples[i].tokens) for i in r.unfinished} for id, r in self._open.items()}
        return EngineReport(self._stats.steps, self._stats.seconds, self._read, self._stats.tokens, lengths)

    def params(self) -> "dict[str, Tensor]":
        """The memory of the live parameters, to be overwritten between suspend and set_version."""
        model = self._llm.model_executor.driver_worker.get_model()
        return {name: parameter.detach() for name, parameter in model.named_parameters()}

    def sleep(self) -> None:
        """Nobody samples before the next `set_version`. On a GPU weights move to the host and the KV cache goes."""
        self.asleep = True
        if self._offloads:
            self._llm.sleep(level=1)

    def wake(self) -> None:
        """The memory of the parameters is there again, and may be written."""
        if self.asleep and self._offloads:
            self._llm.wake_up()
        self.asleep = False

    def suspend(self) -> None:
        """The parameters are about to change: nobody samples before set_version."""
        self.version = None

    def set_version(self, version: int) -> None:
        """The weights are now those of `version`. Keys and values computed with older weights go, those of unfinished
        samples too: the next step computes them anew, and the samples go on from where they stood.
        """
        self._llm.reset_prefix_cache(reset_running_requests=True)
        self.version = version

    def fingerprint(self) -> dict[str, str]:
        """SHA-256 of every live parameter's bytes."""
        return {name: _sha256(parameter) for name, parameter in self.params().items()}

    def stats(self) -> EngineStats:
        return replace(self._stats)

    def _serving(self) -> int:
        if self.version is None:
            raise RuntimeError("expected a policy version, found none: sync weights before sampling")
        return self.version

    def _problem(self, request: Request) -> str | None:
        sampling, length = request.sampling, len(request.tokens)
        if not request.tokens or not request.seeds:
            return f"expected tokens and seeds, found {length} and {len(request.seeds)}"
        if not 0 <= min(request.tokens) <= max(request.tokens) < self._vocab_size:
            return f"expected token ids below {self._vocab_size}, found {min(request.tokens)} to {max(request.tokens)}"
        if min(request.seeds) < 0:  # vLLM reads -1 as "unseeded"
            return f"expected seeds of at least 0, found {min(request.seeds)}"
        if not (sampling.temperature == 0 or 0.01 <= sampling.temperature <= 2):  # vLLM would sample at 0.01
            return f"expected rollout.temperature 0 or in [0.01, 2], found {sampling.temperature}"
        if length + sampling.max_new_tokens > self._max_model_len:
            return (
                f"{length} tokens and {sampling.max_new_tokens} new ones exceed {self._max_model_len}; "
                "lower rollout.max_new_tokens or raise generator.max_model_len"
            )
        if request.begun and len(request.begun) != len(request.seeds):
            return f"expected a begun sample for each of {len(request.seeds)} seeds, found {len(request.begun)}"
        most = max((len(sample.tokens) for sample in request.begun if sample.finish == "abort"), default=0)
        if most >= sampling.max_new_tokens:
            return f"expected unfinished samples below {sampling.max_new_tokens} tokens, found one of {most}"
        return None

    def _end(self, id: str) -> None:
        """Of a request, if its last sample has come to an end."""
        if not self._open[id].unfinished:
            self._ended.append(Done(id, self._open.pop(id).samples))

    def _extend(self, request: _Open, index: int, output: Any, version: int) -> None:
        """Append what a step sampled for one sample."""
        sample, delta = request.samples[index], output.outputs[0]
        prefilled = request.context + len(sample.tokens) == len(output.prompt_token_ids)  # by this very step
        self._read += len(output.prompt_token_ids) - (output.num_cached_tokens or 0) if prefilled else 1
        sample.tokens.extend(delta.token_ids)
        sample.logprobs.extend(delta.logprobs.logprobs)
        sample.versions.extend([version] * len(delta.token_ids))
        self._stats.tokens += len(delta.token_ids)
        if output.finished:
            if delta.finish_reason not in ("stop", "length"):
                raise RuntimeError(f"{output.request_id}: expected finish stop or length, found {delta.finish_reason}")
            request.samples[index] = replace(sample, finish=delta.finish_reason)
            request.unfinished.remove(index)
            self._stats.prompt_tokens += len(output.prompt_token_ids)
            self._stats.cached_tokens += output.num_cached_tokens or 0


def _engine_args(settings: EngineSettings) -> dict[str, Any]:
    return {
        "model": settings.model_dir,
        "skip_tokenizer_init": True,
        "load_format": settings.load_format,
        "use_tqdm_on_load": False,
        "dtype": settings.dtype,
        "seed": settings.seed,
        "max_model_len": settings.max_model_len,
        "max_num_seqs": settings.max_num_seqs,
        "tensor_parallel_size": settings.tensor_parallel_degree,
        # The processes exist already: each rank builds its own engine, and finds its peers by RANK and MASTER_ADDR.
        "distributed_executor_backend": "external_launcher" if settings.tensor_parallel_degree > 1 else None,
        "kv_cache_memory_bytes": settings.kv_cache_memory_mb << 20 or None,
        "gpu_memory_utilization": settings.gpu_memory_utilization,
        "block_size": settings.block_size,
        "enable_prefix_caching": settings.enable_prefix_caching,
        "enforce_eager": settings.enforce_eager,
        "async_scheduling": False,  # a step returns what it sampled, so that its version is known
        "logprobs_mode": "processed_logprobs",  # at the sampling temperature; vLLM's default is at 1
        "generation_config": "vllm",
        "disable_log_stats": True,
    }


def _begun(request: Request) -> list[Completion]:
    """A request's samples as they stand, in lists that may grow."""
    if not request.begun:
        return [Completion([], [], [], "abort") for _ in request.seeds]
    return [Completion([*s.tokens], [*s.logprobs], [*s.versions], s.finish) for s in request.begun]


def _sampling_params(sampling: Sampling, seed: int, *, begun: int) -> Any:
    """vLLM's parameters for what is left of one sample. Only the request's own stop tokens stop it: `ignore_eos`
    switches off those that vLLM finds in the model's folder. A sample that goes on draws from a stream of its own: with
    the first one from its start, token after token would depend on the noise that chose the earlier ones.
    """
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    return SamplingParams(
        max_tokens=sampling.max_new_tokens - begun,
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        seed=derive(seed, "go on", begun) % 2**31 if begun else seed,
        stop_token_ids=list(sampling.stop_token_ids),
        ignore_eos=True,
        logprobs=0,  # the sampled token's only
        flat_logprobs=True,
        detokenize=False,
        output_kind=RequestOutputKind.DELTA,
        skip_clone=True,
    )


def _sha256(tensor: "Tensor") -> str:
    import torch

    return hashlib.sha256(tensor.contiguous().view(torch.uint8).cpu().numpy().data).hexdigest()


def _quiet_logging() -> None:
    """Nothing below vLLM's configured level, which it only minds once it has loaded its logging configuration; and no
    dump of the whole batch before an error, whose traceback reaches the controller anyway.
    """
    logging.getLogger("vllm").setLevel(os.environ.get("VLLM_LOGGING_LEVEL", "INFO"))
    logging.getLogger("vllm.logging_utils.dump_input").setLevel(logging.CRITICAL)


@contextmanager
def _without_gc() -> Iterator[None]:
    """For imports: they allocate a million objects that live on, and scanning those again and again is a quarter of the
    time. Freezing them afterwards saves the engine another second, which vLLM spends on collecting.
    """
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()
