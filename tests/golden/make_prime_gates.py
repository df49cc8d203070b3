"""Make golden vectors of prime-rl's masks with its own functions.

    peers/bin/pip install beartype jaxtyping
    peers/bin/python tests/golden/make_prime_gates.py prime-rl/src/prime_rl/trainer/rl/loss.py

In make_trl.py's environment. prime-rl has no release on PyPI: the file is of commit 559b447. Its two imports from
prime-rl, settings and a loader of custom losses, are replaced by stand-ins.
"""
# pyright: basic, reportMissingImports=false

import importlib.util
import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
from vectors import answers, case, write

SETTINGS = ("CustomLossConfig", "DefaultLossConfig", "IPOLossConfig", "LossConfig")


def peer(path: str) -> Any:
    for name, members in {"prime_rl.configs.trainer": SETTINGS, "prime_rl.utils.utils": ("import_object",)}.items():
        sys.modules[name] = ModuleType(name)
        vars(sys.modules[name]).update(dict.fromkeys(members, SimpleNamespace))
    spec = importlib.util.spec_from_file_location("prime_loss", path)
    assert spec is not None
    assert spec.loader is not None
    sys.modules["prime_loss"] = module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def gate_case(module: Any, name: str, function: str, *, seed: int, spread: float = 0.4, **settings: Any) -> Any:
    """Sum the losses of all answers, and divide by the trained tokens."""
    x = answers(seed, empty=True, spread=spread)
    logprob = x["logprob"].requires_grad_()
    losses, masked = [], []
    for row, mask in enumerate(x["mask"] > 0):
        inputs = module.LossInputs(logprob[row], x["behaviour"][row], None, x["advantage"][row], mask)
        out = getattr(module, function)(inputs, SimpleNamespace(adv_tau=1.0, **settings))
        losses.append(out.loss)
        masked.append(out.metrics["is_masked"] * mask.sum())
    tokens = x["mask"].sum()
    loss = torch.stack(losses).sum() / tokens
    loss.backward()
    names = ("mask", "length", "advantage", "logprob", "behaviour", "reference", "entropy")
    inputs = {key: x[key] for key in names} | {"old": x["behaviour"]}
    outputs = {"loss": loss, "clipped": torch.stack(masked).sum() / tokens}
    return case(name, function, settings=settings, inputs=inputs, outputs=outputs, leaves={"logprob": logprob})


def gates(module: Any) -> list[Any]:
    ipo, default = "ipo_loss_fn", "default_loss_fn"
    return [
        gate_case(module, "ipo", ipo, seed=401, ipo_threshold=0.1, kl_tau=1e-3),
        gate_case(module, "ipo_far", ipo, seed=402, spread=0.8, ipo_threshold=0.05, kl_tau=0.2),
        gate_case(module, "default", default, seed=403, dppo_mask_low=0.08, dppo_mask_high=0.1, kl_tau=0.05),
    ]


if __name__ == "__main__":
    torch.set_default_dtype(torch.float64)
    made_by = "tests/golden/make_prime_gates.py"
    write("prime_gates.json", peer="prime-rl", version="559b447", made_by=made_by, cases=gates(peer(sys.argv[1])))
