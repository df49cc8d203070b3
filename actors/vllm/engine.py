"""One rank of a vLLM engine, in this process, stepped by its owner.

    add(requests) -> step() ... step() -> [Done, ...]
    withdraw(ids) -> [Done, ...], whose unfinished samples another engine can resume
    params() <- written in place by a weight sync, between suspend() and set_version(v)

With LoRA an engine may have several slots, one per policy: versions, salts and syncs are a slot's.

Every sample of a request is a vLLM request with its own seed. Its tokens depend on its context, its seed and the
weights, never on its neighbours in the batch. Tensor-parallel ranks hold equal engines: they are given equal requests
and stepped together.

With asynchronous scheduling a step launches a batch, and returns what the batch before it sampled. `suspend` and
`sleep` take the tokens of batches in flight first, so no batch meets two versions.

This is the only file that steps vLLM, by the public methods of its LLMEngine. docs/upgrades.md lists the private names
of vLLM that this package still needs.

Importing this module imports neither torch nor vLLM: the controller imports it for its types.
"""

import hashlib
import itertools
import logging
import os
import time
from collections.abc import Iterable, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, cast

from titan_rl.actors.imports import import_vllm_model, use_given_threads, without_gc
from titan_rl.actors.meeting import meet_in_file
from titan_rl.actors.numa import stay_near_gpu
from titan_rl.actors.vllm import vllm_cpu
from titan_rl.actors.vllm.engine_adapters import EngineAdapters
from titan_rl.actors.vllm.launch_env import ENV
from titan_rl.actors.vllm.vllm_args import (
    KEPT_LAYOUT,
    engine_args,
    memory_share,
    problem_of,
    quantization_args,
    sampling_params,
)
from titan_rl.actors.vllm.vllm_params import LiveLayout
from titan_rl.config.choices import DtypeChoice, HeadDtype, Switch
from titan_rl.config.sections import GeneratorSection
from titan_rl.wire import failpoints
from titan_rl.wire.model_shape import OF_ROUTER, ModelShape, SpecShape
from titan_rl.wire.parts import needed_part
from titan_rl.wire.reports import EngineStats
from titan_rl.wire.types import Completion, ContextScore, Finish, Request, Sampling

if TYPE_CHECKING:
    from torch import Tensor
    from vllm import CompletionOutput, RequestOutput
    from vllm.logprobs import FlatLogprobs


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineSettings(GeneratorSection):
    """The keys of [generator] without "auto" (and max_model_len never 0), and what a run derives for its engines."""

    dtype: DtypeChoice = "float32"
    enforce_eager: Switch = True
    async_scheduling: Switch = False
    kv_cache_memory_mb: int = 256  # 0: vLLM measures what gpu_memory_utilization leaves
    model_dir: str  # config.json; weights too under load_format "auto". Tokenizer and generation config are not read
    sleeps: bool = False  # shares its devices with another mesh: sleep() frees their memory
    seed: int = 0
    head_dtype: HeadDtype = "model"  # dtype of the logits: model.head_dtype
    records: tuple[str, ...] = ()  # side columns (wire/side_columns.py), by name
    adapters: EngineAdapters = field(default_factory=EngineAdapters)  # LoRA
    block_size: int = 32  # tokens of a block of the KV cache
    enable_prefix_caching: bool = True  # samples of a group share the KV cache of their prompt
    load_format: Literal["dummy", "auto"] = "dummy"  # weights come by weight sync; "auto" reads them from the folder
    images: str = ""  # folder of the files of requests' images, which the tower in model_dir reads; empty: text only
    shape: ModelShape | None = None  # shape of the model, to learn which weights fill what; None: nothing is synced


@dataclass(frozen=True, slots=True)
class EngineInfo:
    pid: int
    shapes: dict[str, tuple[int, ...]]  # live parameters of this rank
    runner: str = "V1"  # vLLM's model runner: "V2" on GPUs, which has another sampler


@dataclass(frozen=True, slots=True)
class Done:
    """A request whose last sample has finished, or that cannot be sampled."""

    id: str
    completions: list[Completion]  # in the order of the request's seeds; withdrawn samples have finish "abort"
    refused: str = ""  # why it cannot be sampled; then it has no completions


class Prefill(NamedTuple):
    tokens: int  # length of the sample's context when it entered the engine
    cached: int  # how many of them were in the prefix cache


@dataclass(slots=True)
class OpenRequest:
    """An unfinished request. Its samples' lists grow with each step."""

    request: Request
    samples: list[Completion]
    unfinished: dict[int, str]  # their ids in vLLM
    fresh: set[int]  # samples without a token from this engine
    prefills: dict[int, Prefill]  # every other unfinished sample's

    @classmethod
    def of(cls, request: Request) -> "OpenRequest":
        """Return a request none of whose samples is in vLLM yet."""
        if request.begun:
            samples = [
                Completion([*s.tokens], [*s.logprobs], [*s.versions], s.finish, "", [*s.context], _copies(s.extras))
                for s in request.begun
            ]
        else:
            samples = [Completion([], [], [], "abort") for _ in request.seeds]
        fresh = {i for i, sample in enumerate(samples) if sample.finish == "abort"}
        return cls(request, samples, {}, fresh, {})

    def cached(self, block: int) -> int:
        """Return how many tokens' keys and values the unfinished samples have; they share the context's full blocks.
        Those of a sample's last token are computed by the next step."""
        begun, context = self.unfinished.keys() - self.fresh, len(self.request.tokens)
        after_blocks = sum(context % block + len(self.samples[i].tokens) - 1 for i in begun)
        return after_blocks + context // block * block if begun else 0


class ColumnRecorder:
    """Records a side column of the samples of an engine, in the extras of their completions."""

    args: Mapping[str, Any] = {}
    """Arguments of the engine."""

    def begin(self, llm: Any) -> None:
        """Take note of the engine, which is built."""

    def request_args(self, id: str, sampling: Sampling) -> Mapping[str, Any]:
        """Return changed sampling parameters for a sample."""
        return {}

    def sampled(self, id: str, sample: Completion) -> None:
        """Record the token that a step has sampled."""

    def left(self, id: str, open: OpenRequest, index: int, last: "CompletionOutput | None" = None) -> None:
        """Record the tokens of a sample that leaves vLLM: with its `last` output, or before that."""

    def dropped(self, id: str) -> None:
        """Forget a sample that another one continues, which reads its tokens again."""


def _copies(extras: Mapping[str, Any]) -> dict[str, Any]:
    return {name: copy(value) for name, value in extras.items()}


def gpu_memory() -> tuple[int, int]:
    """Return the free bytes and all bytes of this rank's GPU; zeros where there is none."""
    import torch

    return torch.cuda.mem_get_info(int(os.environ.get("LOCAL_RANK", 0))) if torch.cuda.is_available() else (0, 0)


class Engine:
    def __init__(self, settings: EngineSettings) -> None:
        if settings.async_scheduling and settings.records:
            raise ValueError(f"expected no records with asynchronous scheduling, found {', '.join(settings.records)}")
        if not ENV.items() <= os.environ.items():
            raise RuntimeError("expected launch_env.ENV in this process's launch environment, found it missing")
        with without_gc():
            _quiet_logging()
            from vllm import EngineArgs, LLMEngine
            from vllm.exceptions import VLLMClientError
            from vllm.platforms import current_platform

            on_cpu = current_platform.is_cpu()
            if on_cpu:
                use_given_threads()
                vllm_cpu.patch()
            import_vllm_model(settings.model_dir)
        meet_in_file()
        args = engine_args(settings) | quantization_args(settings, on_cpu=on_cpu)
        if on_cpu:
            args |= vllm_cpu.engine_args()
        else:
            stay_near_gpu(int(os.environ.get("LOCAL_RANK", 0)))
            share = memory_share(settings, *gpu_memory())
            args |= {"enable_sleep_mode": settings.sleeps, "gpu_memory_utilization": share, **KEPT_LAYOUT}
        self._recorders = [needed_part(f"recorder {name}", "records")(on_cpu=on_cpu) for name in settings.records]
        for recorder in self._recorders:
            args |= recorder.args
        self._adapters = settings.adapters
        args |= self._adapters.engine_args(args, on_cpu=on_cpu)
        self._in_vllm: dict[str, tuple[OpenRequest, int]] = {}  # request and index of the samples that vLLM has
        self._drafts: Any = None
        if settings.drafts != "none":
            self._drafts = needed_part("drafts", "generator.drafts")(settings, self._in_vllm, on_cpu=on_cpu)
            self._recorders.append(self._drafts)
            args |= self._drafts.args
        self._images: Any = None
        if settings.images:
            self._images = needed_part("images of engines", "model.vision")(settings, on_cpu=on_cpu)
            args |= self._images.args
        self._llm: Any = LLMEngine.from_engine_args(EngineArgs(**args))
        config = self._llm.vllm_config
        for recorder in self._recorders:
            recorder.begin(self._llm)
        self._vocab_size: int = config.model_config.get_vocab_size()
        self._max_model_len: int = config.model_config.max_model_len
        self._block: int = settings.block_size if settings.enable_prefix_caching else 2**31  # tokens that samples share
        self._refusals = (ValueError, VLLMClientError)  # raised by this file, and by vLLM's validation of requests
        self._open: dict[str, OpenRequest] = {}
        self._ids = itertools.count()
        self._ended: list[Done] = []  # the next step returns them
        self._most_batches: int = config.max_concurrent_batches  # in flight between two steps, and one more
        self._in_flight = False  # True: vLLM may have launched a batch whose tokens no step has returned
        self._stats = EngineStats()
        slots = settings.adapters.slots
        self._salts = [0] * slots  # requests share keys and values in the prefix cache under equal salts only
        self.versions: list[int | None] = [None] * slots  # by slot; None: its weights are not known
        self.asleep = False
        self._adapters.begin(self._llm)
        self.offloads = settings.sleeps and not on_cpu  # sleep leaves nothing in the parameters
        self._buffers: dict[str, str] | None = None  # SHA-256 before the first sleep; None: it has not slept yet
        shape, loaded = settings.shape, settings.load_format == "auto"
        self._float32_ends = OF_ROUTER if shape is None else shape.halves(settings.dtype)
        self._given = self._images.begin(self._llm) if self._images is not None else set[str]()  # no sync writes them
        has_more = loaded and isinstance(shape, SpecShape)  # than the text model, such as a vision tower
        quantized = settings.quantization != "none"
        self._layout = None if shape is None or has_more else self._learned(shape, quantized=quantized)
        shapes = {name: tuple(p.shape) for name, p in self.params().items()}
        self.info = EngineInfo(os.getpid(), shapes, "V2" if config.use_v2_model_runner else "V1")

    @property
    def busy(self) -> bool:
        return bool(self._open or self._ended)

    @property
    def version(self) -> int | None:
        """Return the version of the first slot. Only a run of several policies has more."""
        return self.versions[0]

    @property
    def serves(self) -> bool:
        """Return True if there are weights to sample all open requests with. The first slot's syncs write the frozen
        weights, too."""
        wanted = {0} if None not in self.versions else {0, *(open.request.slot for open in self._open.values())}
        return None not in (self.versions[slot] for slot in wanted)

    def check(self, requests: Sequence[Request]) -> None:
        """Raise unless there are weights to sample with, and the id of every request is unique."""
        for slot in {request.slot for request in requests}:
            self._serving(slot)
        ids = set(self._open)
        for request in requests:
            if request.id in ids:
                raise ValueError(f"request {request.id}: an unfinished request has this id")
            ids.add(request.id)

    def add(self, requests: Sequence[Request]) -> None:
        """Put requests into the batch before the next step, as far as max_num_seqs and the KV cache allow. One that
        cannot be sampled exactly as specified is returned as refused by the next step; the others are not affected."""
        began = time.perf_counter()
        self.check(requests)
        for request in requests:
            try:
                if failpoints.hit("admit"):
                    raise ValueError("refused on order")
                if request.images and self._images is None:
                    raise ValueError("expected an engine that reads images (model.vision), found one without")
                if problem := problem_of(request, self._vocab_size, self._max_model_len):
                    raise ValueError(problem)
                self._add(request)
            except self._refusals as error:
                if open := self._open.pop(request.id, None):
                    self._drop([*open.unfinished.values()])
                self._ended.append(Done(request.id, [], str(error)))
            else:
                self._end(request.id)
        self._stats.seconds += time.perf_counter() - began

    def _add(self, request: Request) -> None:
        self._open[request.id] = open = OpenRequest.of(request)
        self._enqueue(open, sorted(open.fresh))

    def _enqueue(self, open: OpenRequest, samples: Iterable[int]) -> None:
        """Let vLLM sample the rest of these samples. Samples may be added again; their ids never are."""
        request, salt = open.request, str(self._salts[open.request.slot])
        adapter = self._adapters.request(request)
        for i in samples:
            begun = open.samples[i].tokens
            id = open.unfinished[i] = str(next(self._ids))
            self._in_vllm[id] = open, i
            changed = {k: v for r in self._recorders for k, v in r.request_args(id, request.sampling).items()}
            params = sampling_params(request.sampling, request.seeds[i], begun=len(begun), **changed)
            tokens = [*request.tokens, *begun]
            prompt: Any = {"type": "token", "prompt_token_ids": tokens, "cache_salt": salt}
            if self._images is not None:
                prompt = self._images.prompt(request, tokens, salt)
            self._llm.add_request(id, prompt, params, lora_request=adapter)

    def _drop(self, ids: Sequence[str]) -> None:
        """Take samples out of vLLM."""
        self._llm.abort_request([*ids])
        for id in ids:
            del self._in_vllm[id]
            for recorder in self._recorders:
                recorder.dropped(id)

    def step(self) -> list[Done]:
        """Sample one token for every sample in the batch, which the next step records if scheduling is asynchronous.
        Return the requests whose last sample finished, and the refused ones."""
        if not self.serves:
            raise RuntimeError(
                "expected a version of every policy with requests, found none: sync weights before sampling"
            )
        began = time.perf_counter()
        if self._in_vllm and not self.asleep:
            self._in_flight = self._most_batches > 1
            self._take_outputs()
        self._stats.seconds += time.perf_counter() - began
        self._stats.steps += 1
        return self.ended()

    def ended(self) -> list[Done]:
        """Return the requests that have ended and that no step has returned."""
        done, self._ended = self._ended, []
        return done

    def _take_outputs(self) -> None:
        outputs = self._llm.step()
        for output in outputs:
            self._extend(output)
        self._stats.max_batch = max(self._stats.max_batch, len(outputs))

    def _drain(self) -> None:
        """Take the tokens of batches in flight, which the current weights sampled. While vLLM is paused it launches
        nothing, and each step takes a batch."""
        if not self._in_flight:
            return
        began = time.perf_counter()
        self._llm.sleep(level=0, mode="keep")
        for _ in range(self._most_batches):
            self._take_outputs()
        self._llm.wake_up(["scheduling"])
        self._in_flight = False
        self._stats.seconds += time.perf_counter() - began

    def withdraw(self, ids: Iterable[str]) -> list[Done]:
        """End these requests now and return them: unfinished samples have finish "abort". Ids of requests that have
        ended are ignored."""
        wanted = [id for id in ids if id in self._open]
        if wanted:
            self._drain()
        opened = [open for id in wanted if (open := self._open.pop(id, None)) is not None]
        for open in opened:
            for i, id in open.unfinished.items():
                for recorder in self._recorders:
                    recorder.left(id, open, i)
        self._drop([sample for open in opened for sample in open.unfinished.values()])
        return [Done(open.request.id, open.samples) for open in opened]

    def params(self, slot: int = 0) -> "dict[str, Tensor]":
        """Return the live parameters, and the adapter in a slot, to be overwritten in place between suspend and
        set_version. What an engine of 16 bits has in 32, such as routers, is viewed as halves."""
        from titan_rl.actors.sync.halves import halves_of

        dtype: Any = self._llm.vllm_config.model_config.dtype

        def viewed(name: str, p: "Tensor") -> "Tensor":
            halved = name.endswith(self._float32_ends) and p.dtype.itemsize > dtype.itemsize
            return halves_of(p, dtype) if halved else p

        def live(model: Any) -> "dict[str, Tensor]":
            filled = self._layout.shapes if self._layout else ()
            buffers = [(name, b) for name, b in model.named_buffers() if name in filled]
            synced = {name: p for name, p in model.named_parameters() if name not in self._given}
            every = (*with_memory(synced).items(), *buffers)
            own = {name.replace(".base_layer.", "."): p.detach() for name, p in every}
            own = {name: viewed(name, p) for name, p in own.items()}
            return own | self._adapters.tensors(model, slot)

        (tensors,) = self._llm.apply_model(live)
        return tensors

    @property
    def layout(self) -> LiveLayout:
        """Return this rank's parameters, without adapters, and what fills them."""
        if self._layout is None:
            raise ValueError("expected EngineSettings.shape of an engine that a weight sync fills, found none")
        return self._layout

    def _learned(self, shape: ModelShape, *, quantized: bool) -> LiveLayout:
        """Return what fills this rank's parameters, and the buffers that vLLM's loader writes."""
        from titan_rl.actors.vllm.learned_plan import learned_layout

        return learned_layout(self._llm.vllm_config, shape, quantized=quantized, given=self._given)

    def _buffer_sums(self) -> dict[str, str]:
        (buffers,) = self._llm.apply_model(lambda model: dict(model.named_buffers()))
        return _sums(buffers.items())

    def sleep(self) -> None:
        """Stop sampling until the next `set_version`. On a GPU, free the KV cache and the weights: a sync writes all of
        them first. Unfinished samples continue; vLLM's default would abort them without an answer."""
        self._drain()
        self.asleep = True
        if self.offloads and self._buffers is None:
            self._buffers = self._buffer_sums()
        self._llm.sleep(level=2 if self.offloads else 0, mode="keep")

    def wake(self) -> None:
        """Bring back the parameters' memory, to be written. Buffers must be as before, because no sync writes them."""
        if self.asleep:
            self._llm.wake_up(None if self.offloads else ["scheduling"])
        if self.asleep and self._buffers:
            sums = self._buffer_sums()
            if lost := [name for name, sum in self._buffers.items() if sums[name] != sum]:
                raise RuntimeError(f"expected buffers as before vLLM's level-2 sleep, found {', '.join(lost)} changed")
            self._buffers = {}  # the first time is enough
        if self.asleep and self.offloads:
            self._adapters.begin(self._llm)
        self.asleep = False

    def suspend(self, slot: int = 0) -> None:
        """Refuse to sample with a slot until set_version, because its parameters are about to change."""
        self._drain()
        self.versions[slot] = None

    def set_version(self, version: int, *, keep: bool = False, slot: int = 0) -> None:
        """Serve a slot's weights as `version`. No request that is added later reads keys and values of older weights.

        By default the keys and values of unfinished samples are dropped too, and recomputed by the next step. With
        `keep` samples continue with them, at no cost; only samples without a token start again. With
        several slots, samples of the others are not touched, and this slot's are resumed as after another engine."""
        self._drain()  # as `suspend` has done, unless the weights stay
        self._adapters.check(self._llm)
        opened = [open for open in self._open.values() if open.request.slot == slot and not open.request.adapter]
        if not keep:
            self._stats.recomputed += sum(open.cached(self._block) for open in opened)
        if keep or len(self.versions) > 1:
            self._salts[slot] += 1
            again = [(open, sorted({*open.unfinished} & open.fresh if keep else open.unfinished)) for open in opened]
            self._drop([open.unfinished[i] for open, samples in again for i in samples])
            for open, samples in again:
                self._enqueue(open, samples)
        else:
            self._llm.reset_prefix_cache(reset_running_requests=True)
            if self._images is not None:
                self._llm.reset_encoder_cache()  # has features of images by trained parts of a tower
        self.versions[slot] = version

    def fingerprint(self) -> dict[str, str]:
        """Return the SHA-256 of every live parameter, and of each slot's adapter."""
        sums = _sums(self.params().items())
        for slot in range(1, len(self.versions)):
            sums |= _sums((name, tensor) for name, tensor in self.params(slot).items() if name not in sums)
        return sums

    def pixel_sums(self, images: Sequence[str]) -> list[str]:
        """Return the hash of each image's pixels in this engine."""
        return self._images.files.sums(images)

    def stats(self) -> EngineStats:
        return replace(self._stats, drafted=self._drafts.drafted if self._drafts else 0)

    def _serving(self, slot: int) -> int:
        if not 0 <= slot < len(self.versions):
            raise ValueError(f"expected a slot below {len(self.versions)}, found {slot}")
        if (version := self.versions[slot]) is None:
            raise RuntimeError("expected a policy version, found none: sync weights before sampling")
        return version

    def _end(self, id: str) -> None:
        """End a request if its last sample has finished."""
        if not self._open[id].unfinished:
            self._ended.append(Done(id, self._open.pop(id).samples))

    def _extend(self, output: "RequestOutput") -> None:
        """Append what a step sampled for one sample."""
        from vllm.logprobs import FlatLogprobs

        open, index = self._in_vllm[output.request_id]
        version = open.request.version
        if version is None:
            version = self._serving(open.request.slot)
        sample, (delta,) = open.samples[index], output.outputs
        count = len(delta.token_ids)
        if index not in open.prefills:
            prompt = output.prompt_token_ids or ()
            open.prefills[index] = prefill = Prefill(len(prompt), output.num_cached_tokens or 0)
            self._stats.read_tokens += prefill.tokens - prefill.cached
            open.fresh.discard(index)
            if (scores := output.prompt_logprobs) is not None:
                assert isinstance(scores, FlatLogprobs), "flat_logprobs is asked for"
                sample.context.extend(context_scores(scores))
        self._stats.tokens += count
        self._stats.accepted += max(0, count - 1)
        sample.tokens.extend(delta.token_ids)
        assert isinstance(delta.logprobs, FlatLogprobs), "flat_logprobs is asked for"
        sample.logprobs.extend(delta.logprobs.logprobs)
        sample.versions.extend([version] * count)
        for recorder in self._recorders:
            recorder.sampled(output.request_id, sample)
        if delta.finish_reason is not None:
            for recorder in self._recorders:
                recorder.left(output.request_id, open, index, delta)
            open.samples[index] = replace(sample, finish=cast("Finish", delta.finish_reason))
            del self._in_vllm[open.unfinished.pop(index)]
            prefill = open.prefills.pop(index)
            self._stats.prompt_tokens += prefill.tokens
            self._stats.cached_tokens += prefill.cached
            self._end(open.request.id)


def context_scores(scores: "FlatLogprobs") -> list[ContextScore]:
    """Return vLLM's scores of a context from its second token on: each token's log-prob, and the most likely token."""
    starts = scores.start_indices[1:]
    return [ContextScore(scores.logprobs[i], scores.token_ids[i + 1], scores.logprobs[i + 1]) for i in starts]


def with_memory(params: "dict[str, Tensor]") -> "dict[str, Tensor]":
    """Leave out parameters that are views of others, which latent attention makes after loading."""
    largest = dict[int, Any]()
    for p in params.values():
        held = largest.get(at := p.untyped_storage().data_ptr())
        largest[at] = p if held is None or p.numel() > held.numel() else held
    return {n: p for n, p in params.items() if not p.numel() or largest[p.untyped_storage().data_ptr()] is p}


def _sums(tensors: "Iterable[tuple[str, Tensor]]") -> dict[str, str]:
    from torch import uint8

    return {name: hashlib.sha256(t.reshape(-1).view(uint8).cpu().numpy().data).hexdigest() for name, t in tensors}


def _quiet_logging() -> None:
    """Log nothing below vLLM's configured level, which vLLM ignores until it has loaded its logging configuration; and
    do not dump the whole batch before an error, since its traceback reaches the controller anyway."""
    logging.getLogger("vllm").setLevel(os.environ.get("VLLM_LOGGING_LEVEL", "INFO"))
    logging.getLogger("vllm.logging_utils.dump_input").setLevel(logging.CRITICAL)
