"""Computes the rates of a run's parts from config, shape and facts.toml, and a step's time in closed form.

A term is work, in FLOP or bytes, over a rate. Terms keep their names, so that a step's time can be split by them.
"""

import heapq
import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from typing import Any

import numpy as np

from titan_rl.config.auto import BLOCK_TOKENS
from titan_rl.config.sections import BYTES, Config, LoraSection, ParallelismSection
from titan_rl.ext.adapters.layers import adapter_parameters
from titan_rl.preflight.memory import by_formula, cache_bytes_per_token, engine_weights, kept_in_blocks, needs
from titan_rl.tools.plan.facts import Facts, Gpu
from titan_rl.tools.plan.rates import NOTHING, EngineRates, Rates, Spread, SyncRates, TrainerRates, Work, threads_of
from titan_rl.wire.cores import usable_cores
from titan_rl.wire.model_shape import ModelShape
from titan_rl.wire.parts import part

Terms = Mapping[str, Mapping[str, float]]
"""Seconds of each rate, by the names of its terms."""
HEAD = 128256 * 4096
"""Vocabulary x width of the measured log-prob head."""
OPTIMIZER_BYTES = {"master": 32, "bfloat16": 56}
"""Adam reads and writes weights and moments, and reads gradients twice, in float32. Moments in bfloat16 are widened and
rounded too."""
DRAWN = 512  # quantiles that stand for a distribution


@lru_cache(maxsize=64)  # a plan asks for the same ones again and again
def drawn(spread: Spread, n: int = DRAWN) -> np.ndarray:
    """Return n quantiles of a distribution in an order that is always the same."""
    return np.random.default_rng(0).permutation([spread.quantile((i + 0.5) / n) for i in range(n)])


def block_products(shape: ModelShape) -> int:
    """Return the parameters of all blocks with which a token is multiplied: in experts its own ones."""
    rows = [3 * shape.hidden_per_token(i) + shape.experts * shape.routes(i) for i in range(shape.n_layers)]
    return shape.attention_parameters + shape.dim * sum(rows)


def expert_products(shape: ModelShape) -> int:
    """Return the experts' share of block_products."""
    return shape.routed_layers * shape.dim * 3 * shape.hidden_dim * shape.experts_per_token


def recomputed(mode: str, shape: ModelShape) -> int:
    """Return the parameters whose products a backward computes again. Experts are left out: "selective" and "full"
    repeat them all. "selective" keeps every second projection of a dense block: it repeats key, output and up."""
    if mode in ("none", "selective"):
        rows = sum(map(shape.dense_rows, range(shape.n_layers)))
        return (shape.attention_parameters // 2 + shape.dim * rows) * (mode == "selective")
    return block_products(shape) - expert_products(shape)


def head_products(config: Config) -> int:
    """Return the products of the log-prob head: logits, once more in the backward unless they are kept, and two of
    gradients."""
    return 3 if config.training.keep_logits is True else 4


@dataclass(frozen=True)
class Roofline:
    """A config as its ranks work with it (preflight/memory.py), on GPUs of one kind."""

    config: Config
    shape: ModelShape
    gpu: Gpu
    facts: Facts
    work: Work
    environment: Spread = NOTHING  # seconds of a turn

    @cached_property
    def rates(self) -> Rates:
        sides = (self.trainer, self.sync)
        trainer, sync = ({key: sum(terms.values()) for key, terms in side.items()} for side in sides)
        cores = float(usable_cores()) if self.on_cpu else math.inf
        busy = [number * float(self.on_cpu) for number in threads_of(self.config)]
        cache = needs(self.config, self.shape, int(self.gpu.memory_gb * 2**30))["generator"].own.kept["KV cache"].nbytes
        cached = 0 if self.on_cpu else cache // cache_bytes_per_token(self.config, self.shape)
        block = BLOCK_TOKENS["cpu" if self.on_cpu else "cuda"]
        started = self.facts.rates["engine_start"]
        return Rates(
            replace(self.decode, cached_tokens=cached, block=block, start_s=started, cores=busy[0]),
            TrainerRates(**trainer, cores=busy[1]),
            SyncRates(**sync),
            environment=self.environment,
            step_s=self.facts.rates["controller"],
            cores=cores,
        )

    @property
    def decode(self) -> EngineRates:
        """Return the rates of one replica's steps, whose cache has no limit."""
        seconds: dict[str, Any] = {key: sum(terms.values()) for key, terms in self.engine.items()}
        return EngineRates(
            **seconds,
            ahead=self.config.generator.async_scheduling is True,
            passed_over=1 - self.shape.experts_per_token / self.shape.experts if self.shape.experts else 0.0,
        )

    @property
    def on_cpu(self) -> bool:
        return self.gpu.name == "CPU"

    @property
    def hosts(self) -> int:
        return self.config.hosts.number

    @property
    def version_bytes(self) -> int:
        """Return the bytes that a weight sync moves to one replica."""
        moved = adapter_parameters(self.config.lora, self.shape) if self.config.lora.in_vllm else self.shape.parameters
        return moved * BYTES[self.config.generator.dtype]

    def link(self, ranks: int, apart: int) -> float:
        """Return the bytes/s of a GPU in a collective of `ranks`, each `apart` GPUs from the next. Between nodes, the
        ranks of a node share what arrives at its ports."""
        together = max(1, self.gpu.per_node // apart)
        local = self.gpu.nvlink if together > 1 else math.inf
        wire = self.gpu.network * together if ranks > together else math.inf
        return min(local, wire) * self.facts.rates["of_link"]

    @property
    def engine(self) -> Terms:
        """Seconds of one replica."""
        c, shape, facts, tp = self.config, self.shape, self.facts, self.config.generator.tensor_parallel_degree
        each, hbm, matmul = BYTES[c.generator.dtype], facts.hbm(self.gpu), facts.matmul(self.gpu)
        unread = 0 if shape.tied else shape.vocab_size * shape.dim * each // tp  # a decode step reads few embeddings
        reduced = 2 * shape.n_layers * shape.dim * each * 2 * (tp - 1) / tp / self.link(tp, 1)
        small = 2 * shape.n_layers * facts.rates["all_reduce"] * (tp > 1)
        faster = self.gpu.fp8 / self.gpu.flops if c.generator.quantization == "fp8" else 1.0
        blocks = 2 * block_products(shape) / tp / matmul / faster
        head = 2 * shape.vocab_size * shape.dim / tp / matmul
        experts = 3 * shape.routed_layers * shape.experts * shape.dim * shape.hidden_dim * each // tp
        sampler = 4 * shape.vocab_size * facts.rates["sampler"] / hbm
        return {
            "step_s": {"all-reduces": small},
            "gap_s": {"host between decode steps": facts.rates["gap"]},
            "host_s": {"host between decode steps": facts.rates["gap_sequence"]},
            "weights_s": {"decode products": (engine_weights(c, shape).nbytes - unread - experts) / hbm},
            "experts_s": {"decode products": experts / hbm},
            "sequence_s": {"decode products": blocks + head, "all-reduces": reduced, "sampler": sampler},
            "context_s": {"decode attention": cache_bytes_per_token(c, shape) / hbm},
            "prefill_s": {"prefill": blocks, "all-reduces": reduced},
        }

    @property
    def trainer(self) -> Terms:
        """Seconds of one dp row."""
        c, shape, facts, p = self.config, self.shape, self.facts, self.config.parallelism
        t, tp, each = c.training, p.tensor_parallel_degree, BYTES[c.training.mixed_precision_param]
        matmul, hbm, blocks = facts.matmul(self.gpu), facts.hbm(self.gpu), block_products(shape)
        mode, forward = c.activation_checkpoint.mode, 1 + (c.activation_checkpoint.mode in ("full", "offload"))
        kernels = kept_in_blocks(c, shape, p, "none") * self.kernels_per_byte
        total = self.work.answer.mean * self.work.turns.mean
        targets = total / (total + self.work.prompt.mean / c.rollout.group_size + self.read)
        moved = shape.dim * each * (tp - 1) / tp * 4 * (1 + forward) / self.link(tp, 1)
        experts, head = p.expert_parallel_degree, facts.rates["head"] * facts.slower(self.gpu)
        sent = shape.experts_per_token * shape.dim * each * (experts - 1) / experts * 2 * (1 + forward)
        grouped = expert_products(shape)
        slower, again = grouped / facts.rates["experts"], grouped * (mode != "none") / facts.rates["experts"]
        place = {
            "block products": (4 if c.lora.on else 6) * (blocks - grouped) / tp / matmul,
            "expert products": (4 if c.lora.on else 6) * slower / tp / matmul,
            "attention": self.attention / tp * (1 + (forward - 1) * 2 / 7),
            "other block kernels": kernels * (1 + (forward - 1) / 3),
            "recomputed products": 2 * (recomputed(mode, shape) + again) / tp / matmul,
            "log-prob head": head * shape.vocab_size * shape.dim / HEAD / tp * targets * head_products(c) / 4,
            "tensor-parallel exchange": shape.n_layers * moved,
            "expert exchange": shape.routed_layers * sent / tp / self.link(experts, 1),
        }
        place = {name: seconds / p.context_parallel_degree for name, seconds in place.items()}
        device = sum(place.values()) * t.local_batch_size * t.seq_len
        host = facts.rates["small_launches"] * shape.n_layers / facts.small.n_layers * (not self.on_cpu)
        cut, shards, link = by_formula(shape, p, c.lora), p.shards, self.link(p.shards, tp)
        gathered = 2 * each * cut.whole * (shards - 1) / shards / link
        if t.enable_cpu_offload:
            gathered += 2 * each * cut.held / facts.rates["to_host"]
        changed = cut.adapters_whole or cut.whole
        reduced = 4 * changed * (shards - 1) / shards / link
        copies = p.data_parallel_replicate_degree
        reduced += 4 * changed / shards * 2 * (copies - 1) / copies / self.link(copies, shards * tp)
        once = t.parameter_gather == "update"  # then in a forward only
        gathered, kept = (0.0, gathered / 2) if once else (gathered, 0.0)
        per_microbatch = gathered + reduced * (t.gradient_sync == "microbatch")
        per_update = kept + reduced * (t.gradient_sync == "update")
        ends = (gathered / 2 + reduced) / shape.n_layers
        share = facts.rates["collective_share"]

        def hidden(seconds: float) -> float:
            return max(0.0, seconds - device) + share * min(seconds, device)

        rate = facts.rates["to_host"] if t.enable_cpu_offload else hbm
        own = cut.adapters or cut.held
        return {
            "place_s": place,
            "microbatch_s": {"launches": max(0.0, host - device), "gathers": hidden(per_microbatch) + ends},
            "update_s": {
                "gathers": hidden(per_update) + kept / shape.n_layers,
                "optimizer": OPTIMIZER_BYTES[c.optimizer.moments] * own / rate,
            },
            "score_s": {"scores": sum(place.values()) / 3},
        }

    @property
    def attention(self) -> float:
        """Return the seconds of a place's attention, forward and backward, at the rate of the measured small model. It
        grows with the number of keys to which the place attends, and a little less for many keys, where it is more
        efficient."""
        facts, small, shape = self.facts, self.facts.small, self.shape
        fixed = facts.rates["attention_start"]
        longer = (self.keys + fixed) / (facts.rates["small_keys"] + fixed)
        wider = shape.n_layers * shape.n_heads * shape.head_dim / (small.n_layers * small.n_heads * small.head_dim)
        each = facts.rates["small_attention"] / facts.rates["small_places"]
        return each * longer * wider * facts.slower(self.gpu)

    @property
    def keys(self) -> float:
        """Return the keys to which a place attends on average: its prompt's, and its answer's up to itself. The
        prompt's own places are there once for each row of a group."""
        prompt, answers = self.work.prompt.mean, drawn(self.work.answer) * self.work.turns.mean + self.read
        copies = self.prompt_copies / self.config.rollout.group_size
        keys = float((answers * (prompt + answers / 2)).mean()) + copies * prompt**2 / 2
        return keys / (float(answers.mean()) + copies * prompt)

    @property
    def prompt_copies(self) -> float:
        """Return how many times the trainer computes a prompt: once for each row that its group fills."""
        r, tokens = self.config.rollout, self.work.answer.mean * self.work.turns.mean
        return max(1.0, r.group_size * tokens / self.config.training.seq_len)

    @property
    def kernels_per_byte(self) -> float:
        """Return the seconds of all other kernels per byte that the operations of a block save, from the measured small
        model, scaled by the rate of the GPU's memory."""
        facts, small = self.facts, self.facts.small
        plain = replace(self.config, lora=LoraSection())
        kept = kept_in_blocks(plain, small, ParallelismSection(), "none")
        measured, places = facts.rates["small_kernels"] - facts.rates["small_attention"], facts.rates["small_places"]
        known = 6 * block_products(small) / facts.rates["matmul"]
        known += facts.rates["head"] * small.vocab_size * small.dim / HEAD
        return (measured / places - known) / kept * facts.rates["copy"] / facts.hbm(self.gpu)

    @property
    def read(self) -> float:
        """Return the tokens of a rollout that are neither sampled nor its prompt."""
        return self.work.observation.mean * (self.work.turns.mean - 1)

    @property
    def sync(self) -> Terms:
        c, rates, version = self.config, self.facts.rates, self.version_bytes
        own, colocated = version / c.generator.tensor_parallel_degree, c.placement.kind == "colocated"
        crossed = self.crossing_bytes / (c.hosts.link_gbps * 1e9 / 8 or self.gpu.node_network)
        packed = version / c.parallelism.row_ranks / c.parallelism.shards / rates["pack"]
        verified = own / rates["verify"] * self.facts.gpus["H200"].hbm / self.gpu.hbm
        return {
            "publish_s": {"pack weights": packed},
            "fetch_s": {"weights between nodes": 0.0 if colocated else crossed},
            "switch_s": {
                "write, verify weights": own / rates["write"] + verified,
                "weights between nodes": crossed if colocated else 0.0,
                "wake": rates["wake"] * (colocated and bool(c.placement.sleep)),
            },
        }

    @property
    def crossing_bytes(self) -> float:
        """Return the bytes through the busiest node's ports in a sync: all of a version into each node with engines,
        out of the nodes with trainers, unless nodes pass it on."""
        c, node = self.config, self.gpu.per_node
        if self.hosts == 1:
            return 0.0
        if c.placement.kind == "colocated":
            return self.version_bytes * (self.hosts - 1) / self.hosts
        trainers = math.ceil(c.parallelism.world_size / node)
        readers, passed_on = self.hosts - trainers, part("readers of trainers")
        first = passed_on(c.weight_sync, trainers, readers) if passed_on else readers
        return self.version_bytes * max(1.0, first / trainers)


@dataclass(frozen=True)
class StepTime:
    """A step in closed form: seconds of both sides by term. They take turns, or overlap: the longer one bounds."""

    trainer: Mapping[str, float]
    engine: Mapping[str, float]
    overlaps: bool
    depth: int
    decode_steps: float
    places: float  # a dp row's
    longest: float  # seconds of the longest rollout
    rest: float  # seconds of the controller

    @property
    def seconds(self) -> float:
        sides = sum(self.trainer.values()), sum(self.engine.values())
        return (max(sides) if self.overlaps else sum(sides)) + self.rest


def step_time(line: Roofline) -> StepTime:
    """Estimate a step without a simulation: for ranking, and to name terms."""
    c, rates, work, e = line.config, line.rates, line.work, line.rates.engine
    r, t = c.rollout, c.training
    samples, replicas = r.groups_per_step * r.group_size, c.generator.replicas
    depth = 0 if c.placement.kind == "colocated" else r.steps_ahead + (t.stream_groups > 0)
    own = math.ceil(samples / replicas) * max(1, depth)
    lengths = np.ceil(np.resize(drawn(work.answer) * work.turns.mean, own)).astype(int)
    context = work.prompt.mean + line.read + lengths / 2
    slots = min(own, c.generator.max_num_seqs, int(e.cached_tokens / context.mean()) or own)
    alive = _alive(lengths, max(1, slots))
    products = np.maximum(e.read_s(alive), alive * e.sequence_s)
    prompts = math.ceil(r.groups_per_step / replicas) * work.prompt.mean + own / max(1, depth) * line.read
    again = float(context.sum()) / max(1, depth) if depth and c.weight_sync.in_flight == "swap" else 0.0
    d = max(1, depth)
    engine = {
        "decode products": float(products.sum()) / d,
        "decode attention": float((lengths * context).sum()) * e.context_s / d,
        **{name: len(alive) * seconds / d for name, seconds in line.engine["step_s"].items()},
        "host between decode steps": float(e.waited_s(alive, alive * context.mean()).sum()) / d,
        "prefill": (prompts + again) * e.prefill_s,
        "environment": rates.environment.mean * work.turns.mean * (not depth),
        "write, verify weights": rates.sync.switch_s,
    }
    places = filled_places(line)
    trainer = {**update_terms(line, places), "pack weights": rates.sync.publish_s}
    if depth == 0:
        engine["weights between nodes"] = rates.sync.fetch_s
    held = slots * float(context.mean())
    step_s = float(e.device_s(slots, held) + e.waited_s(slots, held))
    longest = step_s * float(lengths.max()) + rates.environment.mean * work.turns.mean
    return StepTime(trainer, engine, depth > 0, depth, len(alive) / d, places, longest, rates.step_s)


def filled_places(line: Roofline) -> float:
    """Return the places of a step's rows that a dp row computes, with their padding."""
    c, work, seq_len = line.config, line.work, line.config.training.seq_len
    r, tokens = c.rollout, work.answer.mean * work.turns.mean
    filled = r.groups_per_step * r.group_size * (tokens + line.read)
    filled += r.groups_per_step * work.prompt.mean * line.prompt_copies
    padding = min(0.5, tokens / 2 / seq_len)
    return max(filled * (1 + padding) / c.parallelism.dp, seq_len)


def update_terms(line: Roofline, places: float) -> dict[str, float]:
    """Return the seconds of a dp row's updates in a step of this number of places, by term."""
    a, t, sides = line.config.algorithm, line.config.training, line.trainer
    count = math.ceil(places / (t.seq_len * t.local_batch_size))
    terms = {name: seconds * places for name, seconds in sides["place_s"].items()}
    for key, times in (("microbatch_s", count), ("update_s", a.minibatches)):
        for name, seconds in sides[key].items():
            terms[name] = terms.get(name, 0.0) + seconds * times
    scores = a.needs_reference + (a.proximal == "trainer" and a.minibatches > 1)
    terms["scores"] = scores * places * sum(sides["score_s"].values())
    return terms


def _alive(lengths: np.ndarray, slots: int) -> np.ndarray:
    """Return how many sequences each decode step has, where a waiting one takes the first slot that is free."""
    free = [0] * slots
    begins = np.array([heapq.heapreplace(free, free[0] + length) for length in map(int, lengths)])
    change = np.bincount(begins, minlength=max(free) + 1) - np.bincount(begins + lengths, minlength=max(free) + 1)
    return change.cumsum()[:-1]
