"""Writes a plan as one screen of text, and names its likeliest failures and the first kernel to write."""

import math
from collections.abc import Iterator, Mapping, Sequence
from shutil import get_terminal_size
from statistics import fmean
from textwrap import wrap

from titan_rl.preflight.memory import count, gib, kept_in_blocks, size
from titan_rl.record.terminal import brief
from titan_rl.tools.plan.cheaper import Budget, fullness
from titan_rl.tools.plan.choose import Case, Plan
from titan_rl.tools.plan.rates import Spread, Work
from titan_rl.tools.plan.roofline import drawn, head_products
from titan_rl.wire.counted import counted

MOST_WIDTH, LEAST_WIDTH, LABEL = 100, 40, 14
FAILURES = 3
TERMS = 6  # longest terms of each side that are shown
SMALL = 1 / 200  # share of a step below which a term is not shown
Failure = tuple[float, str, tuple[str, ...]]
"""How likely by judgement, from 0 to 1; what happens; and the metrics that show it."""


def width() -> int:
    return max(LEAST_WIDTH, min(MOST_WIDTH, get_terminal_size().columns))


def folded(text: str) -> Iterator[str]:
    yield from wrap(text, width(), subsequent_indent="  ", break_long_words=False, break_on_hyphens=False)


def screen(
    case: Case, spent: Budget, title: str, notes: Sequence[tuple[str, str]], prompts: int, price: float
) -> Iterator[str]:
    """Yield the lines of the recommended plan: first what speaks against it."""
    plan, steps, days = spent.plan, spent.steps, spent.days
    c, s, line, work = plan.line.config, plan.step, plan.line, plan.line.work
    g, r, t, rates = c.generator, c.rollout, c.training, line.rates
    tokens = r.groups_per_step * r.group_size * work.answer.mean * work.turns.mean
    passes = spent.passes(prompts)
    split = f"{c.parallelism.world_size} train, {g.replicas * g.tensor_parallel_degree} sample"
    both = "all of them train and sample in turn"
    yield from folded(title)
    for label, text in notes:
        yield from row(label, text)
    yield ""
    yield from row("placement", f"{c.placement.kind}: {both if c.placement.kind == 'colocated' else split}")
    parts = [plan.layout, f"LoRA of rank {c.lora.rank}" * c.lora.on, "states in host memory" * t.enable_cpu_offload]
    parts += [f"recompute {c.activation_checkpoint.mode}", f"microbatches of {t.local_batch_size} x {t.seq_len} tokens"]
    yield from row("  trainer", f"{', '.join(filter(None, parts))}{_memory(plan, 'trainer')}")
    parts = [f"{g.replicas} x TP {g.tensor_parallel_degree}", "fp8" * (g.quantization == "fp8")]
    parts += [f"at most {g.max_num_seqs} sequences each"]
    parts += [f"a cache of {count(rates.engine.cached_tokens)} tokens" * bool(rates.engine.cached_tokens)]
    yield from row("  engines", f"{', '.join(filter(None, parts))}{_memory(plan, 'generator')}")
    streamed = f", updates streamed in parts of {t.stream_groups} groups" * bool(t.stream_groups)
    yield from row("algorithm", f"{c.algorithm.name}, lag {r.max_staleness_steps}{streamed}, lr {c.optimizer.lr:g}")
    batch = f"{r.groups_per_step} prompts x {r.group_size} answers, {count(tokens)} sampled tokens"
    yield from row("lengths", lengths(work))
    yield from row("batch", f"{batch}; all {prompts:,} prompts take {prompts / r.groups_per_step:.1f} steps")
    yield from row("weight sync", _sync(plan))
    how = "simulated" if plan.simulated else "closed form"
    seconds = " and ".join(f"{name} {sum(side.values()):.1f} s" for name, side in plan.sides.items())
    turns = "overlap" if s.overlaps else "take turns"
    yield from row("step", f"{plan.seconds:.1f} s, {how}; without waits {seconds}, which {turns}")
    if not line.on_cpu:
        least, most = (plan.seconds / case.facts.rates[f"published_{end}"] for end in ("most", "least"))
        text = f"a lower bound; {spent.seconds:.1f} s expected, {least:.1f} to {most:.1f}, as published steps of this"
        yield from row("", f"{text} kind took {_longer(case)} as long as planned (docs/plan.md)")
    for name, side in plan.sides.items():
        largest = sorted(side.items(), key=lambda term: -term[1])[:TERMS]
        shown = (f"{term} {seconds:.1f}" for term, seconds in largest if seconds >= plan.seconds * SMALL)
        yield from row(f"  {name}", f"{', '.join(shown)} s")
    rate = f"{tokens / spent.seconds:,.0f} tokens/s, all prompts {passes:,.0f} times"
    rate += f"; {spent.hours:,.0f} GPU-hours" * (not line.on_cpu)
    yield from row(f"in {day_count(days)}", f"{steps:,} steps, {count(steps * tokens)} sampled tokens, {rate}")
    found = plan.simulated
    if found:
        idle = f"trainers idle {found.trainers_idle:.0%}, engines {found.engines_idle:.0%}"
        age = fmean(step["policy_age/mean"] for step in found.steps)
        yield from row("staleness", f"mean {age:.2f} steps, at most {r.max_staleness_steps}; {idle}")
    if price:
        total = price * spent.hours
        each = 1e6 * total / (steps * tokens)
        text = f"{total:,.0f} at {price:g} per GPU-hour, {each:.2f} per million tokens expected"
        if not line.on_cpu:
            r = case.facts.rates
            ends = [each * r["published_median"] / r[f"published_{end}"] for end in ("most", "least")]
            text += f", {ends[0]:.2f} to {ends[1]:.2f} as published steps"
        yield from row("cost", text)
    yield ""
    yield "likeliest failures, and the metrics that show them"
    likeliest = sorted(failures(case, plan, days, passes), key=lambda failure: -failure[0])
    for number, (_, text, metrics) in enumerate(likeliest[:FAILURES], 1):
        yield from row(f"  {number}", f"{text}: {', '.join(metrics)}")
    gains = kernels(plan)
    if gains:
        text, saved = max(gains.items(), key=lambda gain: gain[1])
        share = f"at most {saved:.1f} s, {saved / plan.seconds:.0%} of the step"
        yield from row("first kernel", f"{text}: saves {share}")


def _longer(case: Case) -> str:
    least, median, most = (1 / case.facts.rates[f"published_{end}"] for end in ("most", "median", "least"))
    return f"{least:.1f} to {most:.1f}, median {median:.1f} times"


def day_count(days: float) -> str:
    text = f"{days:,.0f}" if days >= 10 else f"{days:g}" if len(f"{days:g}") < 5 else f"{days:.2g}"
    return f"{text} day{'s' * (text != '1')}"


def lengths(work: Work) -> str:
    """Describe the tokens that a plan takes for granted."""

    def written(spread: Spread) -> str:
        deviation = f" +- {spread.deviation:,.0f}" * bool(spread.deviation)
        cut = f", at most {spread.most:,.0f}" * (spread.mean < spread.most < math.inf)
        return f"{spread.mean:,.5g}{deviation}{cut}"

    text = f"prompts of {written(work.prompt)} tokens, answers of {written(work.answer)} (--tokens)"
    if work.turns.mean > 1:
        read = f", {written(work.observation)} read after each" * bool(work.observation.mean)
        text += f"; turns {written(work.turns)}{read} (--turns)"
    return text


def _memory(plan: Plan, mesh: str) -> str:
    need = plan.memory.get(mesh)
    return f"; {gib(need.nbytes)} of {gib(need.limit)} GiB" if need else ""


def _sync(plan: Plan) -> str:
    line, sync, version = plan.line, plan.line.rates.sync, size(plan.line.version_bytes)
    what = f"{version} of {'adapters' if line.config.lora.in_vllm else 'weights'}"
    own = f"pack {brief(sync.publish_s)} s, write and verify {brief(line.sync['switch_s']['write, verify weights'])} s"
    if not line.crossing_bytes:
        return f"{what} through shared memory, no byte leaves its node; {own}"
    seconds = max(sync.fetch_s, line.sync["switch_s"]["weights between nodes"])
    ports = counted(line.gpu.ports, "port")
    link = f"at least {brief(seconds)} s at {line.config.hosts.link_gbps:,g} Gbit/s"
    return f"{what} by rdma, {size(line.crossing_bytes)} through the busiest node's {ports}, {link}; {own}"


def failures(case: Case, plan: Plan, days: float, passes: float) -> Iterator[Failure]:
    """Yield what may go wrong. The numbers are the plan's; the scale of the weights is a judgement."""
    line, r, work, experts = plan.line, plan.config.rollout, plan.line.work, bool(case.shape.experts)
    lengths, cached, lag = drawn(work.answer), line.rates.engine.cached_tokens, r.max_staleness_steps
    text = f"each prompt is trained on {passes:,.0f} times: all its answers become right, or are learnt by heart"
    yield 1 - math.exp(-passes / 30), text, ("frac_reward_zero_std", "eval/score")
    failing = case.facts.rates["interruptions"] * case.count * days * 24 * (case.device == "cuda")
    text = f"a GPU or node fails, {failing:.2g} times expected; each costs {plan.config.fault.snapshot_interval} steps"
    yield 1 - math.exp(-failing), text, ("throughput/tokens_per_second", "time/step")
    text = (
        f"the longest answers, {lengths.max() / lengths.mean():.1f} times the mean, hold a step while slots are empty"
    )
    idle = (1 - float(lengths.mean() / lengths.max())) * (0.3 if plan.step.overlaps else 0.6)
    yield idle, text, ("bubble/generator", "completions/max_length")
    cut = float((lengths >= work.answer.most).mean()) if work.answer.deviation else 0.0
    text = f"{cut:.0%} of the answers reach {work.answer.most:,.0f} tokens, more as they grow, and are cut off"
    yield min(1.0, 10 * cut), text, ("completions/clipped_ratio", "completions/mean_length")
    text = f"tokens that are up to {lag} updates old leave the ratio's clip"
    yield lag / 4, text, ("off_policy/ess", "clip_ratio/high")
    text = "trainer and engines compute other log-probs in bfloat16" + ", and choose other experts" * experts
    yield 0.2 + 0.4 * experts, text, ("logprob_gap/mean", "off_policy/weight_min")
    yield 0.25, "the entropy falls before the answers are right", ("entropy", "reward/std")
    if cached:
        full = fullness(plan)
        text = f"answers grow until the cache of {count(cached)} tokens, now {full:.0%} full, holds fewer sequences"
        yield min(1.0, full) / 2, text, ("engine/sampling_seconds", "completions/mean_length")
    need = plan.memory.get("trainer")
    if need:
        free = 1 - need.nbytes / need.limit
        text = f"a trainer runs out of memory, of which {free:.0%} is free by estimate"
        yield max(0.0, 0.5 - 3 * free), text, ("memory/max_reserved_pct", "memory/num_alloc_retries")


def kernels(plan: Plan) -> Mapping[str, float]:
    """Return kernels to write, with the seconds that each saves at most in the side that bounds the step, or in both
    sides if they take turns."""
    line, s, facts = plan.line, plan.step, plan.line.facts
    c, shape, work = line.config, line.shape, line.work
    trainer, engine = (sum(side.values()) for side in plan.sides.values())
    found = dict[str, float]()
    if line.on_cpu:
        return found
    if not s.overlaps or trainer >= engine:
        moved = 2 * kept_in_blocks(c, shape, c.parallelism, "none") / facts.hbm(line.gpu)
        least = (
            2
            * head_products(c)
            * shape.vocab_size
            * shape.dim
            / c.parallelism.tensor_parallel_degree
            / facts.matmul(line.gpu)
        )
        found |= {
            "a block's norms, rotary embedding and SiLU in fewer passes": s.trainer["other block kernels"]
            - moved * s.places,
            "products that overlap their exchange (async TP)": s.trainer["tensor-parallel exchange"],
            "experts' products as fast as dense ones": s.trainer["expert products"] * (1 - facts.rates["experts"]),
            "a log-prob head that multiplies alone": s.trainer["log-prob head"] - least * s.places,
        }
    if not s.overlaps or engine >= trainer:
        prompt = work.prompt.mean / (work.prompt.mean + line.read + work.answer.mean * work.turns.mean / 2)
        shared = prompt * (1 - 1 / c.rollout.group_size)
        found |= {
            "decode attention that reads a group's prompt once": shared * s.engine["decode attention"],
            "decode steps that do not wait for the host": s.engine["host between decode steps"],
        }
    return found


def row(label: str, text: str) -> Iterator[str]:
    """Yield a label and its text, wrapped at the width of the screen."""
    line = f"{label:<{LABEL}}"
    for word in text.split():
        if len(line) + 1 + len(word) > width():
            yield line
            line = " " * LABEL
        line = f"{line} {word}"
    yield line


def comparison(rows: Sequence[tuple[str, str]]) -> Iterator[str]:
    """Yield the lines of each plan that was rejected, and why."""
    yield "\nrejected"
    for name, why in rows:
        yield from wrap(f"{name}: {why}", width(), initial_indent="  ", subsequent_indent="    ")
