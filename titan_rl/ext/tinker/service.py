"""Sessions of clients, the models that they train, the samplers that they publish, and answers until they are fetched.

session ─┬─ model ── calls in the order of their numbers ── trainers, one call at a time
         └─ sampler ── folder of an adapter ── generators

A model's first call creates it; it has number 0. A call that is refused has taken its turn.
"""

import asyncio
import json
import math
import re
import secrets
import shutil
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

from titan_rl.batch.packing import UpTo
from titan_rl.config.plain_files import text_of
from titan_rl.ext.adapters.layers import adaptable, targets
from titan_rl.ext.tinker import messages
from titan_rl.ext.tinker.messages import BadInput
from titan_rl.ext.tinker.served import FACTS, AdapterSpec
from titan_rl.meshes.generator_mesh import GeneratorMesh
from titan_rl.meshes.model_mesh import ModelMesh
from titan_rl.preflight.plan import Setup
from titan_rl.record.run_folder import folder_lost
from titan_rl.wire.errors import RequestRefused, RunError
from titan_rl.wire.seeds import derive
from titan_rl.wire.types import Request

SESSION_SECONDS = 600.0  # a session without a heartbeat, of which the SDK sends one every 10 s, ends after this time
SWEEP_SECONDS = 5.0
ANSWER_SECONDS = 120.0  # an answer that was fetched can be fetched again for this long, if the first was lost
MOST_MODELS = 64
CHUNK_MICROBATCHES = 4  # the SDK sends more data in several calls, each of which has a deadline
TARGET_BYTES = 16  # a token, its target and its weight, in a request
SNAPSHOTS = 64  # unnamed samplers of a model whose weights are kept
MODEL = re.compile(r"[0-9a-f]{32}:train:\d{1,9}")
NAME = re.compile(r"[A-Za-z0-9][\w.-]{0,127}")
PATH = re.compile(rf"tinker://({MODEL.pattern})/(weights|sampler_weights)/({NAME.pattern})")
KINDS = {"weights": "training", "sampler_weights": "sampler"}

Answer = Mapping[str, Any] | bytes  # in JSON, or a message of Protocol Buffers
Work = Callable[[], Awaitable[Answer]]


class Failed(Exception):
    """An accepted call failed. The server is not affected."""


class NotFound(Exception):
    pass


@dataclass(slots=True)
class Pending:
    """An accepted call."""

    answer: "asyncio.Future[Answer]"
    fetched: float = 0.0  # when its answer was fetched first


@dataclass(slots=True)
class Session:
    id: str
    seen: float = field(default_factory=time.monotonic)
    models: "dict[str, Model]" = field(default_factory=dict)
    samplers: "list[str]" = field(default_factory=list)


@dataclass(slots=True)
class Model:
    id: str
    spec: AdapterSpec
    metadata: Mapping[str, Any]
    session: Session
    next: int = 0  # number of the call that comes next
    waiting: "dict[int, tuple[Pending, Work] | None]" = field(default_factory=dict)
    calls: "asyncio.Queue[tuple[Pending, Work]]" = field(default_factory=asyncio.Queue)
    worker: "asyncio.Task[None] | None" = None
    created: bool = False  # on the trainers
    steps: int = 0
    saved: int = 0  # steps when it was saved last
    snapshots: list[Path] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Sampler:
    path: str = ""  # tinker://...; "": the base
    folder: Path | None = None


class Service:
    def __init__(
        self,
        setup: Setup,
        base: Path,
        trainers: ModelMesh,
        generators: GeneratorMesh,
        warn: Callable[[str], None],
    ) -> None:
        """`base`: the folder of the frozen weights, whose path is also the base model's name."""
        self._setup, self._trainers, self._generators, self._warn = setup, trainers, generators, warn
        self.base, self.tokenizer = str(base), setup.tokenizer
        self.root, self.family = setup.folder / "tinker", setup.shape.family
        self.sessions = dict[str, Session]()
        self.models = dict[str, Model]()
        self.samplers = dict[str, Sampler]()
        self._pending = dict[str, Pending]()
        self._turn = asyncio.Lock()  # the trainers carry out one call at a time
        self._tasks = set[asyncio.Task[Any]]()
        self._read = Counter[Path | None]()  # open requests of each sampler's folder
        self._removed = set[Path]()  # folders to remove after their last request: an engine may still read them
        self.failed: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        config = setup.config
        self.context = config.generator.max_model_len or config.training.seq_len
        rows = setup.resolved.training.local_batch_size
        self._rows = config.training.local_batch_size or UpTo(rows)
        self.chunk_bytes = CHUNK_MICROBATCHES * TARGET_BYTES * config.training.seq_len * rows * trainers.dp

    # Sessions

    def open_session(self) -> Session:
        session = Session(secrets.token_hex(16))
        self.sessions[session.id] = session
        return session

    def session(self, id: Any) -> Session:
        session = self.sessions.get(id) if isinstance(id, str) else None
        if session is None:
            raise NotFound(f"session_id: expected a session that is alive, found {id!r}")
        session.seen = time.monotonic()
        return session

    async def run(self) -> None:
        """End sessions that send no heartbeats, until a mesh fails or the folder is removed."""
        before = self._setup.folder.stat()
        while True:
            await asyncio.wait({self.failed}, timeout=SWEEP_SECONDS)
            if (lost := folder_lost(self._setup.folder, before)) is not None:
                self.fail(lost)
            if self.failed.done():
                self.failed.result()
            now = time.monotonic()
            for session in [s for s in self.sessions.values() if now - s.seen > SESSION_SECONDS]:
                await self.end_session(session)
            for id in [id for id, p in self._pending.items() if p.fetched and now - p.fetched > ANSWER_SECONDS]:
                del self._pending[id]

    async def end_session(self, session: Session) -> list[str]:
        """Save the session's models that have taken steps since their last save; return the paths. Forget it."""
        try:
            paths = [path for model in [*session.models.values()] for path in await self.unload(model)]
        except Failed as error:  # a full disk: nothing is lost, and it is tried again
            self._warn(f"session {session.id} stays: {error}")
            session.seen = time.monotonic()
            return []
        self.sessions.pop(session.id, None)
        for id in session.samplers:
            self.samplers.pop(id, None)
        for id in [id for id in self._pending if id.startswith(session.id)]:
            if not (answer := self._pending.pop(id).answer).done():
                answer.cancel()
        return paths

    async def close(self) -> list[str]:
        """End all sessions, and return the paths of the models that were saved. Sessions whose models cannot be saved
        stay."""
        return [path for session in [*self.sessions.values()] for path in await self.end_session(session)]

    def refuse_unsaved(self) -> None:
        """Raise RunError if a session is left after `close`."""
        if lost := [model.id for session in self.sessions.values() for model in session.models.values()]:
            raise RunError(
                f"{len(lost)} models could not be saved: {', '.join(lost)}",
                f"Steps since their last save are lost. Expected free space, and permission to write in {self.root}.",
            )

    def fail(self, error: RunError) -> None:
        """Give every call that waits an error: the server is about to end."""
        if not self.failed.done():
            self.failed.set_exception(error)
            self.failed.exception()  # read once, or asyncio reports that no task has
        for pending in self._pending.values():
            if not pending.answer.done():
                pending.answer.set_exception(error)

    # Calls of a model

    def call(self, prepare: Callable[[Model, Any], Work], body: Any, model_id: Any = None, seq: Any = None) -> str:
        """Check a call and put it in its turn; return the id of its answer. One that is sent again has the same answer,
        and one that is refused has had its turn."""
        model = self.model(body.get("model_id") if model_id is None else model_id)
        seq = messages.integer(body, "", "seq_id", model.next, 0, 2**31) if seq is None else seq
        if f"{model.id}:{seq}" in self._pending:
            return f"{model.id}:{seq}"
        try:
            work = prepare(model, body)
        except Exception:  # also an unforeseen one: a call that never came would stop the model for ever
            if seq >= model.next:
                model.waiting.setdefault(seq, None)
                self._advance(model)
            raise
        return self._accept(model, seq, work)

    def _accept(self, model: Model, seq: int, work: Work) -> str:
        if seq < model.next or seq in model.waiting:
            raise BadInput(f"seq_id: expected {model.next} or more, found {seq}, which was answered or refused")
        id, pending = f"{model.id}:{seq}", Pending(asyncio.get_running_loop().create_future())
        self._pending[id] = pending
        model.waiting[seq] = pending, work
        self._advance(model)
        return id

    def _advance(self, model: Model) -> None:
        while model.next in model.waiting:
            if (call := model.waiting.pop(model.next)) is not None:
                model.calls.put_nowait(call)
            model.next += 1
        if model.worker is None:
            model.worker = self._task(self._work(model))

    async def _work(self, model: Model) -> None:
        while True:
            pending, work = await model.calls.get()
            async with self._turn:
                await self._answer(pending, work)

    async def _answer(self, pending: Pending, work: Work) -> None:
        try:
            answer = await work()
        except RunError as error:
            self.fail(error)
        except Exception as error:
            if not pending.answer.done():
                pending.answer.set_exception(error)
        else:
            if not pending.answer.done():
                pending.answer.set_result(answer)

    def _task(self, work: Awaitable[Any]) -> "asyncio.Task[Any]":
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def fetch(self, id: Any, seconds: float) -> Answer | None:
        """Return an answer, or None if there is none within `seconds`. Raise why its call failed."""
        pending = self._pending.get(id) if isinstance(id, str) else None
        if pending is None:
            raise NotFound(f"request_id: expected a call that is being answered, found {id!r}")
        await asyncio.wait({pending.answer}, timeout=seconds)
        if not pending.answer.done():
            return None
        pending.fetched = pending.fetched or time.monotonic()
        if pending.answer.cancelled():
            raise NotFound(f"request_id: the session of {id!r} has ended")
        return pending.answer.result()

    # Models

    def model(self, id: Any) -> Model:
        model = self.models.get(id) if isinstance(id, str) else None
        if model is None:
            raise NotFound(f"model_id: expected a model that is in use, found {id!r}")
        model.session.seen = time.monotonic()
        return model

    def create_model(self, body: Mapping[str, Any]) -> str:
        session = self.session(body.get("session_id"))
        self.check_base(body.get("base_model"))
        if body.get("lora_config") is None:
            raise BadInput("lora_config: expected a LoraConfig, because adapters alone are trained, found none")
        kind = messages.mapping(body, "optimizer_config").get("type", "adamw")
        if kind != "adamw":
            raise BadInput(f"optimizer_config: expected adamw, found {kind!r}")
        spec = self._spec(messages.mapping(body, "lora_config"))
        seq = messages.integer(body, "", "model_seq_id", None, 0, 10**9)
        return self._begin(session, seq, spec, messages.mapping(body, "user_metadata"), None)

    def _spec(self, lora: Mapping[str, Any]) -> AdapterSpec:
        config, shape = self._setup.config, self._setup.shape
        rank = messages.integer(lora, "lora_config.", "rank", None, 1, config.lora.rank)
        left_out = [name for name in ("attn", "mlp") if lora.get(f"train_{name}") is False]
        layers = adaptable(shape)
        chosen = [t for t in targets(config.lora, shape) if not any(name in layers[t] for name in left_out)]
        if not chosen:
            raise BadInput("lora_config: expected train_attn or train_mlp: unembeddings have no adapter here")
        seed = messages.integer(lora, "lora_config.", "seed", config.debug.seed, -(2**63), 2**63)
        return AdapterSpec(rank, config.lora.alpha, tuple(chosen), seed % 2**63)

    def _begin(
        self,
        session: Session,
        seq: int,
        spec: AdapterSpec,
        metadata: Mapping[str, Any],
        load: tuple[str, Path, bool] | None,
    ) -> str:
        """Begin a model, with the state of a folder if there is one to load."""
        id = f"{session.id}:train:{seq}"
        if id in self.models:
            return f"{id}:0"
        if len(self.models) >= MOST_MODELS:
            raise BadInput(f"expected at most {MOST_MODELS} models in use: end the session of another one")
        model = self.models[id] = session.models[id] = Model(id, spec, metadata, session)

        async def work() -> Answer:
            await self._trainers.served("create", id, spec)
            model.created = True
            if load is None:
                return {"model_id": id, "type": "create_model"}
            return await self._load(model, *load)

        return self._accept(model, 0, work)

    def forward_backward(self, model: Model, message: bytes) -> Work:
        vocab, longest = self._setup.shape.vocab_size, self._setup.config.training.seq_len
        call = messages.forward_backward(message, vocab, longest)

        async def work() -> Answer:
            dp, pad = self._trainers.dp, self.tokenizer.pad
            packed = await asyncio.to_thread(messages.Packed.of, call.data, dp, longest, self._rows, pad)
            rows = await self._trainers.served(
                "forward_backward", model.id, call.loss, call.backward, batches=packed.batches
            )
            logprobs = packed.logprobs([answers for answers, _ in rows])
            return messages.forward_backward_output(logprobs, call.data, call.loss, sum(loss for _, loss in rows))

        return work

    def optim_step(self, model: Model, body: Mapping[str, Any]) -> Work:
        step = messages.adam_step(body)

        async def work() -> Answer:
            norm = max(await self._trainers.served("optim_step", model.id, step))
            if not math.isfinite(norm):
                raise Failed("the gradients are not finite: no step was taken, and they are dropped")
            model.steps += 1
            return {"metrics": {"grad_norm:mean": norm, "lr:mean": step.lr}}

        return work

    def save_weights(self, model: Model, body: Mapping[str, Any]) -> Work:
        path = self._new_path(model, "weights", body, replaces=bool(body.get("overwrite")))
        metadata = messages.mapping(body, "user_metadata")

        async def work() -> Answer:
            await self._save(model, path, metadata, optimizer=True)
            model.saved = model.steps
            return {"path": path, "type": "save_weights"}

        return work

    def save_weights_for_sampler(self, model: Model, body: Mapping[str, Any]) -> Work:
        path, number = self._new_path(model, "sampler_weights", body), body.get("sampling_session_seq_id")
        metadata = messages.mapping(body, "user_metadata")

        async def work() -> Answer:
            await self._save(model, path, metadata, optimizer=False)
            if body.get("path") is not None:
                return {"path": path, "type": "save_weights_for_sampler"}
            model.snapshots.append(self.folder(path))
            if len(model.snapshots) > SNAPSHOTS:
                self.remove(model.snapshots.pop(0))
            sampler = self._add_sampler(model.session, number, Sampler(path, self.folder(path)))
            return {"sampling_session_id": sampler, "type": "save_weights_for_sampler"}

        return work

    def _new_path(self, model: Model, kind: str, body: Mapping[str, Any], *, replaces: bool = False) -> str:
        name = f"unnamed-{secrets.token_hex(8)}" if body.get("path") is None else messages.named(body, "path")
        if not NAME.fullmatch(name):
            raise BadInput(f"path: expected a name of letters, digits and _.-, found {name!r}")
        path = f"tinker://{model.id}/{kind}/{name}"
        if self.folder(path).exists() and not replaces:
            raise BadInput(f"path: expected a new name, or overwrite, found {name!r}, which exists")
        return path

    async def _save(self, model: Model, path: str, metadata: Mapping[str, Any], *, optimizer: bool) -> None:
        facts = {
            "path": path,
            "base_model": self.base,
            "time": datetime.now(UTC).isoformat(),
            "steps": model.steps,
            "user_metadata": dict(metadata),
            "run_metadata": dict(model.metadata),
        }
        problems = await self._trainers.served("save", model.id, str(self.folder(path)), facts, optimizer)
        if any(problems):
            raise Failed(f"{path} cannot be saved: {max(problems)}")

    def load_weights(self, model: Model, body: Mapping[str, Any]) -> Work:
        path, folder, spec = self._state(body)
        same = replace(spec, seed=model.spec.seed)
        if same != model.spec:
            raise BadInput(f"path: expected adapters like this model's, {model.spec}, found {same} in {path}")
        return lambda: self._load(model, path, folder, bool(body.get("optimizer")))

    def create_by_loading(self, body: Mapping[str, Any]) -> str:
        """Create a model with a saved state."""
        session = self.session(body.get("session_id"))
        path, folder, spec = self._state(body)
        if body.get("base_model") is not None:
            self.check_base(body["base_model"])
        seq = messages.integer(body, "", "model_seq_id", None, 0, 10**9)
        metadata = messages.mapping(body, "user_metadata") or self.saved(path)[1]["run_metadata"]
        return self._begin(session, seq, spec, metadata, (path, folder, bool(body.get("optimizer"))))

    async def _load(self, model: Model, path: str, folder: Path, optimizer: bool) -> Answer:
        problems = await self._trainers.served("load", model.id, str(folder), optimizer)
        if any(problems):
            raise Failed(f"{path} cannot be loaded: {max(problems)}")
        return {"path": path, "model_id": model.id, "type": "load_weights"}

    def _state(self, body: Mapping[str, Any]) -> tuple[str, Path, AdapterSpec]:
        path, most = messages.named(body, "path"), self._setup.config.lora.rank
        folder, facts = self.saved(path)
        if Path(facts["base_model"]).name != Path(self.base).name or facts["rank"] > most:
            found = f"rank {facts['rank']} over {facts['base_model']}"
            raise BadInput(f"path: expected adapters of rank {most} or less over {self.base}, found {found}")
        if body.get("optimizer") and "/weights/" not in path:
            raise BadInput(f"path: expected weights that save_state wrote, which have an optimizer, found {path}")
        return path, folder, AdapterSpec(facts["rank"], facts["alpha"], tuple(facts["targets"]), facts["seed"])

    async def unload(self, model: Model) -> list[str]:
        """End a model. Save it if it has taken steps since it was saved last, and return the path."""
        paths = []
        async with self._turn:
            if model.created and model.steps > model.saved:
                path = f"tinker://{model.id}/weights/unsaved-{model.steps}"
                await self._save(model, path, {}, optimizer=True)
                paths.append(path)
            if model.worker is not None:
                model.worker.cancel()
            self.models.pop(model.id, None)
            model.session.models.pop(model.id, None)
            if model.created:
                await self._trainers.served("drop", model.id)
        for folder in model.snapshots:
            self.remove(folder)
        return paths

    # Samplers

    def _add_sampler(self, session: Session, seq: Any, sampler: Sampler) -> str:
        id = f"{session.id}:sample:{seq}"
        self.samplers[id] = sampler
        session.samplers.append(id)
        return id

    def create_sampler(self, body: Mapping[str, Any]) -> str:
        session = self.session(body.get("session_id"))
        seq = messages.integer(body, "", "sampling_session_seq_id", None, 0, 10**9)
        if body.get("model_path") is None:
            self.check_base(body.get("base_model"))
            return self._add_sampler(session, seq, Sampler())
        path = messages.named(body, "model_path")
        folder, _ = self.saved(path)
        return self._add_sampler(session, seq, Sampler(path, folder))

    def sampler(self, id: Any) -> Sampler:
        sampler = self.samplers.get(id) if isinstance(id, str) else None
        if sampler is None:
            raise NotFound(f"sampling_session_id: expected a sampler that is in use, found {id!r}")
        return sampler

    def sample(self, body: Mapping[str, Any]) -> tuple[str, list[str]]:
        """Begin to sample; return the id of the answer, and of each sequence."""
        sampler = self.sampler(name := body.get("sampling_session_id"))
        self.session(str(name).partition(":")[0])
        seq = messages.integer(body, "", "seq_id", None, 0, 2**63)
        count = messages.integer(body, "", "num_samples", 1, 1, messages.MOST_SAMPLES)
        tokens = messages.prompt_of(body, self._setup.shape.vocab_size, self.context)
        sampling, seed, stops = messages.sampling_of(
            body, self.context - len(tokens), self._setup.sampling.stop_token_ids, self.tokenizer.encode
        )
        if sampler.folder and (not sampler.folder.is_dir() or sampler.folder in self._removed):
            raise NotFound(f"sampling_session_id: the weights of {sampler.path} were removed: save them under a name")
        id = f"{name}:{seq}"
        sequences = [f"{id}:{i}" for i in range(count)]
        if id in self._pending:
            return id, sequences
        first = secrets.randbits(62) if seed is None else seed
        seeds = [derive(first, "sample", i) % 2**31 for i in range(count)]
        scored = messages.integer(body, "", "prompt_logprobs_last_n", len(tokens), 1, len(tokens))

        async def work() -> Answer:
            request = Request(id, tokens, seeds, sampling, adapter=str(sampler.folder or ""))
            try:
                completions = await self._generators.generate(request)
            except RequestRefused as error:
                raise Failed(str(error)) from error
            finally:
                self._read[sampler.folder] -= 1
                if sampler.folder in self._removed:
                    self.remove(sampler.folder)
            scores = [math.nan, *(score.logprob for score in completions[0].context)]
            scores[: len(tokens) - scored] = [math.nan] * (len(tokens) - scored)
            decode = partial(self.tokenizer.decode, skip_special=False)
            ended = [messages.ended_by_text(each, stops, decode) for each in completions]
            return messages.sample_response(ended, scores if sampling.scores_context else None)

        self._read[sampler.folder] += 1
        self._pending[id] = pending = Pending(asyncio.get_running_loop().create_future())
        self._task(self._answer(pending, work))
        return id, sequences

    # Files

    def folder(self, path: str) -> Path:
        """Return the folder of a path, which may not exist."""
        if (parts := PATH.fullmatch(path)) is None:
            raise BadInput(f"expected a path tinker://MODEL/weights/NAME or .../sampler_weights/NAME, found {path!r}")
        return self.root.joinpath(*parts.groups())

    def remove(self, folder: Path) -> None:
        """Remove saved weights, now or when no request needs them."""
        self._removed.add(folder)
        if not self._read[folder]:
            self._removed.discard(folder)
            shutil.rmtree(folder, ignore_errors=True)

    def saved(self, path: str) -> tuple[Path, Mapping[str, Any]]:
        folder = self.folder(path)
        try:
            return folder, json.loads(text_of(folder / FACTS))
        except (OSError, ValueError) as error:
            raise NotFound(f"expected weights at {path}, found none in {folder}") from error

    def checkpoints(self, model: str) -> Iterator[dict[str, Any]]:
        """Yield a model's checkpoints, as the SDK lists them."""
        for kind, name in KINDS.items():
            for file in sorted(self.root.glob(f"{model}/{kind}/[!.]*/{FACTS}")):
                facts = json.loads(text_of(file))
                yield {
                    "checkpoint_id": f"{kind}/{file.parent.name}",
                    "checkpoint_type": name,
                    "time": facts["time"],
                    "tinker_path": facts["path"],
                    "size_bytes": sum(each.stat().st_size for each in file.parent.iterdir()),
                    "user_metadata": facts["user_metadata"],
                }

    def training_run(self, id: str) -> dict[str, Any]:
        checkpoints = [*self.checkpoints(id)] if MODEL.fullmatch(id) else []
        model = self.models.get(id)
        if model is None and not checkpoints:
            raise NotFound(f"expected a training run with weights, found {id!r}")
        facts = self.saved(checkpoints[-1]["tinker_path"])[1] if model is None else {}
        last = {checkpoint["checkpoint_type"]: checkpoint for checkpoint in checkpoints}
        return {
            "training_run_id": id,
            "base_model": self.base,
            "model_owner": "local",
            "is_lora": True,
            "lora_rank": model.spec.rank if model else facts["rank"],
            "last_request_time": datetime.now(UTC).isoformat() if model else facts["time"],
            "last_checkpoint": last.get("training"),
            "last_sampler_checkpoint": last.get("sampler"),
            "user_metadata": {k: str(v) for k, v in (model.metadata if model else facts["run_metadata"]).items()},
        }

    def check_base(self, name: Any) -> None:
        """Refuse a base model that is not this server's, which goes by its folder or the folder's name."""
        last = str(name).rstrip("/").rpartition("/")[2].lower()
        if not isinstance(name, str) or last != Path(self.base).name.lower():
            raise BadInput(f"base_model: expected {self.base}, or a name that ends like it, found {name!r}")
