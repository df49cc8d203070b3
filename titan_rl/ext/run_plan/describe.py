"""Describes a run's plan: what --dry-run prints, and what every run prints first."""

import os
import shutil
from collections.abc import Sequence
from typing import Literal

from titan_rl.config.auto import on_device, threads
from titan_rl.config.changes import differences
from titan_rl.config.sections import BYTES, AlgorithmSection, Config, ParallelismSection
from titan_rl.config.toml import ConfigError, as_text, as_toml, load_of_run
from titan_rl.ext.run_plan.tables import after_loss, host_rows, memory_tables, models_of_seats
from titan_rl.preflight.added_parameters import added_parameters, trained_parameters, with_adapter_sync
from titan_rl.preflight.checks.machine import IMAGES_BYTES
from titan_rl.preflight.memory import (
    UNKNOWN,
    Cut,
    beside_trainer,
    count,
    engine_weights,
    filled_cache,
    frozen_roles,
    gib,
    moment_bytes,
    sequences_at_once,
    size,
    trainer_needs,
    update_choices,
)
from titan_rl.preflight.placement import place, slots_per_host
from titan_rl.preflight.plan import Setup
from titan_rl.preflight.snapshot_sizes import snapshot_sizes
from titan_rl.record.plan_view import MeshRow, RunPlan
from titan_rl.tasks.games import GAMES
from titan_rl.text.inspection import inspect_template, verdict
from titan_rl.wire.cores import usable_cores
from titan_rl.wire.counted import counted
from titan_rl.wire.model_shape import ModelShape
from titan_rl.wire.parts import needed_part, part
from titan_rl.wire.types import ENTRY, IMAGES
from titan_rl.wire.weight_source import FORCES_LINKS

BYTES_PER_KEPT_TOKEN = 4 + 1 + 4 * 4
"""Of record.batches: id, mask, and the columns of most algorithms: behaviour, advantage, reference, proximal."""

TCP_GBPS = 7.0
"""Rate of Monarch's TCP fallback between processes of one machine with two cores (docs/benchmarks/weight_sync.csv, bare
RDMABuffer reads): an estimate for others."""


def describe(setup: Setup, warnings: Sequence[str], sharded: Cut = UNKNOWN) -> RunPlan:
    """`sharded`: how TorchTitan cuts the models, which only a dry run asks."""
    config, shape = setup.config, setup.shape
    model = (
        f"{shape.family}, {count(shape.parameters)} parameters: {shape.n_layers} layers x {shape.dim}, "
        f"{shape.n_heads} heads ({shape.n_kv_heads} kv), vocabulary {shape.vocab_size}, "
    )
    model += f"from {config.model.hf_assets_path}" if config.model.hf_assets_path else "random weights"
    facts = [("model", model), ("task", task(setup))]
    if setup.images:
        nbytes = sum(image.nbytes for image in setup.images)
        facts.append(("images", f"{len(setup.images):,} of {size(nbytes)}, copied to {setup.folder / IMAGES}"))
    if config.task.template == "chat":
        facts.append(("chat", chat(setup)))
    if lora := added_parameters(config.lora, shape).described(config):
        facts.append(("lora", lora))
    meshes = [model_row(setup, "trainer", config.parallelism, shape)]
    if config.curriculum.on:
        facts.append(("curriculum", curriculum(config)))
    if config.cold_start.steps:
        facts.append(("cold start", cold_start(config)))
    if config.training.steps:
        facts.append((config.algorithm.name, algorithm(config)))
        if config.algorithm.routing_replay:
            facts.append(("routing replay", routing_replay(config, shape)))
    if config.samples_rollouts:
        facts.append(("weights", transport(setup)))
        meshes.append(generators(setup))
        if config.rollout_code:
            meshes.append(environments(config))
            meshes += [generators(own, name) for name, own in models_of_seats(setup).items()]
        if config.opponents.pool:
            facts.append(("opponents", opponents(config)))
    facts.append(("rate", rates(config)))
    if config.samples_rollouts:
        facts.append(("sampling", sampling(config)))
    if config.evaluates:
        facts.append(("evaluation", evaluation(config)))
    if seen := outside(config):
        facts.append(("outside", seen))
    changes = differences(setup.given, setup.resolved)
    unused = set() if shares_gpus(setup) else {"placement.sleep"}
    if autos := [f"{key} {as_text(now)}" for key, _, now in changes if key not in unused]:
        facts.append(("auto", ", ".join(autos)))
    rows = setup.resolved.training.local_batch_size
    cp = config.parallelism.context_parallel_degree
    cut = f", each cut over {cp} ranks" if cp > 1 else " on a rank"
    facts.append(("microbatch", f"at most {rows} rows of {config.training.seq_len} tokens{cut}"))
    if setup.device == "cuda":
        facts.append(("on a GPU", on_gpu(setup.resolved)))
        if chosen := updates(setup):
            facts.append(("updates", chosen))
    if shares_gpus(setup):
        facts.append(("engines", turns(setup)))
    facts.append(("run", str(setup.folder)))
    too_large: list[str] = []
    if config.checkpoint.enable:
        facts.append(("disk", disk(setup, too_large)))
    ignored: list[str] = []
    if str(setup.resume):
        facts.append(("resume", f"from {setup.resume}"))
        if changed := ", ".join(changed_keys(setup, ignored)):
            facts.append(("changed", changed))
    shapes = setup.role_shapes
    meshes += [model_row(setup, name, role.parallelism, shapes.get(name, shape)) for name, role in config.roles.items()]
    hosts = ()
    if config.hosts.number > 1:
        slots = slots_per_host(config, setup.gpus.count if setup.device == "cuda" else 0)
        placed = place(config, slots)
        hosts = host_rows(config, placed, slots)
        facts.append(("lost host", after_loss(config, placed, slots)))
    remarks = [*warnings, *too_large, *setup.dropped, *setup.resume_notes, *ignored]
    tables = memory_tables(setup, sharded)
    return RunPlan(setup.name, config.job.description, meshes, facts, remarks, hosts, tables)


def disk(setup: Setup, too_large: list[str]) -> str:
    """Describe the room that checkpoints take. `too_large` gets a line if the disk has less."""
    keep, one = setup.config.checkpoint.keep_latest_k, setup.checkpoint_bytes
    there = next(path for path in (setup.folder.absolute(), *setup.folder.absolute().parents) if path.is_dir())
    free, most = shutil.disk_usage(there).free, (keep + 1) * one
    if free < (most if keep else one):
        too_large.append(
            f"checkpoint.keep_latest_k: {keep or 'all'} checkpoints of {size(one)}, and one that is written, take "
            f"{size(most)} in {there}, which has {size(free)} free"
        )
    kept = f"{keep} kept and one written: {size(most)}" if keep else "all kept"
    if steps := setup.config.record.batches:
        kept += f"; batches of {steps} steps: up to {size(steps * batch_bytes(setup.config, setup.shape))}"
    return f"{size(one)} per checkpoint, {kept}; {size(free)} free"


def batch_bytes(config: Config, shape: ModelShape) -> int:
    """Return the most that the samples of a step take in RUN/batches: an id, a mask, a few columns and the routes per
    token."""
    routes = route_bytes(shape) if config.algorithm.routing_replay else 0
    return step_tokens(config) * (BYTES_PER_KEPT_TOKEN + routes + config.algorithm.distill_top_k * ENTRY.itemsize)


def step_tokens(config: Config) -> int:
    """Return the most tokens of a step, read and sampled."""
    rollout, training = config.rollout, config.training
    rl = config.algorithm.kind == "rl"
    samples = rollout.groups_per_step * rollout.group_size if rl else training.global_batch_size
    return samples * (training.seq_len + 1)


def route_bytes(shape: ModelShape) -> int:
    """Return the bytes of one token's routes."""
    return needed_part("column routes", "algorithm.routing_replay").bytes_of_token(shape)


def routing_replay(config: Config, shape: ModelShape) -> str:
    each = route_bytes(shape)
    return (
        f"trainers take the generator's {shape.experts_per_token} experts in {shape.routed_layers} layers: "
        f"{size(each)} per token, up to {size(each * step_tokens(config))} per step"
    )


def changed_keys(setup: Setup, ignored: list[str]) -> list[str]:
    """Return the keys that have changed since the run's last start, without [job]. `ignored` gets a line for each key
    of an earlier version that has no effect."""
    try:
        before = load_of_run(setup.folder, notes=ignored)
    except (ConfigError, OSError):  # written by a later version
        return []
    both = differences(with_adapter_sync(on_device(before, setup.device), setup.shape, setup.device), setup.config)
    return [f"{key} = {as_toml(now)} (was {as_toml(was)})" for key, was, now in both if not key.startswith("job.")]


def rates(config: Config) -> str:
    """Describe the learning rates and their schedule."""
    parts = []
    if config.cold_start.steps:
        parts.append(f"cold_start.lr {config.cold_start.lr:g}")
    if config.training.steps:
        parts.append(f"optimizer.lr {config.optimizer.lr:g}, {schedule(config)}")
        if config.algorithm.needs_critic:
            parts.append(f"critic.lr {config.critic.lr:g}")
    return "; ".join(parts)


def schedule(config: Config) -> str:
    s, steps = config.lr_scheduler, config.training.steps
    parts = [f"{s.warmup_steps} warm-up steps"] if s.warmup_steps else []
    if s.decay_ratio:
        to = f"{s.min_lr_factor * config.optimizer.lr:g}"
        parts.append(f"{s.decay_type} decay to {to} over the last {round(s.decay_ratio * steps)} of {steps} steps")
    else:
        parts.append("then constant" if parts else "constant")
    return ", ".join(parts)


def sampling(config: Config) -> str:
    """Describe the keys of sampling, and the bounds on the policy's moves."""
    a, r = config.algorithm, config.rollout
    parts = [("rollout.temperature", r.temperature, None), ("rollout.top_p", r.top_p, 1), ("rollout.top_k", r.top_k, 0)]
    parts += [("rollout.min_p", r.min_p, 0), ("rollout.max_new_tokens", r.max_new_tokens, None)]
    parts += [("algorithm.clip_low", a.clip_low, None), ("algorithm.clip_high", a.clip_high, None)]
    parts += [("algorithm.kl_coef", a.kl_coef, None), ("algorithm.entropy_coef", a.entropy_coef, 0)]
    parts += [
        ("algorithm.entropy_target", a.entropy_target, 0),
        ("algorithm.top_entropy_share", a.top_entropy_share, 1),
    ]
    if a.kind != "rl" or a.online_pairs:
        parts = parts[:5] if a.online_pairs else parts[4:5]
    return ", ".join(f"{key} {value:g}" for key, value, off in parts if value != off)


def evaluation(config: Config) -> str:
    """Return when the held-out problems and the sets are measured."""
    interval = config.eval.interval
    often = f"every {interval} steps, and" if interval else "only"
    best = f"; best/ keeps the weights with the highest {config.eval.keep_best}" if config.eval.keep_best else ""
    return f"{often} before the first and after the last step{best}"


def outside(config: Config) -> str:
    """Return who sees the run from outside, without the alert's destination, which may hold a secret."""
    metrics, seen = config.metrics, list[str]()
    if metrics.prometheus:
        seen.append(f"Prometheus at {metrics.prometheus}")
    if metrics.alert:
        seen.append(f"alerts of {', '.join(metrics.alert_on)}")
    return "; ".join(seen)


def on_gpu(config: Config) -> str:
    """Describe how the trainers compute there, from a resolved config."""
    exact = config.training.mixed_precision_param == "float32"
    recomputed = {
        "none": "no activation is recomputed",
        "selective": "some activations are recomputed",
        "full": "all activations are recomputed",
        "offload": "all activations are recomputed from block inputs in host memory",
    }
    attention = "attention in float32, by torch's SDPA" if exact else "FlashAttention in bfloat16"
    blocks = "blocks compiled" if config.compile.enable else "blocks not compiled"
    gathered = f"parameters gathered once per {config.training.parameter_gather}"
    if config.training.parameter_gather == "microbatch":
        gathered = "parameters gathered in each forward and backward"
    reduced = f"gradients reduced once per {config.training.gradient_sync}"
    logits = f"logits {'kept for' if config.training.keep_logits is True else 'computed again in'} the backward"
    return ", ".join([attention, blocks, recomputed[config.activation_checkpoint.mode], gathered, reduced, logits])


def updates(setup: Setup) -> str:
    """Describe the estimated time of a step's updates in the chosen way, and in the next best one; "" if nothing was
    estimated."""
    times = part("times of updates")
    if not times or not setup.gpus.nbytes:
        return ""
    best, *others = update_choices(setup.config, setup.shape, setup.gpus.nbytes, setup.adapters)
    card = times(setup.shape, setup.gpus.nbytes).card(setup.config)
    text = f"at least {best.seconds:.3g} s a step by the rates of {card}, if all rollouts are as long as they may be"
    return f"{text}; next best {others[0].seconds:.3g} s: {others[0]}" if others else text


def shares_gpus(setup: Setup) -> bool:
    """Return True if engines and trainers take turns on the same GPUs."""
    c = setup.config
    return setup.device == "cuda" and c.placement.kind == "colocated" and c.samples_rollouts


def turns(setup: Setup) -> str:
    """Describe what colocated engines do while the trainers compute."""
    c, own = setup.resolved, setup.adapters.slots
    cache, most = c.generator.kv_cache_memory_mb << 20, filled_cache(c, setup.shape, own)
    kept = sum(beside_trainer(c, setup.shape, own).values())
    text = f"KV cache of {gib(cache)} GiB, where {gib(most)} hold {sequences_at_once(c, own)} sequences of full length"
    if c.placement.sleep:
        return f"{text}; engines sleep while trainers compute, and keep {gib(kept)} GiB"
    trainer = trainer_needs(c, setup.shape, setup.gpus.nbytes, adapters=setup.adapters)["trainer"].own.total
    both = f"an engine's {gib(kept)} and a trainer's {gib(trainer)} GiB fit a GPU of {gib(setup.gpus.nbytes)}"
    return f"{text}; engines stay awake: {both}"


def model_row(setup: Setup, name: str, p: ParallelismSection, shape: ModelShape) -> MeshRow:
    """Return the row of a mesh of TorchTitan's: of the trainer, or of a model besides the policy."""
    config, training = setup.config, setup.config.training
    if name == "critic":
        shape = shape.with_value_head()
    adapted = name == "trainer" and config.lora.on
    weights = shape.parameters * BYTES[training.dtype]
    trained = trained_parameters(config.lora, shape) if adapted else shape.parameters
    shards = p.shards * p.tensor_parallel_degree
    holds = f"frozen weights {size(weights // shards)} per rank"
    each = 2 * (BYTES[training.dtype] + moment_bytes(config))
    if name in ("trainer", "critic"):  # Adam's two moments; all of it is sharded over the ranks of a replica
        holds = f"weights, gradients, AdamW: {size(each * trained // shards)} per rank"
    if adapted:
        frozen = shape.parameters * BYTES[config.lora.base_dtype]
        holds = f"frozen weights {size(frozen // shards)}, adapters with {holds.removeprefix('weights, ')}"
    if name == "trainer":
        holds += "".join(f", {role} {size(weights // shards)}" for role in frozen_roles(config))
        average = trained * BYTES[training.dtype] // shards
        holds += f", teacher's average {size(average)}" if config.algorithm.averages else ""
    snapshots = snapshot_sizes(config).of_mesh(name, shape)
    holds += f"; snapshots {size(snapshots)} of host memory" if snapshots else ""
    compute = training.mixed_precision_param
    dtype = training.dtype if compute == training.dtype else f"{training.dtype}, {compute} compute"
    return MeshRow(name, p.world_size, layout(p), device(setup), dtype, holds)


def layout(p: ParallelismSection) -> str:
    parts = [f"FSDP2 {p.data_parallel_shard_degree}"]
    if p.data_parallel_replicate_degree > 1:
        parts = [f"HSDP {p.data_parallel_replicate_degree} x {p.data_parallel_shard_degree}"]
    if p.context_parallel_degree > 1:
        parts.append(f"CP {p.context_parallel_degree}")
    if p.tensor_parallel_degree > 1:
        parts.append(f"TP {p.tensor_parallel_degree}")
    experts = f", experts over {p.expert_parallel_degree}" if p.expert_parallel_degree > 1 else ""
    return " x ".join(parts) + experts


def generators(setup: Setup, name: str = "generator") -> MeshRow:
    g = setup.resolved.generator
    each = engine_weights(setup.resolved, setup.shape).nbytes
    cache = f"KV cache {g.kv_cache_memory_mb} MiB" if g.kv_cache_memory_mb else "KV cache sized by vLLM"
    layout = f"vLLM x {g.replicas}" + (f", TP {g.tensor_parallel_degree}" if g.tensor_parallel_degree > 1 else "")
    procs = g.replicas * g.tensor_parallel_degree
    quantized = {"none": "", "fp8": " (linear layers in fp8)", "int8": " (linear layers rounded to int8)"}
    holds = f"weights {size(each)} per rank{quantized[g.quantization]}, {cache}"
    if setup.device == "cuda" and setup.config.debug.deterministic:
        holds += ", batch-invariant kernels"
    return MeshRow(name, procs, layout, device(setup, "generator"), g.dtype, holds)


def opponents(config: Config) -> str:
    o, slots = config.opponents, config.opponent_slots
    drawn = {"even": "drawn evenly", "hard": "drawn by how often they win"}[o.weighting]
    return (
        f"{', '.join(o.pool)}; {drawn}, in {o.share:.0%} of the groups; adapters kept every {o.interval} steps, "
        f"{slots} more slots in engines"
    )


def environments(config: Config) -> MeshRow:
    e = config.environment
    tokens = f" or {e.max_tokens} tokens" if e.max_tokens else ""
    holds = f"{config.rollout_code}: up to {e.concurrency} rollouts per process, {e.max_turns} turns{tokens} each"
    if e.python:
        holds += f", in {e.python}"
    if e.endpoints:
        holds += "; " + ", ".join(
            f"{seat} by {table.get('url') or table.get('folder')}" for seat, table in e.endpoints.items()
        )
    if config.task.agent:
        holds += "; endpoint on loopback, " + ("chat" if config.task.template == "chat" else "completions only")
    if config.model.vision != "none":
        holds += f"; images add {size(IMAGES_BYTES)} to each"
    return MeshRow("environment", e.processes, "lockstep" if e.lockstep else "", f"cpu, {place_of(config)}", "", holds)


def device(setup: Setup, kind: Literal["model", "generator"] = "model") -> str:
    if setup.device == "cpu":
        own, cores = threads(setup.config, kind, "cpu", usable_cores()), usable_cores()
        return f"cpu ({own} of {cores} cores each), {place_of(setup.config)}"
    here = setup.gpus.here or setup.config.hosts.number > 1
    return f"cuda, {place_of(setup.config) if here else 'another host'}"


def place_of(config: Config) -> str:
    return "this host" if config.hosts.number == 1 else f"{config.hosts.number} hosts"


def task(setup: Setup) -> str:
    t, heldout = setup.config.task, len(setup.heldout.prompts)
    problems = counted(len(setup.task.train) - len(setup.task.unfit), "problem")
    problems = "endless problems" if setup.task.endless else problems
    rewarded_by = "agent" if t.agent else "environment" if t.name in GAMES else ""
    reward = f"rewarded by the {rewarded_by}" if rewarded_by else f"reward {t.reward}"
    drawn = ", ".join(f"{part.name} {part.count:,} x {part.weight:g}" for part in setup.task.parts)
    drawn = drawn or ", ".join(t.datasets)
    sources = f" ({drawn})" if drawn else ""
    sets = "".join(f", {len(each.prompts)} x {each.samples} in {each.name}" for each in setup.eval_sets)
    return f"{t.name}: {problems}{sources}, {heldout} held out{sets}, {reward}"


def chat(setup: Setup) -> str:
    renderer, task = setup.tokenizer.chat, setup.config.task
    source = (
        task.chat_template if task.chat_template.endswith(".jinja") else "given" if task.chat_template else "its own"
    )
    calls = "no tool calls" if renderer.call_format == "text" else f"calls as {renderer.call_format}"
    return f"template {source}, {verdict(inspect_template(setup.tokenizer))}; {calls}; thinking: {task.thinking}"


def curriculum(config: Config) -> str:
    c = config.curriculum
    out = f"a prompt drops out after {c.solved_visits} solved visits" if c.solved_visits else "no prompt drops out"
    waits = f"waits for {c.hopeless_wait} turns after a hopeless one" if c.hopeless_wait else "none waits"
    return f"{out}, {waits}"


def cold_start(config: Config) -> str:
    cold = config.cold_start
    steps = f"{cold.steps} supervised steps of {cold.batch_size}"
    if not cold.stop_at:
        return steps
    at = f" at temperature {cold.stop_temperature:g}" if cold.stop_temperature else ""
    return f"up to {steps}, until {cold.stop_at:g} of {config.eval.size} training problems are solved{at}"


def algorithm(config: Config) -> str:
    a, r = config.algorithm, config.rollout
    if a.kind != "rl":
        what = {"supervised": "examples", "preference": "pairs", "reward": "pairs"}[a.kind]
        return f"{config.training.steps} steps of {config.training.global_batch_size} {what}"
    updates = f", {a.updates} updates per step" if a.updates > 1 else ""
    kl = f", {a.kl} KL in the {a.kl_in}" if a.kl_coef else ""
    kl += f", length reward {a.length_reward} x {a.length_weight:g}" if a.length_reward != "none" else ""
    corrected = f", correction {a.correction} up to {a.correction_high:g}" if a.correction != "none" else ""
    if config.generator.quantization != "none":
        corrected = f"{corrected or ', no correction'} for weights sampled in {config.generator.quantization}"
    learns = f"advantage {a.advantage}{_teacher(a)}, ratio per {a.ratio}, {_clip(a)}, "
    learns += a.aggregation.replace("_", " ")
    if a.online_pairs:
        learns, corrected = f"{a.pair_loss} of each group's best and worst sample, beta {a.beta:g}", ""
    return (
        f"{config.training.steps} steps of {r.groups_per_step} prompts x {r.group_size} samples, "
        f"at most {r.max_staleness_steps} steps stale{updates}; {learns}{kl}{corrected}"
    )


def _clip(a: AlgorithmSection) -> str:
    return f"loss {a.loss}" if a.loss else f"clip {a.clip}"


def _teacher(a: AlgorithmSection) -> str:
    """Describe the weights and the context of a teacher, unless it is another model that reads the policy's prompt."""
    added = f" + {a.teacher_coef:g} x teacher" if a.teacher_coef else ""
    reads = f", and reads {' or '.join(a.teacher_context)}" if a.teacher_context else ""
    if a.distill_top_k:
        each = size(a.distill_top_k * ENTRY.itemsize)
        added += (
            f", divergence (beta {a.distill_beta:g}) over its top {a.distill_top_k} tokens, {each} per sampled token"
        )
    decay = f" of decay {a.teacher_decay:g}" if a.averages else ""
    own = a.needs_teacher and (a.teacher_weights != "folder" or reads)
    return added + (f" (its weights are the {a.teacher_weights}{decay}{reads})" if own else "")


def between_hosts(setup: Setup, version: int) -> str:
    """Describe how the bytes of a version reach other hosts: by RDMA, else between GPUs by NCCL, else over TCP. The
    ranks ask Monarch for ibverbs; this host's devices stand for all of them here."""
    how, cuda = setup.config.weight_sync.transport, setup.device == "cuda"
    broadcast, rdma = (
        f"broadcast by {'NCCL' if cuda else 'gloo'} to a replica of each host",
        "RDMABuffer, one-sided reads",
    )
    if how == "broadcast":
        return broadcast
    if cuda and not setup.gpus.here:
        return rdma if how == "rdma" else f"{rdma} (without RDMA devices {broadcast})"
    if os.path.isdir("/sys/class/infiniband") and os.listdir("/sys/class/infiniband"):
        return f"{rdma} (ibverbs)"
    if cuda and how == "auto":
        return f"{broadcast}: no RDMA device here"
    rate = min(TCP_GBPS, setup.config.hosts.link_gbps or TCP_GBPS)
    seconds = 8 * version / (rate * 1e9)
    return f"{rdma} (TCP fallback: no RDMA device here; about {seconds:.1f} s per sync and host, an estimate)"


def _per_version(setup: Setup) -> str:
    """Describe the bytes of a weight sync, and of the other way to sync adapters."""
    config, each = setup.resolved, BYTES[setup.config.generator.dtype]
    adapters, whole = (n * each for n in (added_parameters(config.lora, setup.shape).number(), setup.shape.parameters))
    if not config.lora.on:
        return f"{size(whole)} per version and replica"
    if config.lora.sync == "merge":
        other = f'lora.sync = "adapter" would move {size(adapters)}'
        return f"{size(whole)} per version and replica, adapters merged ({other})"
    other = f'lora.sync = "merge" would move {size(whole)}'
    if shares_gpus(setup) and config.placement.sleep:
        return f"{size(whole + adapters)} per version and replica: engines that sleep lose the frozen weights ({other})"
    return f"{size(adapters)} of adapters per version and replica, frozen weights once ({other})"


def transport(setup: Setup) -> str:
    """Describe the weight transport. Name the price of Monarch's TCP fallback, which is much slower than RDMA."""
    sync = setup.config.weight_sync
    link = between_hosts(setup, setup.shape.parameters * BYTES[setup.config.generator.dtype])
    within = "shared memory" + (f" within a host, else {link}" if setup.config.hosts.at_addresses else "")
    checked = {"off": "unverified", "transfer": "verified as transferred", "live": "verified in the live parameters"}
    quantization = setup.config.generator.quantization
    lands = "" if quantization == "none" else f", quantized to {quantization} on landing"
    return (
        f"{link if sync.transport in FORCES_LINKS else within}, {_per_version(setup)}"
        f"{', changed blocks only' if sync.delta else ''}{lands}, {checked[sync.verify]}; "
        f"requests in flight: {sync.in_flight}"
    )
