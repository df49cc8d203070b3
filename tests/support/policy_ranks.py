"""What gloo_ranks.on_ranks runs on the ranks of a mesh that trains several policies over one base."""

from dataclasses import replace
from pathlib import Path
from typing import Any

from support.lora_ranks import lora_config
from support.trainer_cases import samples
from titan_rl.config.sections import Config

STEPS = 4
SAVED = 2  # the step after which the policies are saved
LR = {"fast": 1e-2, "slow": 2e-3, "late": 5e-3}


def policy_configs(folder: Path, layout: str, mode: Any = "disabled") -> dict[str, Config]:
    """Return the configs of policies with their own rate, norm, temperature and folder."""
    shared = lora_config(folder, layout, "")
    return {
        name: replace(
            shared,
            job=replace(shared.job, dump_folder=str(folder / name)),
            optimizer=replace(shared.optimizer, lr=lr),
            rollout=replace(shared.rollout, temperature=1.0 if name == "fast" else 0.8),
            training=replace(shared.training, max_norm=1.0 if name == "fast" else 0.05),
            checkpoint=replace(shared.checkpoint, async_mode=mode),
        )
        for name, lr in LR.items()
    }


def interleaved(folder: Path, layout: str, saves: str = "") -> dict[str, Any]:
    """Train policies on one model, verb by verb in turn; then each alone, on its own model. Return, by policy, whether
    losses, norms and adapters are equal to the last bit; and how far the policies are apart. `saves`: resume them from
    checkpoints in this checkpoint.async_mode."""
    import torch

    from titan_rl.actors.titan.model import local
    from titan_rl.actors.titan.role_model import RoleModel
    from titan_rl.batch.packing import Weighting, pack
    from titan_rl.ext.adapters.ranks.lora import is_adapter
    from titan_rl.preflight.shapes import shape_of
    from titan_rl.wire.types import Batch

    configs = policy_configs(folder / "together", layout, saves or "disabled")
    first = next(iter(configs.values()))
    shape, dp = shape_of(first.model), first.parallelism.dp

    def batch(model: Any, name: str, step: int) -> Any:
        """Return this rank's part of a step's samples, which are the policy's own."""
        mesh = model.dims.get_optional_mesh("batch")
        seed = 100 * list(LR).index(name) + step
        packed = pack(
            samples(seed), shards=dp, seq_len=64, rows_per_microbatch=2, pad_id=0, weighting=Weighting("sequence_mean")
        )
        return packed[mesh.get_local_rank() if mesh else 0]

    def whole(part: Any) -> Any:
        return Batch([], part.tokens, part.sequences)

    def adapters(model: Any) -> Any:
        return [local(p).clone() for n, p in model.model.named_parameters() if is_adapter(n)]

    def scored(model: Any, name: str) -> Any:
        return model.scores(batch(model, name, 99), 1.0)[0]

    together: dict[str, Any] = {name: {"stats": [], "scores": []} for name in configs}
    model = RoleModel(
        "trainer", replace(first, job=replace(first.job, dump_folder=str(folder))), shape, first.parallelism, configs
    )
    base = {n: local(p).clone() for n, p in model.model.named_parameters() if not is_adapter(n)}
    for name in configs:
        model.use(name)
        model.begin_phase("rl", 0)
        model.load_weights("", "reference")
    for step in range(STEPS):
        for name in configs:
            model.use(name)
            model.accumulate(batch(model, name, 2 * step))
        for name in reversed(configs):
            model.use(name)
            together[name]["scores"].append(scored(model, name))
        for name in configs:
            model.use(name)
            model.accumulate(batch(model, name, 2 * step + 1))
            together[name]["reference"] = model.scores(batch(model, name, 99), 1.0, "reference")[0]
        for name in configs:
            model.use(name)
            both = [batch(model, name, 2 * step + i) for i in range(2)]
            counts = Batch([], sum(b.tokens for b in both), sum(b.sequences for b in both))
            together[name]["stats"].append(model.phase.update(counts, 2.0))
        if saves and step + 1 == SAVED:
            for name in configs:
                model.use(name)
                model.phase.save(SAVED, f'"{name}"')
            model.close()
            model = RoleModel(
                "trainer",
                replace(first, job=replace(first.job, dump_folder=str(folder))),
                shape,
                first.parallelism,
                configs,
            )
            for name in reversed(configs):
                model.use(name)
                state = model.begin_phase("rl", SAVED)
                assert (state.step, state.controller) == (SAVED, f'"{name}"')
                model.load_weights("", "reference")
    for name in configs:
        model.use(name)
        together[name]["adapters"] = adapters(model)
    kept = all(torch.equal(local(p), base[n]) for n, p in model.model.named_parameters() if n in base)
    model.close()

    found: dict[str, Any] = {}
    for name, config in policy_configs(folder / "alone", layout).items():
        alone = RoleModel("trainer", config, shape, config.parallelism)
        alone.begin_phase("rl", 0)
        alone.load_weights("", "reference")
        stats, scores, reference = [], [], None
        for step in range(STEPS):
            both = [batch(alone, name, 2 * step + i) for i in range(2)]
            alone.accumulate(both[0])
            scores.append(scored(alone, name))
            alone.accumulate(both[1])
            reference = alone.scores(batch(alone, name, 99), 1.0, "reference")[0]
            counts = Batch([], sum(b.tokens for b in both), sum(b.sequences for b in both))
            stats.append(alone.phase.update(counts, 2.0))
        ours = together[name]
        found[name] = {
            "losses": [s.loss for s in ours["stats"]] == [s.loss for s in stats],
            "norms": [s.grad_norm for s in ours["stats"]] == [s.grad_norm for s in stats],
            "rates": [s.lr for s in ours["stats"]] == [s.lr for s in stats],
            "scores": equal(ours["scores"], scores),
            "reference": equal([ours["reference"]], [reference]),
            "adapters": all(torch.equal(a, b) for a, b in zip(ours["adapters"], adapters(alone), strict=True)),
        }
        alone.close()
    between = together["fast"]["adapters"], together["slow"]["adapters"]
    apart = max(float((a - b).abs().max()) for a, b in zip(*between, strict=True))
    return {"policies": found, "base_kept": kept, "apart": apart}


def equal(ours: Any, theirs: Any) -> bool:
    import numpy as np

    return all(np.array_equal(a, b) for x, y in zip(ours, theirs, strict=True) for a, b in zip(x, y, strict=True))


def banked(folder: Path, layout: str) -> dict[str, Any]:
    """Exchange the adapters of a bank. Return facts about the model after each call."""
    import torch

    from titan_rl.actors.titan.model import local
    from titan_rl.actors.titan.role_model import RoleModel
    from titan_rl.ext.adapters.ranks.lora import is_adapter
    from titan_rl.ext.policies.ranks.adapter_bank import AdapterBank
    from titan_rl.preflight.shapes import shape_of

    made = lora_config(folder, layout, "")
    model = RoleModel("trainer", made, shape_of(made.model), made.parallelism)
    parameters = [p for n, p in model.model.named_parameters() if is_adapter(n)]

    def values() -> Any:
        return [local(p).clone() for p in parameters]

    def same(one: Any, other: Any) -> bool:
        return all(torch.equal(a, b) for a, b in zip(one, other, strict=True))

    bank = AdapterBank(model, "a")
    began = values()
    for parameter in parameters:
        parameter.grad = torch.ones_like(parameter)
    bank.add("b")
    fresh = {"gradients": [p.grad for p in parameters] == [None] * len(parameters), "other": not same(values(), began)}
    with torch.no_grad():
        for parameter in parameters:
            local(parameter).fill_(2.0)
    bank.use("a")
    back = same(values(), began) and all(bool((local(p.grad) == 1).all()) for p in parameters if p.grad is not None)
    kept = sum(p.grad is not None for p in parameters) == len(parameters)
    bank.use("a")
    bank.use("b")
    two = all(bool((local(p) == 2).all()) for p in parameters) and not any(p.grad is not None for p in parameters)
    bank.drop("a")
    bank.add("a", made.debug.seed)
    again = same(values(), began)
    refused = {}
    for what, call in {
        "add": lambda: bank.add("a"),
        "use": lambda: bank.use("c"),
        "drop": lambda: bank.drop("a"),
    }.items():
        try:
            call()
        except (ValueError, KeyError) as error:
            refused[what] = type(error).__name__
    return {
        "fresh": fresh,
        "back": back,
        "kept": kept,
        "two": two,
        "again": again,
        "refused": refused,
        "names": sorted(bank.names),
    }
