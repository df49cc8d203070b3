"""Resolves the keys that are "auto": what they mean depends on the machine."""

from dataclasses import replace
from typing import Literal

from titan_rl.config.sections import Config


def compiles(config: Config, device: str) -> bool:
    """Return whether the trainers' blocks are compiled on `device`, "cpu" or "cuda"."""
    if config.compile.enable == "auto":
        return device == "cuda" and config.training.mixed_precision_param == "bfloat16"
    return config.compile.enable


def gradient_sync(config: Config, *, fits: bool = True) -> Literal["update", "microbatch"]:
    """Return when gradients are synced. `fits`: every rank has the memory for its gradients unsharded."""
    if config.training.gradient_sync == "auto":
        return "update" if fits else "microbatch"
    return config.training.gradient_sync


def resolved(config: Config, device: str, *, gradients_fit: bool = True) -> Config:
    """Return the config that the ranks on `device` work with. It has no "auto", and resolves to itself."""
    return replace(
        config,
        compile=replace(config.compile, enable=compiles(config, device)),
        training=replace(config.training, gradient_sync=gradient_sync(config, fits=gradients_fit)),
    )
