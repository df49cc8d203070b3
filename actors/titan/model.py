"""One rank's share of a TorchTitan model: built, parallelized, initialized, run forward, read and written.

TitanModel needs torchrun's environment variables, but not Monarch. Every role is one: the policy and the critic
together with an optimizer (phase.py); the reference, the teacher and the reward model alone.
"""

import json
import math
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageWriter
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, Replicate, Shard
from torchtitan.config import (
    CommConfig,
    CompileConfig,
    DebugConfig,
    OverrideConfig,
    ParallelismConfig,
    TrainingConfig,
    apply_overrides,
)
from torchtitan.distributed import ParallelDims
from torchtitan.distributed import utils as dist_utils
from torchtitan.distributed.activation_checkpoint import FullAC, SelectiveAC
from torchtitan.distributed.compile import apply_compile
from torchtitan.protocols.model_spec import ModelSpec
from torchtitan.tools import utils as titan_utils

from titan_rl.actors.imports import use_given_threads
from titan_rl.actors.meeting import meet_in_file
from titan_rl.actors.numa import stay_near_gpu
from titan_rl.actors.sync.halves import Halves
from titan_rl.actors.sync.held_shards import shards_of, whole
from titan_rl.actors.titan import (
    compiled_blocks,
    document_attention,
    experts,
    flash_attention,
    heads,
    private,
    titan_cpu,
)
from titan_rl.actors.titan.activation_offload import OffloadAC
from titan_rl.actors.titan.adaptation import Adaptation, adaptation_of
from titan_rl.actors.titan.compute_copies import ComputeCopies
from titan_rl.actors.titan.document_masks import Attended
from titan_rl.actors.titan.idefics3 import SeenImages
from titan_rl.actors.titan.row_parts import RowParts, row_parts, whole_rows
from titan_rl.actors.titan.shard_reader import other_tensors, read_shards
from titan_rl.actors.titan.spec import adapter, build_spec, hf_names, plain
from titan_rl.config import sections
from titan_rl.config.auto import resolved, without_fsdp
from titan_rl.config.sections import Config, LoraSection
from titan_rl.kernels import cpu_matmul
from titan_rl.wire import weight_plan
from titan_rl.wire.gpus import require_planned_device
from titan_rl.wire.model_shape import HF_VALUE_HEAD, ROUTE_BIAS, ModelShape, SpecShape, planned
from titan_rl.wire.parts import needed_part
from titan_rl.wire.side_columns import RankPart, side_column
from titan_rl.wire.types import IMAGES, ImagePlace, Rows, entries

FILE_BYTES = 5 << 30


@dataclass(kw_only=True, slots=True)
class TitanConfig:
    """The sections of a TorchTitan config that are read to build and parallelize a model."""

    parallelism: ParallelismConfig
    training: TrainingConfig
    debug: DebugConfig
    compile: CompileConfig
    comm: CommConfig


def titan_config(config: Config, parallelism: sections.ParallelismSection) -> TitanConfig:
    # spmd_backend: TorchTitan's default needs a newer torch than vLLM's pin allows. To TorchTitan the ranks that share
    # rows are further shards (see row_parts.py).
    seen = replace(parallelism, data_parallel_shard_degree=parallelism.shards, context_parallel_degree=1)
    return TitanConfig(
        parallelism=shared_keys(ParallelismConfig, seen, spmd_backend="partial_dtensor"),
        training=shared_keys(TrainingConfig, config.training),
        debug=shared_keys(DebugConfig, config.debug),
        compile=shared_keys(CompileConfig, config.compile, components=["model"]),
        comm=shared_keys(CommConfig, config.comm, trace_buf_size=0),
    )


def shared_keys(kind: type[Any], section: Any, **others: Any) -> Any:
    """Build `kind` from the keys that it has in common with our section, and from `others`, which take precedence."""
    names = {field.name for field in fields(kind)} & {field.name for field in fields(section)}
    return kind(**{name: getattr(section, name) for name in names} | others)


def overridden_spec(shape: ModelShape, config: Config, titan: TitanConfig, device_type: str) -> ModelSpec:
    """Return the spec of `shape` with our attention and head, and with the overrides of the config."""
    spec = build_spec(shape, seq_len=config.training.seq_len)
    private.update_from_config(spec.model, titan)  # fills sharding configs, which overrides copy
    compute, sinks = config.training.mixed_precision_param, shape.parts.sinks
    attention = document_attention.overrides(device_type, compute, sinks=sinks)
    routed = experts.OVERRIDES if shape.experts else []
    imports = [heads.OVERRIDES[shape.head], *attention, *routed]
    apply_overrides(OverrideConfig(imports=[*imports, *config.override.imports]), spec.model)
    adaptation_of(config).convert(spec, shape)  # last: overrides look for the very classes of configs it replaces
    return spec


def sharded_model(spec: ModelSpec, config: Config, titan: TitanConfig, dims: ParallelDims, *, fsdp: bool = True) -> Any:
    """Build the model on the meta device, and let TorchTitan parallelize it over the ranks of `dims`; on one, perhaps
    without FSDP2."""
    recompute = {
        "none": None,
        "selective": SelectiveAC.Config(),
        "full": FullAC.Config(),
        "offload": OffloadAC.Config(),
    }
    with torch.device("meta"), titan_utils.set_default_dtype(getattr(torch, config.training.dtype)):
        model = spec.model.build()
    adaptation_of(config).freeze(model)
    checkpointing = recompute[config.activation_checkpoint.mode]
    if not fsdp:  # as TorchTitan's function does on one rank
        if checkpointing is not None:
            checkpointing.build(dump_folder=config.job.dump_folder).apply(model)
        if titan.compile.enable:
            apply_compile(model, compile_config=titan.compile, parallel_dims=dims)
        return model
    return spec.parallelize_fn(
        model,
        parallel_dims=dims,
        training=titan.training,
        parallelism=titan.parallelism,
        compile_config=titan.compile,
        ac_config=checkpointing,
        dump_folder=config.job.dump_folder,
    )


class TitanModel:
    _copies: ComputeCopies | None = None  # one rank has them in place of FSDP2
    _tower: Any = None  # reads images; not trained, and no part of the model

    def __init__(self, config: Config, shape: ModelShape, parallelism: sections.ParallelismSection) -> None:
        self.shape = shape
        require_planned_device(torch.cuda.is_available())
        titan_cpu.use_cpu()
        cpu_matmul.use_fastest()
        flash_attention.use_installed()
        document_attention.forbid_tf32()
        use_given_threads()
        self.device = titan_utils.get_local_device()
        titan_utils.device_module.set_device(self.device)
        if self.device.type == "cuda":
            stay_near_gpu(self.device.index or 0)
        self.config = config = resolved(config, self.device.type)
        self.titan = titan_config(config, parallelism)
        self.adaptation = adaptation_of(config)
        if self.titan.compile.enable:
            compiled_blocks.use_few_graphs()
        meet_in_file()
        world_size = dist_utils.init_distributed(
            self.titan.comm,
            enable_cpu_backend=self._offloads,  # gradients are in host memory when their norm is taken
            base_folder=config.job.dump_folder,
        )
        self.dims = ParallelDims.from_config(self.titan.parallelism, world_size)
        dist_utils.set_spmd_backend(self.titan.parallelism.spmd_backend)
        self.context = dist_utils.get_spmd_context(parallel_dims=self.dims)
        dist_utils.set_determinism(self.dims, self.device, self.titan.debug, distinct_seed_mesh_dims=["pp"])
        self.spec = overridden_spec(self.shape, config, self.titan, self.device.type)
        self.row_parts = row_parts(parallelism, self.device.type)
        self.model = self._build()
        if config.model.vision != "none":
            self._tower = self._frozen_tower()
        self.names = hf_names(self.spec, [name for name, _ in self.tensors], self.adaptation)

    @property
    def _offloads(self) -> bool:
        """Whether FSDP2 keeps parameters, gradients and optimizer states in host memory."""
        return self.config.training.enable_cpu_offload and self.device.type != "cpu"

    @property
    def nbytes(self) -> int:
        return sum(local(p).nbytes for p in self.model.parameters())

    def _build(self) -> Any:  # Decoder: TorchTitan's methods come on top of nn.Module's
        fsdp = not without_fsdp(self.config, self.dims.world_size)
        model = sharded_model(self.spec, self.config, self.titan, self.dims, fsdp=fsdp)
        if fsdp:
            titan_cpu.adapt_fsdp(model)
            keep_gathered(model, on=self.config.training.parameter_gather == "update")
        else:
            compute = getattr(torch, self.config.training.mixed_precision_param)
            self._copies = ComputeCopies(model, compute)
        document_attention.cut_rows(model, self.row_parts)
        model.to_empty(device="cpu" if self._offloads else titan_utils.device_type)
        with torch.no_grad():
            model.init_weights(buffer_device=self.device)  # rotary tables stay on the device if weights are offloaded
        return model.train()

    def _frozen_tower(self) -> Any:
        folder, compute = self.config.model.hf_assets_path, getattr(torch, self.config.training.mixed_precision_param)
        build = needed_part("images of trainers", "model.vision")
        images = Path(self.config.job.dump_folder) / IMAGES
        trained = self.shape.folder_tensors()
        return build(folder, images, trained, self.config.model.vision, device=self.device, dtype=compute)

    def begin(self) -> None:
        """Read the weights that the config names, or draw them from the seed."""
        if folder := self.config.model.hf_assets_path:
            self.read(folder, head=self.shape.head == "lm")  # a reward model in training begins with a new head
            self.zero_value_head()
            self.adaptation.begin(self.model, self.config.debug.seed)
        else:
            self.initialize()

    def initialize(self) -> None:
        config = self.config
        frozen = overridden_spec(self.shape, replace(config, lora=LoraSection()), self.titan, self.device.type)
        titan_cpu.initialize(
            self.model,
            frozen,
            self.shape,
            seed=config.debug.seed,
            std=config.model.initializer_range,
            dtype=getattr(torch, config.training.dtype),
        )
        self.zero_value_head()
        self.adaptation.begin(self.model, config.debug.seed)

    @property
    def tensors(self) -> list[tuple[str, torch.Tensor]]:
        """Return the parameters, and the biases of routers, which stay as they are read."""
        return [*self.model.named_parameters(), *experts.route_biases(self.model)]

    @property
    def held(self) -> list[weight_plan.Shard]:
        """Return the rectangles of this rank that a weight sync moves."""
        self.reshard()
        synced = [(name, tensor) for name, tensor in self.tensors if self.adaptation.syncs(name)]
        return planned(shards_of(synced, self.names), self.shape, self.config.generator.dtype)

    def packed(self, params: Mapping[str, torch.Tensor]) -> Mapping[str, torch.Tensor]:
        """Return this rank's tensors, by Hugging Face's names, as a weight sync packs them."""
        tensors, dtype = self.adaptation.packed(params), self.config.generator.dtype
        return Halves(tensors, self.shape, dtype) if self.shape.halves(dtype) else tensors

    def zero_value_head(self) -> None:
        """Set the value head, if the model has one, to zero: every position starts with value 0."""
        if self.shape.head == "value":
            with torch.no_grad():
                local(self.model.lm_head.weight).zero_()

    def placed(self, rows: Rows) -> "DeviceRows":
        """Return rows on this rank's device, of which it computes its part."""
        return DeviceRows.of(rows, self.device, self.row_parts)

    def logprobs(
        self, rows: "DeviceRows", *, temperature: float, with_entropy_grad: bool = False
    ) -> tuple[torch.Tensor, ...]:
        """Return log-prob of each target under the mask and entropy of its distribution, [B, T] float32 each; and the
        divergence from the teacher, if the rows have its top tokens."""
        keys = {
            "with_entropy_grad": with_entropy_grad,
            "kept": rows.extras.get("kept"),
            "teacher": rows.extras.get("top"),
        }
        answers = self._asked(rows, temperature, **keys, beta=self.config.algorithm.distill_beta)
        if self.row_parts is None:
            return answers
        return self.row_parts.of_all_parts(torch.stack(answers)).unbind()

    def entries(self, rows: "DeviceRows", *, temperature: float, top: int) -> np.ndarray:
        """Return entries of N targets under the mask, each before the `top` most likely tokens, [N, 1 + top]."""
        answers = self._asked(rows, temperature, top=top)
        if self.row_parts is not None and rows.own is not None:
            own = rows.own[rows.mask > 0]
            whole = [x.new_zeros(len(own), 1 + top).index_put((own,), x) for x in answers]
            answers = [self.row_parts.of_all_parts(x) for x in whole]
        ids, logprobs = answers
        return entries(ids.cpu().numpy(), logprobs.cpu().numpy())

    def _asked(self, rows: "DeviceRows", temperature: float, **keys: Any) -> Any:
        """Return what the head answers for the targets under the mask that this rank predicts."""
        head: heads.TokenHead = self.model.lm_head
        float32 = self.config.model.head_dtype == "float32"
        on = rows.mask > 0
        if rows.own is not None:
            on = on & rows.own
        memory = {"float32_logits": float32, "keep_logits": self.config.training.keep_logits is True}
        question = heads.Question(rows.targets, rows.places, on, temperature, **memory, **keys)
        with head.asked(question), self.context():
            return self._forward(rows)

    def values(self, rows: "DeviceRows") -> torch.Tensor:
        """Return the value at the place of each target, [B, T] float32."""
        with self.context():
            values = self._forward(rows).flatten()[rows.places]
        if self.row_parts is None or rows.own is None:
            return values
        return self.row_parts.of_all_parts(values.masked_fill(~rows.own, 0))

    def _forward(self, rows: "DeviceRows") -> Any:
        if self.shape.experts:  # routes count for trained tokens only
            counted = rows.trained_at if torch.is_grad_enabled() else None
            experts.set_routes(self.model, counted, rows.extras.get("routes"))
        if self._copies is not None:
            self._copies.place()
        if self._tower is not None:
            tokens, images = rows.images
            self.model.tok_embeddings.images = SeenImages(*self._tower.seen(tokens, images))
        masks = document_attention.masks_of(self.model, rows.attended, self.device)
        return self.model(rows.tokens, attention_masks=masks, positions=rows.positions)

    def score(self, rows: Rows, *, temperature: float = 1.0, top: int = 0) -> Any:
        """Return the values, or the log-probs of the targets, as [B, T] numpy, or with `top` their entries,
        without building a graph."""
        placed = self.placed(rows)
        with torch.no_grad():
            if top:
                return self.entries(placed, temperature=temperature, top=top)
            if self.shape.head == "value":
                return self.values(placed).cpu().numpy()
            return self.logprobs(placed, temperature=temperature)[0].cpu().numpy()

    def reshard(self) -> None:
        """Free gathered parameters. After a forward without a backward FSDP2 keeps the last layers gathered, and the
        next forward would use them even if the shards have changed."""
        if self._copies is not None:
            self._copies.take_back()
        for module in fsdp_modules(self.model):
            module.reshard()

    def sync_gradients(self, on: bool) -> None:
        """Set whether the next backward adds up gradients over the mesh. Earlier backwards that did not are included:
        FSDP2 keeps their gradients on each rank, unsharded."""
        if self._copies is None:
            self.model.set_requires_gradient_sync(on)

    def backward(self, loss: torch.Tensor) -> None:
        with self.context():
            loss.backward()
        if self._copies is not None:
            self._copies.fold()

    def discard_gradients(self) -> None:
        """Drop all gradients, also the unsharded ones that FSDP2 keeps until the next sync, and gathered parameters."""
        if self._copies is not None:
            self._copies.drop_gradients()
        self.reshard()
        self.model.zero_grad()
        private.drop_unsharded_gradients(self.model)

    @torch.no_grad()
    def scale_gradients(self, factor: float) -> None:
        self.reshard()
        gradients = [local(p.grad) for p in self.model.parameters() if p.grad is not None]
        if factor != 1 and gradients:
            torch.ops.aten._foreach_mul_.Scalar(gradients, factor)

    def clip_gradients(self, max_norm: float) -> float:
        """Scale the gradients so that their norm over the mesh is at most `max_norm`. Return the norm before."""
        self.reshard()
        parameters, pp_mesh = list(self.model.parameters()), self.dims.get_optional_mesh("pp")
        ep = self.dims.ep_enabled
        return float(dist_utils.clip_grad_norm_(parameters, max_norm, foreach=True, pp_mesh=pp_mesh, ep_enabled=ep))

    def release_memory(self) -> None:
        """Give the memory that torch's allocator keeps for later back to the device, which another process shares."""
        self.reshard()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    def pixel_sums(self, images: Sequence[str]) -> list[str]:
        """Return the hash of each image's pixels on this rank."""
        return self._tower.files.sums(images)

    def checksum(self) -> int:
        self.reshard()
        total = 0
        for _, parameter in self.tensors:
            shard = local(parameter)  # empty if a small parameter has fewer rows than there are ranks
            total = (total * 31 + (int(torch.hash_tensor(shard).item()) if shard.numel() else 0)) % 2**63
        return total

    def read(self, folder: str | Path, *, head: bool = True) -> None:
        """Load this rank's shards from Hugging Face safetensors. Keep the current head if `head` is False."""
        self.reshard()
        names = self.names
        if self.shape.head == "value":
            names = {**names, "lm_head.weight": HF_VALUE_HEAD}
        parameters = [(n, p) for n, p in self.tensors if not self.adaptation.adds(n)]
        wanted = {n: p for n, p in parameters if head or plain(n) != "lm_head.weight"}
        read_shards(Path(folder), wanted, names, self.shape.folder_rows())

    def write(
        self,
        folder: str | Path,
        dtype: torch.dtype | None = None,
        file_bytes: int = FILE_BYTES,
        *,
        adapters: bool = True,
    ) -> None:
        """Write the weights as Hugging Face safetensors, by default in training.dtype, in files of at most `file_bytes`
        unless one tensor has more. Adapters are added to them, and written beside them, unless `adapters` is off. The
        caller adds config.json and the tokenizer."""
        written: torch.dtype = dtype or getattr(torch, self.config.training.dtype)
        adaptation = self.adaptation if adapters else Adaptation()
        with torch.no_grad():
            self.reshard()
            state = self._to_hf(adapter(self.spec, None))
            state = {
                name: value if name.endswith(ROUTE_BIAS) else value.to(written)  # which folders have in float32
                for name, value in adaptation.merged(state, self.by_hf_name)
            }
            for one, parts in self.shape.fused().items():
                state[one] = joined([state.pop(part) for part in parts])
            for one in self.shape.stacked():
                state[one] = transposed(state[one])
            sizes = {name: written.itemsize * math.prod(size) for name, size in self.shape.folder_tensors().items()}
            writer = HuggingFaceStorageWriter(
                path=str(folder),
                fqn_to_index_mapping=file_numbers(sizes, file_bytes),
                save_distributed=True,
                enable_consolidation=True,
            )
            save(state, storage_writer=writer)
        if dist.get_rank() == 0:
            shutil.rmtree(Path(folder) / "sharded", ignore_errors=True)
            if isinstance(self.shape, SpecShape):
                others = other_tensors(Path(self.config.model.hf_assets_path), self.shape.folder_tensors())
                add_file(Path(folder), others)
        if adapters:
            self.write_added(folder)

    def write_added(self, folder: str | Path) -> None:
        """Write the added parameters alone, such as adapters, into a folder that exists."""
        self.adaptation.write(Path(folder), self.by_hf_name, self.shape, self.config.model.base)

    @property
    def by_hf_name(self) -> dict[str, torch.Tensor]:
        self.reshard()
        return {self.names[name]: tensor for name, tensor in self.tensors}

    def _to_hf(self, translate: Any) -> dict[str, Any]:
        whole = self.model.state_dict()
        state = translate.to_hf({name: value for name, value in whole.items() if not self.adaptation.adds(name)})
        if self.shape.head == "value":
            state[HF_VALUE_HEAD] = state.pop("lm_head.weight")
        return state


class FrozenWeights:
    """This rank's shards of a second, frozen set of weights, which are swapped into a model for a forward."""

    def __init__(self, model: TitanModel, folder: str | Path) -> None:
        self._hold(model, [tensor for _, tensor in model.tensors])
        model.read(folder)
        model.adaptation.read(model.model, model.names, "")
        self._exchange()

    def _hold(self, model: TitanModel, parameters: Sequence[torch.Tensor]) -> None:
        self._model, self._parameters = model, parameters
        model.reshard()
        self._shards = [local(parameter).clone() for parameter in parameters]

    @contextmanager
    def swapped_in(self) -> Iterator[TitanModel]:
        """Exchange the weights in place, tensor by tensor: this needs the memory of one tensor."""
        self._exchange()
        try:
            yield self._model
        finally:
            self._exchange()

    @torch.no_grad()
    def _exchange(self) -> None:
        self._model.reshard()
        for parameter, shard in zip(self._parameters, self._shards, strict=True):
            live = local(parameter)
            saved = live.clone()
            live.copy_(shard)
            shard.copy_(saved)
        self._model.reshard()


class FrozenAdapters(FrozenWeights):
    """Frozen adapters from an exported folder, or none, over the model's own frozen weights."""

    def __init__(self, model: TitanModel, folder: str | Path = "") -> None:
        self._hold(model, [p for name, p in model.model.named_parameters() if model.adaptation.adds(name)])
        model.adaptation.read(model.model, model.names, folder)
        self._exchange()


class AveragedWeights(FrozenWeights):
    """A moving average of the trained parameters, which begins as their values. It is saved with them (phase.py)."""

    def __init__(self, model: TitanModel, decay: float) -> None:
        trained = {plain(name): p for name, p in model.model.named_parameters() if p.requires_grad}
        self._decay = decay
        self._averages = {name: parameter.detach().clone() for name, parameter in trained.items()}
        self._model, self._parameters = model, list(trained.values())
        self._shards = [local(average) for average in self._averages.values()]

    @torch.no_grad()
    def update(self) -> None:
        """Move towards the weights that a step has made."""
        self._model.reshard()
        for average, parameter in zip(self._shards, self._parameters, strict=True):
            average.lerp_(local(parameter), 1 - self._decay)

    def state_dict(self) -> dict[str, Any]:
        return self._averages

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """The tensors of state_dict() are loaded in place."""


@dataclass(frozen=True, slots=True)
class DeviceRows:
    """Packed rows on a device. If the rank computes a part of each row, `tokens`, `positions`, `places`, `attended`
    and `extras` describe the part, everything else whole rows."""

    tokens: torch.Tensor
    positions: torch.Tensor
    targets: torch.Tensor
    places: torch.Tensor
    mask: torch.Tensor
    weights: torch.Tensor
    sequences: torch.Tensor
    count: int  # sequences in the microbatch
    columns: dict[Any, torch.Tensor]
    attended: Attended
    images: tuple[np.ndarray, Sequence[tuple[ImagePlace, ...]]]  # tokens in host memory, and the images of each row
    own: torch.Tensor | None = None  # targets that are predicted in this part; None: all
    extras: Mapping[str, Any] = field(default_factory=dict)  # side columns, by name

    @property
    def trained_at(self) -> torch.Tensor:
        """Return how many trained targets each place predicts, [B, L]."""
        counts = self.mask.new_zeros(self.tokens.numel())
        mask = self.mask if self.own is None else self.mask * self.own
        return counts.index_add_(0, self.places.flatten(), mask.flatten()).view(self.tokens.shape)

    @classmethod
    def of(cls, rows: Rows, device: torch.device, parts: RowParts | None = None) -> "DeviceRows":
        def to(array: np.ndarray) -> torch.Tensor:
            return torch.from_numpy(array).to(device, non_blocking=True)

        part = parts.cut(rows) if parts else whole_rows(rows)
        tokens, positions, own, places, attended, cut = part
        here = RankPart(rows, own, cut, to)
        return cls(
            tokens=to(tokens),
            positions=to(positions),
            targets=to(rows.targets),
            places=to(places),
            mask=to(rows.mask),
            weights=to(rows.weights),
            sequences=to(rows.sequences),
            count=len(rows.samples),
            columns={name: to(column) for name, column in rows.columns.items()},
            attended=attended,
            own=None if own is None else to(own),
            extras={name: side_column(name).on_device(value, here) for name, value in rows.extras.items()},
            images=(rows.tokens, rows.images),
        )


def joined(parts: list[torch.Tensor]) -> torch.Tensor:
    """Return tensors below each other, sharded by rows if they were sharded."""
    return _by_rows(torch.cat([whole(part) for part in parts]), parts[0])


def transposed(stack: torch.Tensor) -> torch.Tensor:
    """Return the transposes of stacked matrices, sharded by matrices if they were sharded."""
    return _by_rows(whole(stack).transpose(1, 2).contiguous(), stack)


def _by_rows(tensor: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    if not isinstance(like, DTensor):
        return tensor
    mesh = like.device_mesh
    everywhere = DTensor.from_local(tensor, mesh, [Replicate()] * mesh.ndim, run_check=False)
    return everywhere.redistribute(placements=[Shard(0)] * mesh.ndim)


def add_file(folder: Path, tensors: dict[str, torch.Tensor]) -> None:
    """Write tensors as they are to a further file of an exported folder. torch's writer makes zeros of
    tensors without a dimension (2.13)."""
    if not tensors:
        return
    path = folder / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    name = f"model-{len(set(index['weight_map'].values())) + 1:05}-as-given.safetensors"
    save_file(tensors, folder / name, metadata={"format": "pt"})
    (folder / name).chmod(0o644)  # safetensors makes it readable by its owner only
    index["metadata"]["total_size"] += sum(tensor.nbytes for tensor in tensors.values())
    index["weight_map"] |= dict.fromkeys(tensors, name)
    path.write_text(json.dumps(index, indent=2))


def file_numbers(sizes: dict[str, int], file_bytes: int) -> dict[str, int]:
    """Return the number of the file that each tensor is written to, from 1 on. `sizes`: bytes of all tensors, because
    a rank may hold none of some experts."""
    numbers, number, filled = dict[str, int](), 1, 0
    for name, nbytes in sizes.items():
        if filled and filled + nbytes > file_bytes:
            number, filled = number + 1, 0
        numbers[name] = number
        filled += nbytes
    return numbers


def fsdp_modules(model: torch.nn.Module) -> Iterator[FSDPModule]:
    return (module for module in model.modules() if isinstance(module, FSDPModule))


def keep_gathered(model: torch.nn.Module, *, on: bool) -> None:
    """Keep parameters gathered from the first forward until `reshard`, or leave it to TorchTitan."""
    for module in fsdp_modules(model) if on else ():
        module.set_reshard_after_forward(False, recurse=False)
        module.set_reshard_after_backward(False, recurse=False)


def local(tensor: torch.Tensor) -> torch.Tensor:
    """Return this rank's shard, which shares memory with `tensor`."""
    tensor = tensor.detach()
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
