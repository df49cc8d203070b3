"""Chooses placement, parallelism and lag of a run: enumerates, drops what does not fit, ranks by a closed form, and
simulates the best."""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice, product
from typing import TYPE_CHECKING, Any

from titan_rl.config.auto import on_device
from titan_rl.config.changes import changed
from titan_rl.config.sections import Config
from titan_rl.ext.adapters.layers import WHOLE_MODEL_FACTOR
from titan_rl.preflight.checks.machine import check_cache_room
from titan_rl.preflight.checks.model import check_parallelism
from titan_rl.preflight.memory import GIB, Need, gib, needs, on_cpu, on_gpus, update_choices
from titan_rl.tools.plan.facts import Facts, Gpu
from titan_rl.tools.plan.rates import NOTHING, Spread, Work
from titan_rl.tools.plan.roofline import Roofline, StepTime, step_time
from titan_rl.wire.cores import host_memory
from titan_rl.wire.errors import RunError
from titan_rl.wire.model_shape import ModelShape

if TYPE_CHECKING:
    from titan_rl.tools.plan.simulate import Simulation

Keys = Mapping[str, Any]
DEGREES = (1, 2, 4, 8)
LAGS = (0, 1, 2)
LORA_RANK = 16
SIMULATED, STEPS = 3, 6  # plans, and steps of each without a lag; with one, its first and last steps are more
MOST_TOKENS = 10**7  # in a step: more take too much memory to simulate, and the closed form stands
NEARLY = 1.02  # a larger lag must be faster by this
PATIENCE = 4  # deadlines are this many times as long as estimated
SEQUENCES = (16, 512)  # fewest and most of an engine
NODES = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128)
"""Sizes of clusters to name for a model that does not fit."""


@dataclass(frozen=True, slots=True)
class Plan:
    """A placement that fits."""

    config: Config  # with "auto"
    keys: Keys
    line: Roofline
    step: StepTime
    memory: Mapping[str, Need]
    simulated: "Simulation | None" = None

    @property
    def seconds(self) -> float:
        return self.simulated.seconds_per_step if self.simulated else self.step.seconds

    @property
    def layout(self) -> str:
        p = self.config.parallelism
        copies = f"HSDP {p.data_parallel_replicate_degree} x " if p.data_parallel_replicate_degree > 1 else ""
        experts = f", experts over {p.expert_parallel_degree}" if p.expert_parallel_degree > 1 else ""
        return f"{copies}FSDP {p.data_parallel_shard_degree} x TP {p.tensor_parallel_degree}{experts}"

    @property
    def sides(self) -> Mapping[str, Mapping[str, float]]:
        """Return the seconds of both sides by term."""
        return {"trainer": self.step.trainer, "engines": self.step.engine}

    def __str__(self) -> str:
        g, lag = self.config.generator, self.config.rollout.max_staleness_steps
        engines = f"{g.replicas} engines x TP {g.tensor_parallel_degree}"
        return f"{self.config.placement.kind}: trainer {self.layout}, {engines}, lag {lag}"


@dataclass(frozen=True)
class Case:
    """A question: a model and its work, and the GPUs for it."""

    base: Config  # with the keys that no choice depends on
    keys: Keys  # the TOML's, besides the chosen ones
    pinned: Keys  # that the user set: no choice changes them
    shape: ModelShape
    gpu: Gpu
    count: int
    facts: Facts
    work: Work
    environment: Spread = NOTHING  # seconds of a turn
    rejected: list[tuple[str, str]] = field(default_factory=list)  # plan, why
    _updates: dict[str, Config] = field(default_factory=dict, init=False)  # chosen, by the sections they depend on

    @property
    def nodes(self) -> int:
        return math.ceil(self.count / self.gpu.per_node)

    @property
    def device(self) -> str:
        return "cpu" if self.gpu.name == "CPU" else "cuda"

    @property
    def gpu_bytes(self) -> int:
        return int(self.gpu.memory_gb * GIB)

    @property
    def hosts(self) -> Keys:
        if self.device == "cpu":
            return {"hosts.device": self.pinned.get("hosts.device", "cpu")}
        keys: dict[str, Any] = {"hosts.slots": min(self.count, self.gpu.per_node)}
        if self.nodes > 1:
            gbps = self.gpu.node_network * 8 / 1e9
            keys |= {"hosts.kind": "attach", "hosts.count": self.nodes, "hosts.link_gbps": gbps}
        keys |= {"hosts.gpu_memory_gb": self.gpu.memory_gb, "hosts.gpu": self.gpu.name}
        return {key: value if key == "hosts.count" else self.pinned.get(key, value) for key, value in keys.items()}

    @property
    def splits(self) -> list[int]:
        """Return the numbers of trainer GPUs to try besides all of them: whole nodes, or GPUs of one."""
        unit, parts = (self.gpu.per_node, self.nodes) if self.nodes > 1 else (1, self.count)
        tried = range(1, parts) if parts <= 16 else [parts * share // 16 for share in range(1, 16)]
        return [unit * n for n in dict.fromkeys(tried)]

    def config(self, keys: Keys) -> Config | None:
        """Return the config with these keys. None: `conflict` returns the reason."""
        return None if self.conflict(keys) else changed(self.base, keys)

    def conflict(self, keys: Keys) -> str:
        """Return the first key of which the user set another value, or why these keys do not cut the model, or ""."""
        others = (key for key, value in keys.items() if self.pinned.get(key, value) != value)
        key = next(others, "")
        if key:
            return f"{key} is set to {self.pinned[key]}, and here it has to be {keys[key]}"
        return next(iter(check_parallelism(changed(self.base, keys), self.shape)), "")

    def resolved(self, config: Config) -> Config:
        """Return the config as the ranks work with it."""
        if self.device == "cpu":
            return on_cpu(config, self.shape, host_memory())
        return on_gpus(self.with_updates(config), self.shape, self.gpu_bytes)

    def with_updates(self, config: Config) -> Config:
        """Return the config with the way to compute updates, which no key of engines changes."""
        c = config
        key = repr((c.training, c.parallelism, c.activation_checkpoint, c.rollout, c.placement, c.lora, c.hosts))
        if key not in self._updates:
            self._updates[key] = update_choices(config, self.shape, self.gpu_bytes)[0].config
        chosen = self._updates[key]
        return replace(config, training=chosen.training, activation_checkpoint=chosen.activation_checkpoint)

    def unfit(self, config: Config, mesh: str) -> str:
        """Return why a rank does not fit its GPU, or ""."""
        if self.device == "cpu":
            return ""
        need = needs(self.resolved(config), self.shape, self.gpu_bytes)[mesh]
        if not need.fits:
            return f"{need.what} needs {gib(need.nbytes)} GiB of {gib(need.limit)}: {need.parts}"
        if mesh == "generator":
            config = on_device(self.with_updates(config), self.device)
            return "; ".join(check_cache_room(config, self.shape, self.gpu_bytes))
        return ""

    def with_keys(self, keys: Keys) -> "Case":
        """Return the case with keys of which the user set none."""
        own = {key: value for key, value in keys.items() if key not in self.pinned}
        return replace(self, base=changed(self.base, own), keys={**self.keys, **own})


def trainers(case: Case, gpus: int, placed: Keys) -> Iterator[tuple[Keys, str]]:
    """Yield the trainer's layouts on this number of GPUs, each with the reason why it does not fit, or ""."""
    for tp, copies in product(DEGREES, DEGREES):
        if tp > case.gpu.per_node or gpus % (tp * copies):
            continue
        dealt = math.gcd(gpus // copies, case.gpu.per_node) if case.shape.experts else 1
        layout = {
            "parallelism.data_parallel_replicate_degree": copies,
            "parallelism.data_parallel_shard_degree": gpus // tp // copies,
            "parallelism.tensor_parallel_degree": tp,
            "parallelism.expert_parallel_degree": dealt,
        }
        keys = {**placed, **layout}
        config = case.config(keys)
        yield keys, case.unfit(config, "trainer") if config else case.conflict(keys)


def engines(case: Case, gpus: int, placed: Keys) -> Iterator[tuple[Keys, str]]:
    """Yield the engines on this number of GPUs, each with the reason why it does not fit, or "". They sample all
    sequences of a step at once, or the number that fits."""
    r, key = case.base.rollout, "generator.max_num_seqs"
    for tp in DEGREES:
        if tp > case.gpu.per_node or gpus % tp:
            continue
        share = r.groups_per_step * r.group_size * (1 + placed["rollout.max_staleness_steps"]) * tp / gpus
        sequences = case.pinned.get(key, min(SEQUENCES[1], max(SEQUENCES[0], 2 ** math.ceil(math.log2(share)))))
        keys = {**placed, "generator.replicas": gpus // tp, "generator.tensor_parallel_degree": tp, key: sequences}
        why = case.conflict(keys)
        while config := case.config(keys):
            why = case.unfit(config, "generator")
            if not why or keys[key] <= SEQUENCES[0] or key in case.pinned:
                break
            keys = {**keys, key: keys[key] // 2}
        yield keys, why


def plans(case: Case) -> list[Plan]:
    """Return the fastest plan by the closed form of each placement, split and lag, the fastest first."""
    found = list[Plan]()
    colocated = [] if case.device == "cpu" else [("colocated", case.count, case.count, 0)]
    splits = [(1, 1)] if case.device == "cpu" else [(gpus, case.count - gpus) for gpus in case.splits]
    lags = [case.pinned["rollout.max_staleness_steps"]] if "rollout.max_staleness_steps" in case.pinned else LAGS
    apart = [("disaggregated", *split, lag) for split, lag in product(splits, lags)]
    for kind, training, sampling, lag in [*colocated, *apart]:
        if case.pinned.get("placement.kind", kind) != kind:
            continue
        groups = case.base.rollout.groups_per_step
        stream = case.pinned.get("training.stream_groups", groups // 4 if lag else 0)
        placed = {"placement.kind": kind, "rollout.max_staleness_steps": lag, "training.stream_groups": stream}
        placed = {**case.hosts, **placed}
        layouts = list(trainers(case, training, placed))
        fit = [keys for keys, why in layouts if not why]
        beside = fit if kind == "colocated" else [placed]  # a trainer whose GPUs they share
        sides = [(keys, list(engines(case, sampling, keys))) for keys in beside]
        replicas = [(keys, more) for keys, side in sides for more, why in side if not why]
        pairs = replicas if kind == "colocated" else [(keys, more) for keys in fit for _, more in replicas]
        tried = [planned(case, {**keys, **more}) for keys, more in pairs]
        best = [plan for plan in tried if plan is not None]
        if best:
            found.append(min(best, key=lambda plan: plan.step.seconds))
        elif lag == lags[0] or kind == "colocated":
            trainer = [] if fit else [why for _, why in layouts]
            engine = [] if replicas else [why for _, side in sides for _, why in side if why]
            why = min(trainer or engine, key=_missing, default="trainer and engines do not fit a GPU together")
            case.rejected.append((kind if kind == "colocated" else f"{training} train, {sampling} sample", why))
    return sorted(found, key=lambda plan: plan.step.seconds)


def _missing(why: str) -> float:
    """Return the GiB that a reason names, to choose the nearest."""
    _, _, rest = why.partition("needs ")
    return float(rest.split()[0]) if rest else math.inf


def planned(case: Case, keys: Keys) -> Plan | None:
    """Return a plan if its meshes fit together."""
    config = case.config(keys)
    if config is None:
        return None
    resolved = case.resolved(config)
    memory = {} if case.device == "cpu" else needs(resolved, case.shape, case.gpu_bytes)
    if not all(need.fits for need in memory.values()):
        return None
    line = Roofline(resolved, case.shape, case.gpu, case.facts, case.work, case.environment)
    step = step_time(line)
    waited = max(600, math.ceil(PATIENCE * max(step.longest, step.seconds * (1 + config.rollout.steps_ahead))))
    limits = dict.fromkeys(
        ("rollout.timeout_seconds", "environment.rollout_seconds", "comm.train_timeout_seconds"), waited
    )
    limits = {key: case.pinned.get(key, value) for key, value in limits.items()}
    return Plan(changed(config, limits), {**case.keys, **keys, **limits}, line, step, memory)


def smaller(case: Case) -> Iterator[Case]:
    """Yield the case, and variants that need less memory."""
    rank = case.pinned.get("lora.rank", LORA_RANK)
    rate = round(case.base.optimizer.lr * WHOLE_MODEL_FACTOR, 9)
    fp8: Keys = {"generator.quantization": "fp8"} if case.gpu.fp8 and not case.shape.experts else {}
    lora: Keys = {"lora.rank": rank, "lora.alpha": 2.0 * rank, "optimizer.lr": rate}
    tried: list[Keys] = [{}, fp8]
    if rank:
        tried += [lora, {**lora, **fp8}, {**lora, "training.enable_cpu_offload": True}]
    yield from (case.with_keys(keys) for keys in tried)


def choose(case: Case) -> list[Plan]:
    """Return the plans, the recommended one first: of the SIMULATED fastest by closed form the fastest by simulation,
    unless one with less lag is nearly as fast. If no plan fits, engines in fp8, adapters and offloading are tried."""
    found = next(filter(None, map(plans, smaller(case))), [])
    if not found:
        return []
    r, answer = case.base.rollout, case.work.answer.mean * case.work.turns.mean
    if r.groups_per_step * r.group_size * (answer + case.work.prompt.mean) > MOST_TOKENS:
        return found
    ran = filter(None, (simulated(case, plan) for plan in found))
    best = sorted(islice(ran, SIMULATED), key=lambda plan: plan.seconds)
    if not best:
        return []
    near = [plan for plan in best if plan.seconds <= NEARLY * best[0].seconds]
    first = min(near, key=lambda plan: plan.config.rollout.max_staleness_steps)
    shown = {str(plan): plan for plan in (first, *best)}
    return [*shown.values(), *(plan for plan in found if str(plan) not in shown)]


def simulated(case: Case, plan: Plan) -> Plan | None:
    """Return the plan with its simulation; None if the simulated run failed."""
    from titan_rl.tools.plan.simulate import simulate

    line = plan.line
    try:
        steps = STEPS * (1 + plan.config.rollout.max_staleness_steps)
        run = simulate(plan.config, line.rates, line.work, steps=steps, resolved=line.config)
    except RunError as error:
        case.rejected.append((str(plan), str(error)))
        return None
    return replace(plan, simulated=run)


def smallest(case: Case) -> int:
    """Return the fewest GPUs of this kind on which a plan fits; 0: more than are tried, or there are none."""
    sizes = (
        []
        if case.device == "cpu"
        else [n for n in DEGREES if n < case.gpu.per_node] + [case.gpu.per_node * n for n in NODES]
    )
    larger = (replace(case, count=n, rejected=[]) for n in sizes if n > case.count)
    return next((other.count for other in larger if any(map(plans, smaller(other)))), 0)


def slower(chosen: Sequence[Plan]) -> Iterator[tuple[str, str]]:
    """Yield the plans that are not recommended, and by how much they are slower."""
    for plan in chosen[1:]:
        how, first = ("simulated", chosen[0].seconds) if plan.simulated else ("closed form", chosen[0].step.seconds)
        yield str(plan), f"{plan.seconds:.1f} s a step ({how}), {plan.seconds - first:+.1f} s"
