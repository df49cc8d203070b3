"""Rules about the engines: their disagreement, stale samples, and time."""

import math
from statistics import fmean, median

from titan_rl.config.sections import Config
from titan_rl.record.lines import is_number
from titan_rl.tools.diagnosis.answer_facts import AnswerFacts
from titan_rl.tools.diagnosis.findings import Change, RunFinding, moved, number, percent
from titan_rl.tools.diagnosis.history import RECENT, MetricsHistory

GAP_MULT = 1.05  # mean exp(|gap|), as metric_docs.py has it: above it more than rounding differs
GAP_MEAN = 0.05  # nats: bfloat16 in both engines gives about 0.01
LAG_MULT, LAG_MEAN = 1.4, 0.3
"""The same with a lag, or with quantized weights: the policy's own change, or their rounding, is in the gap then, and
clip and correction are there for it."""
FEW_TOKENS = 100.0  # times the mean gap: a largest gap above it comes from few tokens
ESS = 0.5  # share of the tokens that the weights of the correction leave
CLIPPED = 0.2  # share of the tokens on which the clip acts: a healthy step clips a few percent
CLIPPED_WHOLE = 0.8
"""The same where a clip acts on whole sequences: gspo's paper clips 15% without a lag, and a lag multiplies that."""
AGREEMENT = 0.75  # share of replayed experts: rounding leaves 98%, a lag less, rows of other tokens at most about half
SLOWER = 2.0  # times the early seconds of a step: a shared host varies by less over RECENT steps
SLOWER_SECONDS = 1.0  # below it, seconds are the noise of a host's scheduler
EARLY = 10  # steps whose median is the usual time
DRAFTS_STEPS = 10  # siblings have no answers to draft from before prompts come again
LOSES = 0.95  # times the tokens a second: an estimate nearer to 1 is no reason to change a key
PARTS = {
    "time/generate": ("sampling", "generator.replicas"),
    "time/train": ("training", "training.local_batch_size"),
    "time/sync": ("the weight sync", "weight_sync.delta"),
    "time/judge": ("reference, teacher or critic", "reference.mesh"),
    "time/wait": ("rewards and packing", "task.reward_workers"),
}
AFTERWARDS = {"time/save": ("checkpoints", "checkpoint.interval"), "time/eval": ("evaluation", "eval.interval")}


def gap(run: MetricsHistory) -> RunFinding | None:
    """Trainers and generators that disagree on the log-probs of the same tokens."""
    mult, mean = run["logprob_gap/mult"], run["logprob_gap/mean"]
    lost = sum("logprob_gap/mean" in line and line["logprob_gap/mean"] is None for line in run.lines[-RECENT:])
    config, age = run.config, run["policy_age/mean"].recent()
    quantized = config.generator.quantization != "none"
    most_mult, most_mean = (LAG_MULT, LAG_MEAN) if age > 0 or quantized else (GAP_MULT, GAP_MEAN)
    if not len(mean) or (not mult.recent() > most_mult and mean.recent() <= most_mean and not lost):
        return None
    since = mean.since(lambda value: value > most_mean / 2)
    if len(mult):
        since = min(since, mult.since(lambda value: value > (1 + most_mult) / 2))
    most = run["logprob_gap/max"].recent(1)
    few = (
        f"few tokens differ much (largest {number(most)})"
        if most > FEW_TOKENS * mean.recent()
        else "most tokens differ"
    )
    changes = []
    if merged(config):
        changes.append(Change.of(config, "lora.sync", "adapter"))
    if age > 0:
        lag = config.rollout.max_staleness_steps
        changes.append(Change.of(config, "rollout.max_staleness_steps", lag // 2))
    if quantized:
        changes.append(Change.of(config, "generator.quantization", "none"))
    if config.generator.dtype != config.training.mixed_precision_param:
        same = config.generator.dtype if config.generator.dtype != "auto" else "float32"
        changes.append(Change.of(config, "training.mixed_precision_param", same))
    if config.algorithm.correction == "none":
        changes.append(Change.of(config, "algorithm.correction", "token_tis"))
    changes.append(Change("debug.deterministic", "compare with float32 in both engines and lag 0"))
    stale = f"; the tokens are {age:.1f} steps old, which is part of it" if age > 0 else "; no token is stale"
    rounds = "; merged adapters are rounded to 16 bits, which loses small changes" if merged(config) else ""
    return RunFinding(
        "gap",
        f"trainers and generators disagree: mean log-prob gap {number(mean.recent())}, mean exp|gap| "
        f"{number(mult.recent())} from step {since} on, {few}{stale}{rounds}{_places(run.answers)}",
        since,
        run.last,
        tuple(changes),
        "The update follows ratios that are the engines' and not the policy's. With lag 0 and float32 the gap is 1e-6; "
        "from there, change one thing at a time. Files have no trainer log-prob per token.",
        explains=frozenset(("collapse", "flat", "stale", "overfit", "no_signal")),
        level=int(math.log10(max(mean.recent() / GAP_MEAN, 1.0))),
    )


def merged(config: Config) -> bool:
    """Return True if a weight sync adds adapters to weights of 16 bits."""
    dtype = config.generator.dtype
    half = dtype in ("bfloat16", "float16") or (dtype == "auto" and config.hosts.device == "cuda")
    return config.lora.on and config.lora.sync == "merge" and half


def _places(facts: AnswerFacts | None) -> str:
    """Return where the tokens are whose sampling log-prob is low: their gaps are the largest."""
    total = sum(facts.unlikely.values()) if facts else 0
    if facts is None or not total:
        return ""
    shares = ", ".join(
        f"{percent(facts.unlikely[where] / facts.tokens[where])} of the {where} tokens"
        for where in ("first", "inside", "last")
        if facts.tokens[where]
    )
    return f"; sampled with a probability below 1%, where a gap weighs most: {shares}"


def stale(run: MetricsHistory) -> RunFinding | None:
    """Samples that are too old, or too many updates per step: clip and correction throw much of the step away."""
    ess = run["off_policy/ess"].recent()
    clips = run["clip_ratio/low"].plus(run["clip_ratio/high"])
    clipped, age = clips.recent(), run["policy_age/mean"].recent()
    config = run.config
    whole = config.algorithm.ratio == "sequence" or config.algorithm.clip == "vespo"
    most = CLIPPED_WHOLE if whole else CLIPPED
    if not (ess < ESS or clipped > most) or (not age > 0 and config.algorithm.updates == 1):
        return None
    low = run["off_policy/ess"].since(lambda value: value < (1 + ESS) / 2) if ess < ESS else run.last
    high = clips.since(lambda value: value > most / 4) if clipped > most else run.last
    since = min(low, high)
    numbers = [f"clip acts on {percent(clipped)} of the tokens"] if clipped > most else []
    numbers += [f"the effective sample size is {percent(ess)}"] if ess < ESS else []
    updates = config.algorithm.updates
    if age > 0:
        changes = [Change.of(config, "rollout.max_staleness_steps", config.rollout.max_staleness_steps // 2)]
        why = f"samples are {age:.1f} steps old (at most {run['policy_age/max'].recent(1):.0f})"
    else:
        key = "algorithm.epochs" if config.algorithm.epochs > 1 else "algorithm.minibatches"
        changes, why = [Change.of(config, key, max(1, updates // 2))], f"a step makes {updates} updates"
    changes.append(Change.of(config, "optimizer.lr", float(f"{config.optimizer.lr / 3:.0e}")))
    return RunFinding(
        "stale",
        f"{why}: {' and '.join(numbers)}, from step {since} on",
        since,
        run.last,
        tuple(changes),
        "The policy moves too far between the sampling of a token and its update: fewer steps of lag, or smaller ones.",
        problem=not run.rises,
        explains=frozenset(("collapse", "flat", "gap")),
    )


def routes(run: MetricsHistory) -> RunFinding | None:
    """Replayed experts that the trainers' routers would not have chosen."""
    agreement = run["routing/agreement"]
    if not agreement.recent() < AGREEMENT:
        return None
    since, config = agreement.since(lambda value: value < AGREEMENT), run.config
    changes = [Change.of(config, "algorithm.routing_replay", False)]
    if run["policy_age/mean"].recent() > 0:
        lag = config.rollout.max_staleness_steps
        changes.insert(0, Change.of(config, "rollout.max_staleness_steps", lag // 2))
    return RunFinding(
        "routes",
        f"the trainers' routers would have chosen {percent(agreement.recent())} of the replayed experts from step "
        f"{since} on (at least {percent(AGREEMENT)} expected), "
        f"mean log-prob gap {number(run['logprob_gap/mean'].recent())}",
        since,
        run.last,
        tuple(changes),
        "Equal weights agree on nearly all: the routes belong to other tokens, or the weights differ. Compare the gap "
        "without the replay: if that is smaller, the routes are misplaced.",
        explains=frozenset(("collapse", "flat", "gap", "stale")),
    )


def drafts(run: MetricsHistory) -> RunFinding | None:
    """Drafts of which so few are accepted that sampling is slower with them, by the plan's model of a decode step."""
    if run.config.generator.drafts == "none":
        return None
    from titan_rl.tools.plan.draft_gains import drafted_in, speed_up_on_cpu  # reads facts that other runs do not need

    lines = [line for line in run.lines if is_number(line.get("engine/drafted_tokens"))]
    found, answer = drafted_in(lines[-DRAFTS_STEPS:]), run["completions/mean_length"].recent()
    if len(lines) < DRAFTS_STEPS or found is None or not answer > 0:
        return None
    gain = speed_up_on_cpu(run.config, found, answer)
    if gain is None or gain > LOSES:
        return None
    return RunFinding(
        "drafts",
        f"generator.drafts: {percent(found.accepted / found.tokens)} of the drafted tokens are accepted, "
        f"{number(found.accepted)} of {number(found.tokens)} in a sequence's decode step: by estimate "
        f"sampling takes {1 / gain:.2f} times as long as without drafts",
        lines[-DRAFTS_STEPS]["step"],
        run.last,
        (Change.of(run.config, "generator.drafts", "none"),),
        "Every drafted token costs a product, and only an accepted one saves a step. No token changes without drafts: "
        "compare engine/sampling_seconds of a few steps.",
        problem=False,
    )


def slow(run: MetricsHistory) -> RunFinding | None:
    """Steps that became slower, which part did, and since when."""
    step = run["time/step"]
    if len(step) < EARLY + RECENT:
        return None
    early = median(step.values[1:EARLY])  # the first step warms up
    now = median(step.values[-RECENT:])
    if now < max(SLOWER * early, early + SLOWER_SECONDS):
        return None
    growth = {}
    for key in (*PARTS, *AFTERWARDS):
        part = run[key]
        if len(part) >= EARLY + RECENT or (key in AFTERWARDS and len(part) > 3):
            growth[key] = median(part.values[-RECENT:]) - median(part.values[:EARLY])
    key = max((k for k in growth if k in PARTS), key=growth.__getitem__, default="time/wait")
    name, remedy = PARTS[key]
    since = step.since(lambda value: value > (early + now) / 2)
    part = run[key]
    before, after = median(part.values[1:EARLY]), median(part.values[-RECENT:])
    text = f"a step takes {now:.1f} s since step {since}, {early:.1f} s before: {name} {before:.1f} -> {after:.1f} s"
    lengths = run["completions/mean_length"]
    longer = fmean(lengths.values[-RECENT:]) / fmean(lengths.values[1:EARLY]) if len(lengths) > EARLY else 1.0
    advice = "timeline.json (ui.perfetto.dev) shows what the processes did in these steps; faults.jsonl, lost ranks."
    if longer > 1.5:
        text += f"; {moved('the mean answer', fmean(lengths.values[1:EARLY]), lengths.recent())} tokens"
        return RunFinding(
            "slow",
            text,
            since,
            run.last,
            (Change.of(run.config, "algorithm.overlong_buffer", max(1, run.config.rollout.max_new_tokens // 4)),),
            "Longer answers explain it: no fault, and a soft punishment bounds it.",
        )
    return RunFinding("slow", text, since, run.last, (Change.of(run.config, remedy, _faster(run, remedy)),), advice)


def _faster(run: MetricsHistory, key: str) -> object:
    section, _, name = key.partition(".")
    now = getattr(getattr(run.config, section), name)
    if key == "weight_sync.delta":
        return True
    if key == "reference.mesh":
        return "own"
    return max(2 * now, 1)
