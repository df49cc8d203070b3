"""Terms of a step on GPUs, for scripts/estimate_step.py: work, in FLOP or bytes, over a rate of estimate_facts.py."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np

from bench.estimate_facts import broadcast, hbm, rate, sources
from titan_rl.batch.packing import UpTo, pack
from titan_rl.config.changes import changed
from titan_rl.config.sections import Config
from titan_rl.preflight.memory import GIB, block_parameters, cache_bytes_per_token, head_parameters, needs
from titan_rl.wire.model_shape import ModelShape
from titan_rl.wire.types import Sample


@dataclass(frozen=True, slots=True)
class Term:
    side: str
    name: str
    seconds: float
    formula: str
    source: str = ""
    avoidable: float = 0.0  # seconds
    instead: str = ""  # what the best known practice does


def term_of(side: str, name: str, seconds: float, formula: str, facts: str, spared: float = 0.0, by: str = "") -> Term:
    """`facts`: beginnings of names in FACTS."""
    return Term(side, name, seconds, formula, sources(facts), spared, by)


@dataclass(frozen=True, slots=True)
class Case:
    """A preset as its ranks work with it, and the tokens of a step."""

    config: Config
    shape: ModelShape
    prompt: int
    answers: Sequence[int]  # by sample

    @property
    def parts(self) -> int:
        """Return in how many parts a step is streamed."""
        stream = self.config.training.stream_groups
        return math.ceil(self.config.rollout.groups_per_step / stream) if stream else 1

    @property
    def depth(self) -> int:
        """Return the steps whose samples are decoded at once while the trainers step; 0: they wait."""
        return self.config.rollout.steps_ahead + (self.config.training.stream_groups > 0)

    def trainer(self) -> Iterator[Term]:
        """Yield the terms of one trainer GPU."""
        c, shape, own = self.config, self.shape, self.config.parallelism.data_parallel_shard_degree
        filled, empty, targets, microbatches = self.packed()
        blocks, n = shape.n_layers * block_parameters(shape), shape.parameters
        term = partial(term_of, "trainer")

        matmuls = 6 * blocks * filled / rate("matmul")
        formula = f"6 x {blocks / 1e9:.2f}B x {filled:,} places / {rate('matmul') / 1e12:.0f} TFLOP/s"
        yield term("matmuls of the blocks", matmuls, formula, "matmul")
        small = 6 * (rate("small_parameters") - rate("small_head")) * rate("small_places") / rate("matmul")
        small += rate("head") * rate("small_places") * rate("small_head") / head_parameters(shape)
        scale = rate("small_places") * rate("small_layers") * rate("small_width")
        rest = (rate("kernels") - small) / scale * filled * shape.n_layers * shape.dim
        formula = f"0.6B's other kernels, {rate('kernels') - small:.3f} s, scaled by places x layers x width"
        yield term("other kernels of the blocks", rest, formula, "kernels matmul head small_")
        mode, fits = c.activation_checkpoint.mode, self.fits("none")
        again = 2 * recomputed(mode, shape) * filled / rate("matmul")
        instead = 'activation_checkpoint.mode = "none"' if mode != "none" and fits else ""
        formula = f"{mode}: 2 x {recomputed(mode, shape) / 1e9:.2f}B x places / matmul rate"
        yield term("recomputed activations", again, formula, "matmul", again if instead else 0, instead)
        head, plain = rate("head") * targets, rate("plain_head") * targets
        formula = f"{targets:,} targets x {1e6 * rate('head'):.2f} us"
        yield term("head", head, formula, "head plain_head", head - plain, "keep the logits")
        device = (matmuls + rest + again + head) * (1 + empty / filled)
        formula = f"{empty:,} empty places, as the terms above"
        seconds = device * empty / (filled + empty)
        yield term("padding", seconds, formula, "", seconds, "rows without empty places")
        host = microbatches * rate("launching") * shape.n_layers / rate("small_layers")
        formula = f"max(0, {microbatches} microbatches x {host / microbatches:.3f} s of launches - kernels)"
        yield term("launches", max(0, host - device), formula, "launching small_layers")
        link = own / (own - 1) * rate("nvlink") * rate("of_nvlink")
        reduces = microbatches if c.training.gradient_sync == "microbatch" else self.parts
        moved = (microbatches * 2 * 2 + reduces * 4) * n / link
        exposed = max(0, moved - device) + (2 + 4) * n / link / shape.n_layers + moved * rate("nccl_sms")
        formula = f"first gather, last reduction; SMs for {4 * (microbatches + reduces)} x {n / 1e9:.2f}B bytes"
        spared = (reduces - 1) * 4 * n / link * rate("nccl_sms")
        yield term("gathers, reductions", exposed, formula, "nvlink of_nvlink nccl_sms", spared, "reduce once")
        formula = f"32 bytes x {n / own / 1e9:.2f}B / {hbm() / 1e12:.2f} TB/s"
        yield term("gradient norm, optimizer", 32 * n / own / hbm(), formula, "hbm copy hbm_h200")
        passes = c.algorithm.needs_reference + (c.algorithm.proximal == "trainer" and c.algorithm.updates > 1)
        formula = f"{passes} forward passes, a third of the kernels"
        yield term("reference, proximal", passes * (device - again) / 3, formula, "matmul")
        seconds = 2 * n / own / rate("pack")
        formula = f"2 x {n / own / 1e9:.2f}B bytes / {rate('pack') / 1e9:.1f} GB/s"
        yield term("pack weights", seconds, formula, "pack nvlink", seconds - broadcast(n), "NCCL broadcast")
        copied, every = 12 * n / own / rate("to_host"), c.checkpoint.interval
        hidden = device if c.checkpoint.async_mode == "async_with_pinned_mem" else 0
        formula = f"12 x {n / own / 1e9:.2f}B bytes / {rate('to_host') / 1e9:.0f} GB/s beside kernels, every {every}"
        blocked = max(0, copied - hidden) / every
        yield term("checkpoint", blocked, formula, "to_host", blocked, "copy beside the kernels")

    def generator(self) -> Iterator[Term]:
        """Yield the terms of one engine."""
        c, g, n = self.config, self.config.generator, self.shape.parameters
        each = [*self.answers][:: g.replicas]  # an engine's samples
        depth = max(1, min(self.depth, g.max_num_seqs // len(each)))
        steps = np.arange(max(each))
        alive = (np.asarray(each)[:, None] > steps).sum(0)
        term = partial(term_of, "generator")

        products = np.maximum(2 * n / hbm(), 2 * n * alive * depth / rate("matmul")).sum() / depth
        formula = f"{len(steps)} steps / {depth} x max({2 * n / 1e9:.1f} GB / {hbm() / 1e12:.2f} TB/s, FLOP / rate)"
        yield term("decode: weights", products, formula, "hbm copy hbm_h200 matmul")
        read = float((alive * (self.prompt + steps)).sum()) * cache_bytes_per_token(c, self.shape)
        formula = f"{read / 1e12:.2f} TB / {hbm() / 1e12:.2f} TB/s"
        yield term("decode: keys and values", read / hbm(), formula, "hbm copy hbm_h200")
        seconds = sum(each) * 4 * self.shape.vocab_size * rate("sampler") / hbm()
        formula = f"{sum(each):,} tokens x {self.shape.vocab_size:,} x 4 bytes x {rate('sampler'):.0f}"
        yield term("decode: sampling", seconds, formula, "sampler hbm")
        seconds = len(steps) * rate("gap") / depth
        formula = f"{len(steps)} steps / {depth} x {1e3 * rate('gap'):.0f} ms"
        yield term("decode: host", seconds, formula, "gap", seconds, "asynchronous scheduling")
        tokens = self.prompt * math.ceil(c.rollout.groups_per_step / g.replicas)
        formula = f"2 x {n / 1e9:.2f}B x {tokens:,} tokens / matmul rate"
        yield term("prefill", 2 * n * tokens / rate("matmul"), formula, "matmul")
        seconds = 2 * n * (1 / rate("write") + 1 / rate("verify"))
        formula = f"{2 * n / 1e9:.1f} GB x (1 / {rate('write') / 1e9:.0f} + 1 / {rate('verify') / 1e9:.0f} GB/s)"
        yield term("write, verify weights", seconds, formula, "write verify", seconds - broadcast(n), "NCCL broadcast")
        swaps = self.depth > 0 and c.weight_sync.in_flight == "swap"
        tokens = sum(self.prompt + length / 2 for length in each) if swaps else 0
        formula, seconds = f"{c.weight_sync.in_flight}: {tokens:,.0f} tokens", 2 * n * tokens / rate("matmul")
        yield term("recompute after a swap", seconds, formula, "matmul", seconds, 'weight_sync.in_flight = "keep"')
        if c.placement.kind == "colocated":
            yield term("wake", rate("wake"), "", "wake")

    def packed(self) -> tuple[int, int, int, int]:
        """Return a rank's filled and empty places, its targets and its microbatches; ranks have nearly equal ones."""
        size, t, p = self.config.rollout.group_size, self.config.training, self.prompt
        texts = [([1 + i // size] * p, [1 + i] * n) for i, n in enumerate(self.answers)]  # no two answers are equal
        samples = [Sample(asked + answer, [0] * p + [1] * len(answer), {}, p) for asked, answer in texts]
        each, rows, dp = math.ceil(len(samples) / self.parts), UpTo(t.local_batch_size), self.config.parallelism.dp
        cut = partial(pack, shards=dp, seq_len=t.seq_len, rows_per_microbatch=rows, pad_id=0, share=True)
        batches = [batch for i in range(0, len(samples), each) for batch in cut(samples[i : i + each])]
        computed = [rows for batch in batches for rows in batch.microbatches]
        places, filled = (sum(int(count(m.tokens)) for m in computed) // dp for count in (np.size, np.count_nonzero))
        return filled, places - filled, sum(self.answers) // dp, len(computed) // dp

    def fits(self, mode: str) -> bool:
        """Return True if a microbatch of one row fits with activations kept this way."""
        keys = {"training.local_batch_size": 1, "training.gradient_sync": "microbatch"}
        other = changed(self.config, {**keys, "activation_checkpoint.mode": mode})
        return needs(other, self.shape, int(other.hosts.gpu_memory_gb * GIB))["trainer"].fits


def recomputed(mode: str, shape: ModelShape) -> int:
    """Return the parameters whose products a backward computes again. "selective" keeps every second projection."""
    keys = shape.dim * shape.n_kv_heads * shape.head_dim
    selective = keys + shape.dim * shape.n_heads * shape.head_dim + shape.dim * shape.hidden_dim  # key, output, up
    return shape.n_layers * {"none": 0, "selective": selective, "full": block_parameters(shape)}[mode]
