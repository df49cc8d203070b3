"""The models that clients of a server train: adapters in a bank over one frozen base, and an AdamW for each.

create ── forward_backward ... optim_step ── save, load ── drop

A call with a model's name first puts its adapters and gradients into place.
"""

import json
import math
import shutil
from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch.distributed.tensor import DTensor, Replicate

from titan_rl.actors.sync.held_shards import whole
from titan_rl.actors.titan import titan_cpu
from titan_rl.actors.titan.model import DeviceRows, TitanModel
from titan_rl.actors.titan.spec import plain
from titan_rl.ext.adapters.layers import LAYERS
from titan_rl.ext.adapters.ranks import lora
from titan_rl.ext.policies.ranks.adapter_bank import AdapterBank
from titan_rl.ext.tinker.served import FACTS, AdamStep, AdapterSpec, ServedLoss
from titan_rl.kernels.policy_loss import Surrogate, Tokens, policy_loss, supervised_loss
from titan_rl.wire.types import Batch

NO_MODEL = ""
OPTIMIZER = "optimizer.safetensors"
MOMENTS = ("exp_avg", "exp_avg_sq")


class ServedModels:
    def __init__(self, model: TitanModel) -> None:
        self._model = model
        self._bank = AdapterBank(model, NO_MODEL)
        self._specs = dict[str, AdapterSpec]()
        self._optimizers = dict[str, torch.optim.AdamW]()
        adapters = {name: p for name, p in model.model.named_parameters() if lora.is_adapter(name)}
        self._parameters = [*adapters.values()]
        self._by_hf = {model.names[name]: p for name, p in adapters.items()}
        self._hf = {plain(name): model.names[name] for name in adapters}  # by the names of a state dict
        self._adapted = [module for module in model.model.modules() if hasattr(module, "_lora_scaling")]

    def write_base(self, folder: str) -> None:
        """Write the frozen weights as Hugging Face safetensors."""
        self._model.write(folder, adapters=False)

    def create(self, name: str, spec: AdapterSpec) -> None:
        """Begin a model, which computes what the base does."""
        self._bank.add(name)
        self._specs[name] = spec
        layers = [titan for titan, hf in self._hf.items() if trains(spec, hf)]
        lora.begin_adapters(self._model.model, spec.seed, spec.rank, layers)
        self._optimizers[name] = torch.optim.AdamW(self._parameters, fused=True)

    def drop(self, name: str) -> None:
        self._bank.use(NO_MODEL)
        self._bank.drop(name)
        del self._specs[name], self._optimizers[name]

    def forward_backward(
        self, batch: Batch, name: str, loss: ServedLoss, backward: bool
    ) -> tuple[list[np.ndarray], float]:
        """Return the log-prob of each target, by microbatch, and the loss of this rank's rows. Gradients add up until
        the next step of the optimizer."""
        model, last = self._model, len(batch.microbatches) - 1
        self._use(name)
        logprobs, total = list[np.ndarray](), 0.0
        for i, rows in enumerate(batch.microbatches):
            model.sync_gradients(i == last or model.config.training.gradient_sync == "microbatch")
            placed = model.placed(rows)
            with nullcontext() if backward else torch.no_grad():
                logprob, entropy = model.logprobs(placed, temperature=1.0)
                value = loss_of(loss, logprob, entropy, placed)
            if backward:
                model.backward(value)
            logprobs.append(logprob.detach().cpu().numpy())
            total += float(value.detach())
        if not backward:
            model.reshard()
        return logprobs, total

    def optim_step(self, name: str, step: AdamStep) -> float:
        """Take a step of the optimizer, unless gradients are not finite; return their norm. No gradients are left."""
        model = self._model
        self._use(name)
        optimizer = self._optimizers[name]
        settings = {"lr": step.lr, "betas": (step.beta1, step.beta2), "eps": step.eps}
        for group in optimizer.param_groups:
            group.update(settings, weight_decay=step.weight_decay)
        norm = model.clip_gradients(step.max_norm or math.inf)
        if math.isfinite(norm):
            optimizer.step()
        optimizer.zero_grad()
        return norm

    def save(self, name: str, folder: str, facts: Mapping[str, Any], with_optimizer: bool) -> str:
        """Write the adapters in PEFT's layout, and the optimizer's state beside them. The folder is whole or absent.
        Return why it cannot be written, or ""."""
        self._use(name)
        self._model.reshard()
        spec, state = self._specs[name], self._optimizers[name].state
        named = {hf: p for hf, p in self._by_hf.items() if trains(spec, hf)}
        adapters = {hf: narrowed(hf, whole(p), spec.rank) for hf, p in named.items()}
        moments = {
            f"{hf}.{key}": narrowed(hf, whole(state[p][key]), spec.rank)
            for hf, p in named.items()
            for key in MOMENTS
            if with_optimizer and p in state
        }
        steps = {hf: float(state[p]["step"]) for hf, p in named.items() if with_optimizer and p in state}
        if dist.get_rank() != 0:
            return ""
        final = Path(folder)
        partial = final.with_name(f".{final.name}.partial")
        try:
            shutil.rmtree(partial, ignore_errors=True)
            partial.parent.mkdir(parents=True, exist_ok=True)
            section = replace(self._model.config.lora, rank=spec.rank, alpha=spec.alpha, targets=[*spec.targets])
            lora.write_peft(partial, adapters, section, self._model.shape, self._model.config.model.base)
            if with_optimizer:
                save_file(moments, partial / OPTIMIZER)
            known = {**facts, "rank": spec.rank, "alpha": spec.alpha, "targets": spec.targets, "seed": spec.seed}
            (partial / FACTS).write_text(json.dumps({**known, "optimizer_steps": steps}, indent=2) + "\n")
            if final.exists():
                replaced = final.with_name(f".{final.name}.replaced")
                shutil.rmtree(replaced, ignore_errors=True)
                final.rename(replaced)
                partial.rename(final)
                shutil.rmtree(replaced, ignore_errors=True)
            else:
                partial.rename(final)
        except (OSError, SafetensorError) as error:
            shutil.rmtree(partial, ignore_errors=True)
            return f"{type(error).__name__}: {error}"
        return ""

    def load(self, name: str, folder: str, with_optimizer: bool) -> str:
        """Give a model the adapters of a folder that `save` wrote, and the optimizer's state or a new one. Return why
        the folder cannot be read, or ""; then the model is as before."""
        try:
            tensors = lora.read_peft(Path(folder))
            facts = json.loads((Path(folder) / FACTS).read_text(encoding="utf-8"))
            moments = load_file(Path(folder) / OPTIMIZER) if with_optimizer else {}
            if missing := {hf for hf in self._by_hf if trains(self._specs[name], hf)} ^ tensors.keys():
                return f"expected the adapters of this model's layers, found others: {min(missing)}"
            state = {hf: widened(hf, tensor, self._by_hf[hf]) for hf, tensor in tensors.items()}
            widths = {key: widened(key, t, self._by_hf[key.rpartition(".")[0]]) for key, t in moments.items()}
        except (OSError, ValueError, KeyError, RuntimeError, SafetensorError) as error:
            return f"{type(error).__name__}: {error}"
        self._use(name)
        self._model.reshard()
        titan_cpu.load_whole(self._model.model, {n: state[hf] for n, hf in self._hf.items() if hf in state})
        for parameter in self._parameters:
            parameter.grad = None
        optimizer = self._optimizers[name] = torch.optim.AdamW(self._parameters, fused=True)
        for hf in tensors:
            if hf in facts["optimizer_steps"] and with_optimizer:
                parameter = self._by_hf[hf]
                step = torch.tensor(facts["optimizer_steps"][hf], dtype=torch.float32, device=parameter.device)
                optimizer.state[parameter] = {"step": step} | {
                    key: placed_like(widths[f"{hf}.{key}"], parameter) for key in MOMENTS
                }
        return ""

    def _use(self, name: str) -> None:
        self._bank.use(name)
        for module in self._adapted:
            module._lora_scaling = self._specs[name].scale


def trains(spec: AdapterSpec, hf: str) -> bool:
    return any(f".{LAYERS[target]}." in hf for target in spec.targets)


def narrowed(hf: str, tensor: torch.Tensor, rank: int) -> torch.Tensor:
    """Return A or B, or a moment of it, without the rows or columns beyond a model's rank, which are zero."""
    return (tensor[:rank] if ".lora_A." in hf else tensor[:, :rank]).to("cpu", copy=True).contiguous()


def widened(hf: str, tensor: torch.Tensor, parameter: torch.Tensor) -> torch.Tensor:
    """Undo `narrowed`."""
    rows, columns = (full - part for full, part in zip(parameter.shape, tensor.shape, strict=True))
    if rows < 0 or columns < 0 or (columns if ".lora_A." in hf else rows):
        raise ValueError(f"expected {hf} of {tuple(parameter.shape)} or a smaller rank, found {tuple(tensor.shape)}")
    return torch.nn.functional.pad(tensor, (0, columns, 0, rows))


@torch.no_grad()
def placed_like(value: torch.Tensor, parameter: torch.Tensor) -> torch.Tensor:
    """Return a tensor that every rank has whole, sharded as a parameter is."""
    value, placed = value.to(parameter.device, parameter.dtype), torch.zeros_like(parameter)
    if isinstance(placed, DTensor):
        mesh = placed.device_mesh
        value = DTensor.from_local(value, mesh, [Replicate()] * mesh.ndim, run_check=False)
    return placed.copy_(value)


def loss_of(loss: ServedLoss, logprob: torch.Tensor, entropy: torch.Tensor, rows: DeviceRows) -> torch.Tensor:
    if loss.name == "cross_entropy":
        return supervised_loss(logprob, entropy, rows.mask, rows.weights)[0]
    tokens = Tokens(
        behaviour=rows.columns["behaviour"],
        advantage=rows.columns["advantage"],
        mask=rows.weights,
        weight=rows.weights,
        sequence=rows.sequences,
        sequences=rows.count,
    )
    surrogate = Surrogate(ratio=loss.ratio, clip=loss.clip, clip_low=loss.low, clip_high=loss.high)
    return policy_loss(logprob, entropy, tokens, surrogate)[0]
