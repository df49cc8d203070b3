"""One trainer rank: a TorchTitan model, and the phases of optimization that it goes through.

    Policy ── model, sharded by FSDP2 / HSDP / TP
      └─ Phase "cold_start", then "rl": optimizer, schedule and checkpoints of one stretch of training

A plain class: it needs torchrun's environment variables, not Monarch.
"""

from titan_rl.actors import titan_cpu

# isort: split
# titan_cpu goes before any torchtitan import.
import os
import shutil
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageWriter
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.tensor import DTensor, Replicate
from torchtitan.components.checkpoint import CheckpointManager
from torchtitan.components.optimizer import LRSchedulersContainer, OptimizersContainer, ParamGroupConfig
from torchtitan.config import CommConfig, CompileConfig, DebugConfig, ParallelismConfig, TrainingConfig
from torchtitan.distributed import ParallelDims
from torchtitan.distributed import utils as dist_utils
from torchtitan.distributed.activation_checkpoint import FullAC, SelectiveAC
from torchtitan.protocols.model_spec import ModelSpec
from torchtitan.tools import utils as titan_utils

from titan_rl.actors.model_spec import adapter, build_spec, hf_names, rope_head_dims
from titan_rl.config import Config
from titan_rl.kernels.policy_loss import TokenSums, grpo, supervised
from titan_rl.kernels.token_logprob import token_logprob
from titan_rl.model_shape import ModelShape
from titan_rl.types import Batch, PhaseName, Rows, StepStats

PHASE_FOLDERS: dict[PhaseName, str] = {"cold_start": "cold_start", "rl": ""}  # below the checkpoint folder


@dataclass(kw_only=True, slots=True)
class TitanConfig:
    """The part of a TorchTitan job config that building and parallelizing a model reads."""

    parallelism: ParallelismConfig
    training: TrainingConfig
    debug: DebugConfig
    compile: CompileConfig
    comm: CommConfig


def titan_config(config: Config) -> TitanConfig:
    p, t = config.parallelism, config.training
    return TitanConfig(
        parallelism=ParallelismConfig(
            data_parallel_replicate_degree=p.data_parallel_replicate_degree,
            data_parallel_shard_degree=p.data_parallel_shard_degree,
            tensor_parallel_degree=p.tensor_parallel_degree,
            enable_sequence_parallel=p.enable_sequence_parallel,
            fsdp_reshard_after_forward=p.fsdp_reshard_after_forward,
            spmd_backend="partial_dtensor",  # TorchTitan's default wants a newer torch than vLLM's pin allows
        ),
        training=TrainingConfig(
            local_batch_size=t.local_batch_size,
            seq_len=t.seq_len,
            max_norm=t.max_norm,
            steps=t.steps,
            enable_cpu_offload=t.enable_cpu_offload,
            dtype=t.dtype,
            mixed_precision_param=t.mixed_precision_param,
            mixed_precision_reduce=t.mixed_precision_reduce,
        ),
        debug=DebugConfig(seed=config.debug.seed, deterministic=config.debug.deterministic),
        compile=CompileConfig(enable=config.compile.enable, components=["model"]),
        comm=CommConfig(
            init_timeout_seconds=config.comm.init_timeout_seconds,
            train_timeout_seconds=config.comm.train_timeout_seconds,
            trace_buf_size=0,
        ),
    )


@dataclass(slots=True)
class TrainState:
    """Saved inside each checkpoint, so that the controller's part can never disagree with the weights."""

    step: int = 0
    controller: str = "{}"  # JSON: data cursors

    def state_dict(self) -> dict[str, Any]:
        return {"step": self.step, "controller": self.controller}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.step, self.controller = state["step"], state["controller"]


@dataclass(slots=True)
class Phase:
    name: PhaseName
    optimizers: OptimizersContainer
    schedulers: LRSchedulersContainer
    checkpoints: CheckpointManager
    state: TrainState


class Policy:
    def __init__(self, config: Config, shape: ModelShape) -> None:
        self.config = config
        self.shape = shape
        torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
        self.device = titan_utils.get_local_device()
        titan_utils.device_module.set_device(self.device)
        self.titan = titan_config(config)
        world_size = dist_utils.init_distributed(self.titan.comm, base_folder=config.job.dump_folder)
        self.dims = ParallelDims.from_config(self.titan.parallelism, world_size)
        dist_utils.set_spmd_backend(self.titan.parallelism.spmd_backend)
        self.context = dist_utils.get_spmd_context(parallel_dims=self.dims)
        dist_utils.set_determinism(self.dims, self.device, self.titan.debug, distinct_seed_mesh_dims=["pp"])
        self.spec = self._spec()
        self.model = self._build()
        self.names = hf_names(self.spec, [name for name, _ in self.model.named_parameters()])
        self.rope_head_dims = rope_head_dims(shape, self.names)
        self._initial_weights()
        self.reference: Any | None = None  # a Decoder too
        self.phase: Phase | None = None

    @property
    def nbytes(self) -> int:
        """Parameter bytes that this rank holds."""
        return sum(getattr(p, "_local_tensor", p).nbytes for p in self.model.parameters())

    # -- building ---------------------------------------------------------------------------------------------

    def _spec(self) -> ModelSpec:
        spec = build_spec(self.shape, seq_len=self.config.training.seq_len)
        spec.model.update_from_config(config=self.titan)  # fills sharding configs
        titan_cpu.use_document_attention(spec)
        return spec

    def _build(self) -> Any:  # Decoder: TorchTitan's methods come on top of nn.Module's
        recompute = {"none": None, "selective": SelectiveAC.Config(), "full": FullAC.Config()}
        dtype = getattr(torch, self.config.training.dtype)
        with torch.device("meta"), titan_utils.set_default_dtype(dtype):
            model = self.spec.model.build()
        model = self.spec.parallelize_fn(
            model,
            parallel_dims=self.dims,
            training=self.titan.training,
            parallelism=self.titan.parallelism,
            compile_config=self.titan.compile,
            ac_config=recompute[self.config.activation_checkpoint.mode],
            dump_folder=self.config.job.dump_folder,
        )
        titan_cpu.force_sum_reduction(model)
        model.to_empty(device=titan_utils.device_type)
        with torch.no_grad():
            model.init_weights(buffer_device=None)
        return model.train()

    def _initial_weights(self) -> None:
        folder = self.config.model.hf_assets_path
        if not folder:
            std = self.config.model.initializer_range
            titan_cpu.initialize(self.model, self.spec, seed=self.config.debug.seed, std=std)
            return
        translate = adapter(self.spec, folder)
        state = translate.to_hf(self._permutable())
        load(state, storage_reader=translate.get_hf_storage_reader(folder))  # each rank reads its own shards
        self.model.load_state_dict(translate.from_hf(state), strict=False)

    def _permutable(self) -> dict[str, torch.Tensor]:
        """The state dict with rotary projections whole on every rank. Undoing their row order across shards that cut a
        head (FSDP2 within TP) gives DTensors that claim overlapping rows: DCP refuses to save them, and would misload.
        """
        return {
            name: value.redistribute(placements=[Replicate()] * value.device_mesh.ndim)
            if name in self.rope_head_dims and isinstance(value, DTensor)
            else value
            for name, value in self.model.state_dict().items()
        }

    # -- phases -----------------------------------------------------------------------------------------------

    def begin(self, name: PhaseName) -> TrainState:
        """Start or resume a phase on the current weights."""
        cold = self.config.cold_start
        warmup, steps, lr = (
            (cold.warmup_steps, cold.steps, cold.lr)
            if name == "cold_start"
            else (self.config.lr_scheduler.warmup_steps, self.config.training.steps, self.config.optimizer.lr)
        )
        if self.phase is not None:
            self.phase.checkpoints.close()
        optimizers = self._optimizers(lr)
        schedulers = self._schedule(name, min(warmup, steps)).build(optimizers=optimizers, training_steps=max(steps, 1))
        if name == "rl" and self.config.algorithm.kl_coef > 0:
            self._build_reference()
        state = TrainState()
        checkpoints = self._checkpoint_config(name).build(
            dataloader=None,
            model_parts=[self.model],
            optimizers=optimizers,
            lr_schedulers=schedulers,
            states={"train_state": state} | self._reference_state(),
            sd_adapter=adapter(self.spec, self.config.model.hf_assets_path or None),
            base_folder=self.config.job.dump_folder,
        )
        checkpoints.load()
        if self.reference is not None and state.step == 0:  # RL begins: the policy as it is now
            self.reference.load_state_dict(self.model.state_dict())
        self.phase = Phase(name, optimizers, schedulers, checkpoints, state)
        return state

    def _optimizers(self, lr: float) -> OptimizersContainer:
        o = self.config.optimizer
        arguments = {"lr": lr, "betas": (o.beta1, o.beta2), "eps": o.eps, "weight_decay": o.weight_decay}
        group = ParamGroupConfig(pattern=r".*", optimizer_name=o.name, optimizer_kwargs=arguments)
        return OptimizersContainer.Config(param_groups=[group], implementation=o.implementation).build(
            model_parts=[self.model]
        )

    def _schedule(self, name: PhaseName, warmup: int) -> LRSchedulersContainer.Config:
        s = self.config.lr_scheduler
        decay = s.decay_ratio if name == "rl" else self.config.cold_start.decay_ratio
        return LRSchedulersContainer.Config(
            warmup_steps=warmup, decay_ratio=decay, decay_type=s.decay_type, min_lr_factor=s.min_lr_factor
        )

    def _checkpoint_config(self, name: PhaseName) -> CheckpointManager.Config:
        c = self.config.checkpoint
        return CheckpointManager.Config(
            enable=c.enable,
            folder=os.path.join(c.folder, PHASE_FOLDERS[name]).rstrip("/"),
            interval=1,  # the controller decides when
            keep_latest_k=c.keep_latest_k,
            last_save_model_only=False,
        )

    # -- the frozen reference ---------------------------------------------------------------------------------

    def _build_reference(self) -> None:
        """A second sharded model that no optimizer knows. It is checkpointed, so a resumed run keeps its anchor."""
        self.reference = self._build().eval().requires_grad_(False)

    def _reference_state(self) -> dict[str, Any]:
        return {} if self.reference is None else {"reference": _ModelState(self.reference)}

    # -- one optimizer step -----------------------------------------------------------------------------------

    def step(self, batch: Batch) -> StepStats:
        phase = self._in_phase()
        began = time.perf_counter()
        reduced = self._sums(
            [self._forward_backward(rows, phase.name, batch.global_tokens) for rows in batch.microbatches]
        )
        lr = float(phase.schedulers.schedulers[0].get_last_lr()[0])
        grad_norm = dist_utils.clip_grad_norm_(
            list(self.model.parameters()),
            self.config.training.max_norm,
            foreach=True,
            pp_mesh=self.dims.get_optional_mesh("pp"),
            ep_enabled=self.dims.ep_enabled,
        )
        phase.checkpoints.maybe_wait_for_staging()
        phase.optimizers.step()
        phase.schedulers.step()
        phase.optimizers.zero_grad()
        phase.state.step += 1

        tokens = max(batch.global_tokens, 1)
        return StepStats(
            loss=reduced["loss"] / tokens,
            grad_norm=float(grad_norm),
            lr=lr,
            tokens=batch.global_tokens,
            entropy=reduced["entropy"] / tokens,
            gap_mean=reduced["gap"] / tokens,
            gap_max=reduced["gap_max"],
            gap_mult=reduced["gap_mult"] / tokens,
            ratio_mean=reduced["ratio"] / tokens,
            ratio_max=reduced["ratio_max"],
            clip_low=reduced["clip_low"] / tokens,
            clip_high=reduced["clip_high"] / tokens,
            kl=reduced["kl"] / tokens,
            seconds=time.perf_counter() - began,
        )

    def _forward_backward(self, rows: Rows, phase: PhaseName, global_tokens: int) -> TokenSums:
        a = self.config.algorithm
        tokens, positions, targets, mask, behaviour, advantage = (
            torch.from_numpy(x).to(self.device, non_blocking=True)
            for x in (rows.tokens, rows.positions, rows.targets, rows.mask, rows.logprobs, rows.advantages)
        )
        temperature = self.config.rollout.temperature if phase == "rl" else 1.0
        masks = self.model.get_attention_masks(positions)
        with self.context():
            reference = None
            if self.reference is not None:
                with torch.no_grad():
                    logits = self.reference(tokens, attention_masks=masks, positions=positions)
                    reference, _ = token_logprob(logits, targets, temperature)
            logits = self.model(tokens, attention_masks=masks, positions=positions)
            logprob, entropy = token_logprob(logits, targets, temperature)
            if phase == "cold_start":
                loss, sums = supervised(logprob, entropy, mask_T=mask)
            else:
                loss, sums = grpo(
                    logprob,
                    entropy,
                    behaviour_T=behaviour,
                    advantage_T=advantage,
                    mask_T=mask,
                    reference_T=reference,
                    clip_low=a.clip_low,
                    clip_high=a.clip_high,
                    kl_coef=a.kl_coef,
                )
            (loss / max(global_tokens, 1)).backward()
        return sums

    def _sums(self, per_microbatch: list[TokenSums]) -> dict[str, float]:
        """Over microbatches and data-parallel ranks: sums summed, maxima maximized. Two all-reduces in all."""
        names = TokenSums.names()
        values = torch.stack([torch.stack([getattr(s, n).float() for n in names]) for s in per_microbatch])
        is_max = torch.tensor([n.endswith("_max") for n in names], device=values.device)
        total, most = values.sum(0), values.amax(0)
        mesh = self.dims.get_optional_mesh("loss")
        if mesh is not None:
            dist.all_reduce(total, group=mesh.get_group())
            dist.all_reduce(most, op=dist.ReduceOp.MAX, group=mesh.get_group())
        return dict(zip(names, torch.where(is_max, most, total).tolist(), strict=True))

    def _in_phase(self) -> Phase:
        if self.phase is None:
            raise RuntimeError("the policy is in no phase yet: call begin() before step() or save()")
        return self.phase

    # -- saving -----------------------------------------------------------------------------------------------

    def save(self, step: int, controller: str) -> None:
        """Atomic: a checkpoint without DCP's .metadata, written last, does not count."""
        phase = self._in_phase()
        if phase.state.step != step:
            raise RuntimeError(f"asked to save step {step}, but the optimizer has taken {phase.state.step}")
        phase.state.controller = controller
        phase.checkpoints.save(step)

    def export(self, folder: str) -> None:
        """The weights as Hugging Face safetensors; config.json and tokenizer are the controller's to add."""
        phase = self._in_phase()
        writer = HuggingFaceStorageWriter(path=folder, save_distributed=True, enable_consolidation=True)
        with torch.no_grad():
            save(adapter(self.spec, None).to_hf(self._permutable()), storage_writer=writer)
        if dist.get_rank() == 0:
            shutil.rmtree(Path(folder) / "sharded", ignore_errors=True)
        phase.checkpoints.maybe_wait_for_saving()

    def close(self) -> None:
        if self.phase is not None:
            self.phase.checkpoints.maybe_wait_for_saving()
            self.phase.checkpoints.close()


class _ModelState:
    """A model as a DCP Stateful of its own, beside the trained one."""

    def __init__(self, model: torch.nn.Module) -> None:
        self.model = model

    def state_dict(self) -> dict[str, Any]:
        return self.model.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.model.load_state_dict(state)
