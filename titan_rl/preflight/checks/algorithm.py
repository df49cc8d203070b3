"""Checks of training: [algorithm], [curriculum], [cold_start], [rollout] and [training] against each other."""

import math
from collections.abc import Iterator
from functools import partial
from importlib.util import find_spec

from titan_rl.config.methods import advantage_of, rules_of
from titan_rl.config.presets import algorithm_of
from titan_rl.config.sections import AlgorithmSection, Config
from titan_rl.config.toml import as_toml
from titan_rl.preflight.checks.model import policy_tokenizer
from titan_rl.preflight.memory import BFLOAT16_BETA
from titan_rl.preflight.probe import probe
from titan_rl.preflight.refusal import problem, written
from titan_rl.wire.model_shape import ModelShape

CLIPS = ("clip", "clip_low", "clip_high", "dual_clip")
MOST_SAMPLES = 2**20
COLDEST, HOTTEST = 0.01, 2.0  # vLLM samples at 0.01 below it, and refuses higher ones
SEEDS = 2**32  # vLLM seeds numpy, which takes 32 bits
UNPAIRED = (  # keys of advantages and of the policy loss, neither of which a loss of pairs has
    *("advantage", "teacher_coef", "credit", "ratio", *CLIPS, "ratio_penalty", "aggregation", "kl_coef"),
    *("entropy_coef", "entropy_target", "top_entropy_share", "proximal", "correction", "rejection"),
)
BATCHED_TOKENS = 2048  # vLLM's default of max_num_batched_tokens, unless a sequence is longer


def check_algorithm(config: Config) -> Iterator[str]:
    wrong, a, rollout, curriculum = partial(problem, config), config.algorithm, config.rollout, config.curriculum
    if curriculum.on and a.kind != "rl":
        key = "solved_visits" if curriculum.solved_visits else "hopeless_wait"
        yield wrong(f"curriculum.{key}", f'0, because algorithm.name = "{a.name}" samples no answers')
    if a.kind == "reward" and config.cold_start.steps:
        yield wrong("cold_start.steps", "0, because a reward model generates no answers")
    if a.name == "kto" and config.training.global_batch_size < 2:
        others = 'because algorithm.name = "kto" measures a KL with answers to other prompts of the step'
        yield wrong("training.global_batch_size", f"at least 2, {others}")
    if a.name == "kto" and not a.desirable_weight + a.undesirable_weight:
        yield wrong("algorithm.desirable_weight", "a value above 0, because algorithm.undesirable_weight is 0 too")
    if a.kind != "rl" and a.pair_loss != "none":
        yield wrong("algorithm.pair_loss", f'"none", because algorithm.name = "{a.name}" samples no answers')
    if a.kind != "rl" and config.task.filter:
        yield wrong("task.filter", f'"", because algorithm.name = "{a.name}" samples no groups')
    if a.kind != "rl":
        return
    yield from _check_pairs(config)
    yield from _check_own(config)
    because = f'because algorithm.advantage = "{a.advantage}"'
    compares = advantage_of(a.advantage).compares
    if compares and rollout.group_size < 2:
        yield wrong("rollout.group_size", f"at least 2, {because} compares the samples of a group")
    yield from _check_rules(config)
    yield from _check_estimators(config)
    if a.dynamic_sampling and rollout.group_size < 2:
        equal = f"all rewards of a group are equal with rollout.group_size = {rollout.group_size}"
        yield wrong("algorithm.dynamic_sampling", f"false, because {equal}")
    elif a.dynamic_sampling and not compares:
        alone = f"{because} does not compare the samples of a group, and equal rewards teach too"
        yield wrong("algorithm.dynamic_sampling", f"false, {alone}")
    if 0 < a.dual_clip <= 1 + a.clip_high:
        yield wrong("algorithm.dual_clip", f"a value above 1 + clip_high = {1 + a.clip_high:g}, or 0 for off")
    yield from check_gates(config)
    for key in ("correction", "rejection"):
        if getattr(a, f"{key}_low") >= (high := getattr(a, f"{key}_high")):
            yield wrong(f"algorithm.{key}_low", f"a value below algorithm.{key}_high = {high:g}")
    if a.correction != "none" and a.proximal == "generator":
        twice = f'with algorithm.correction = "{a.correction}" the ratio would correct the same difference twice'
        yield wrong("algorithm.proximal", f'"trainer", because {twice}')
    if rollout.groups_per_step % a.minibatches:
        yield wrong("algorithm.minibatches", f"a divisor of rollout.groups_per_step = {rollout.groups_per_step}")
    if a.overlong_buffer > rollout.max_new_tokens:
        yield wrong("algorithm.overlong_buffer", f"at most rollout.max_new_tokens = {rollout.max_new_tokens}")


def _check_pairs(config: Config) -> Iterator[str]:
    """Check the keys that a loss of the best and the worst rollout cannot have."""
    a, usual = config.algorithm, AlgorithmSection()
    if not a.online_pairs:
        return
    why = f'because algorithm.pair_loss = "{a.pair_loss}"'
    for key in (key for key in UNPAIRED if getattr(a, key) != getattr(usual, key)):
        expected = f"{as_toml(getattr(usual, key))}, the default, {why} learns from pairs, without advantages or ratios"
        yield problem(config, f"algorithm.{key}", expected)
    if config.rollout_code and config.task.thinking == "template":
        yield problem(config, "task.thinking", f'"keep", {why} needs rollouts of one branch')


def check_gates(config: Config) -> Iterator[str]:
    """Check the bounds of clips and of the entropy's control."""
    wrong, a = partial(problem, config), config.algorithm
    if a.clip == "clip_cov" and a.cov_low >= a.cov_high:
        yield wrong("algorithm.cov_low", f"a value below algorithm.cov_high = {a.cov_high:g}")
    low, high = a.entropy_coef_min, a.entropy_coef_max
    if a.entropy_target and low > high:
        yield wrong("algorithm.entropy_coef_min", f"at most algorithm.entropy_coef_max = {high:g}")
    elif a.entropy_target and not low <= a.entropy_coef <= high:
        yield wrong("algorithm.entropy_coef", f"a value in [{low:g}, {high:g}] with algorithm.entropy_target")


def _check_rules(config: Config) -> Iterator[str]:
    """Check the keys that the chosen methods restrict (config/methods.py)."""
    a = config.algorithm
    for chosen, rule in rules_of(a):
        value = getattr(a, rule.key)
        if not rule.holds(value):
            named = " or ".join(map(written, rule.allowed)) or f"a value below {rule.below:g}"
            because = f'because algorithm.{chosen} = "{getattr(a, chosen)}" {rule.reason}'
            yield problem(config, f"algorithm.{rule.key}", f"{named}, {because}")


def _check_estimators(config: Config) -> Iterator[str]:
    """Check what advantages and length rewards need of numbers and of other sections."""
    a, rollout, size = config.algorithm, config.rollout, config.rollout.group_size
    kimi, target = a.length_reward == "kimi", a.length_reward == "target"
    longest = math.inf if config.rollout_code else rollout.max_new_tokens
    because = f'because algorithm.advantage = "{a.advantage}"'
    whole = "because algorithm.distill_top_k trains on a divergence over the whole vocabulary"
    length = f'because algorithm.length_reward = "{a.length_reward}"'
    best = a.advantage == "pass_at_k"
    refused = [
        (best and (a.pass_k == 1 or a.pass_k > size), "pass_k", f"0, or 2 to rollout.group_size = {size}"),
        (target and not a.length_target, "length_target", f"at least 1, {length}"),
        (a.distill_top_k and a.advantage != "teacher", "distill_top_k", '0 unless algorithm.advantage = "teacher"'),
        (a.distill_top_k and a.normalize != "none", "normalize", f'"none", {whole}'),
        (a.distill_top_k and a.clip not in ("none", "cispo"), "clip", f'"none" or "cispo", {whole}'),
        (a.distill_top_k and rollout.truncates, "distill_top_k", f"0 with rollout.top_p, top_k or min_p, {whole}"),
        (not a.distill_top_k and a.distill_beta != 0.5, "distill_beta", "0.5, because algorithm.distill_top_k is 0"),
        (target and a.length_target > longest, "length_target", f"at most rollout.max_new_tokens = {longest}"),
    ]
    yield from (problem(config, f"algorithm.{key}", expected) for holds, key, expected in refused if holds)
    if a.advantage == "per_reward" and len(config.task.rewards) < 2:
        yield problem(config, "task.rewards", f"at least two rewards, {because} normalizes each by itself")
    if kimi and size < 2:
        yield problem(config, "rollout.group_size", f"at least 2, {length} compares the lengths of a group")


def _check_own(config: Config) -> Iterator[str]:
    """Check the user's parts of the algorithm, and the filter of its groups."""
    a, shown = config.algorithm, partial(problem, config)
    if a.own_advantage:
        because = "because algorithm.advantage is your own function"
        if a.credit == "turn":
            yield shown("algorithm.credit", f'"outcome", {because}, which may return an advantage for each token')
        yield from probe(a.advantage, None, "algorithm.advantage")
    if a.loss and (a.online_pairs or a.distill_top_k):
        key, off = ("pair_loss", '"none"') if a.online_pairs else ("distill_top_k", "0")
        yield shown(f"algorithm.{key}", f"{off}, because algorithm.loss takes its place")
    elif a.loss:
        yield from probe(a.loss, None, "algorithm.loss")
    if own := config.task.filter:
        yield from probe(own, None, "task.filter")


def check_steps(config: Config) -> Iterator[str]:
    """Check what concerns the run as a whole: steps, overlap of sampling and training, checkpoints."""
    wrong, rollout, a = partial(problem, config), config.rollout, config.algorithm
    if config.cold_start.stop_at and config.eval.size == 0:
        yield wrong("cold_start.stop_at", "0, because eval.size = 0 leaves no problems to measure it on")
    if config.training.steps == config.cold_start.steps == 0:
        yield wrong("training.steps", "at least 1, because cold_start.steps is 0 too")
    if (samples := rollout.groups_per_step * rollout.group_size) > MOST_SAMPLES:
        most = f"at most {MOST_SAMPLES} samples per step (rollout.groups_per_step x rollout.group_size)"
        yield f"rollout.group_size: expected {most}, found {samples}"
    if rollout.overtake_steps and rollout.steps_ahead <= 0:
        most = f"less than rollout.max_staleness_steps = {rollout.max_staleness_steps}"
        yield wrong("rollout.overtake_steps", f"0, or {most}")
    if rollout.overtake_steps and (a.dynamic_sampling or config.task.filter):
        key = "algorithm.dynamic_sampling" if a.dynamic_sampling else "task.filter"
        yield wrong("rollout.overtake_steps", f"0 with {key}, because replaced groups would exceed it")
    how, colocated = config.weight_sync.in_flight, config.placement.kind == "colocated"
    if rollout.steps_ahead and how != "swap":  # without a lag no request is unfinished at a weight update
        if colocated:
            sleep = {"drain": "before their requests finish", "keep": "and free their keys and values"}[how]
            why = f'because engines sleep {sleep} if placement.kind is "colocated" and rollout.max_staleness_steps > 0'
            yield wrong("weight_sync.in_flight", f'"swap", {why}')
        if how == "keep" and a.kind == "rl" and (a.proximal, a.correction) == ("trainer", "none"):
            why = 'because weight_sync.in_flight = "keep" samples from a policy that no version of the weights has'
            yield wrong("algorithm.correction", f'"token_tis" or another correction, {why}')
    needs_whole_steps = {
        'algorithm.normalize is "batch"': a.normalize == "batch",
        "a step has several updates": a.updates > 1,
        "algorithm.dynamic_sampling replaces groups": a.dynamic_sampling,
        "task.filter replaces groups": bool(config.task.filter),
        "a critic is trained": a.needs_critic,
        "algorithm.pair_loss divides by all pairs of a step": a.online_pairs,
        "rollout.overtake_steps lets groups overtake each other": rollout.overtake_steps > 0,
        'placement.kind is "colocated"': colocated,
    }
    if config.training.stream_groups and a.kind == "rl" and any(needs_whole_steps.values()):
        why = " and ".join(reason for reason, holds in needs_whole_steps.items() if holds)
        yield wrong("training.stream_groups", f"0, because {why}")
    if config.checkpoint.keep_latest_k == 1:
        yield wrong("checkpoint.keep_latest_k", "0 (all) or at least 2, as the newest may be half-written")


def check_sampling(config: Config, shape: ModelShape) -> Iterator[str]:
    """Check what the engines would refuse: when they are built, or request by request."""
    if not config.samples_rollouts:
        return
    wrong, rollout, g = partial(problem, config), config.rollout, config.generator
    if config.algorithm.kind == "rl" and not COLDEST <= rollout.temperature <= HOTTEST:
        yield wrong("rollout.temperature", f"a value in [{COLDEST:g}, {HOTTEST:g}]")
    if config.algorithm.kind == "rl" and rollout.top_k == 1:
        why = "because a token without an alternative teaches nothing"
        yield wrong("rollout.top_k", f"0 or at least 2, {why}")
    tokenizer, vocabulary = policy_tokenizer(config), f"the model's vocabulary, 0 to {shape.vocab_size - 1}"
    if outside := [str(token) for token in rollout.stop_token_ids if not 0 <= token < shape.vocab_size]:
        yield f"rollout.stop_token_ids: expected tokens of {vocabulary}, found {', '.join(outside)}"
    eos_ids = tokenizer.eos_ids if tokenizer else ()
    if outside := [str(token) for token in eos_ids if not 0 <= token < shape.vocab_size]:
        found = f"found {', '.join(outside)} in {config.model.hf_assets_path}"
        yield f"model.hf_assets_path: expected an eos_token_id of {vocabulary}, {found}"
    if config.debug.seed >= SEEDS:
        yield wrong("debug.seed", f"a value below 2^32 = {SEEDS}, because vLLM takes no other")
    if config.algorithm.distill_top_k > shape.vocab_size:
        yield wrong("algorithm.distill_top_k", f"at most the vocabulary, {shape.vocab_size}")
    most = math.log(shape.vocab_size)
    if config.algorithm.kind == "rl" and config.algorithm.entropy_target >= most:
        yield wrong("algorithm.entropy_target", f"a value below {most:.2f} = ln {shape.vocab_size}, the vocabulary")
    if g.async_scheduling is True and config.recorded_columns:
        keys = {"kept": "rollout.top_p, top_k or min_p", "routes": "algorithm.routing_replay"}
        recorded = " and ".join(keys[name] for name in config.recorded_columns)
        yield wrong("generator.async_scheduling", f"false with {recorded}, because steps launched ahead mix up records")
    batch = g.max_num_batched_tokens or max(BATCHED_TOKENS, g.max_model_len or config.training.seq_len)
    if g.max_num_seqs > batch:
        yield wrong("generator.max_num_seqs", f"at most {batch}, vLLM's limit on the tokens of a step")


def check_routing_replay(config: Config, shape: ModelShape) -> Iterator[str]:
    wrong, a = partial(problem, config), config.algorithm
    if not a.routing_replay:
        return
    if a.kind != "rl":
        yield wrong("algorithm.routing_replay", f'false, because algorithm.name = "{a.name}" samples no answers')
    if not shape.experts:
        yield wrong("algorithm.routing_replay", f"false, because {shape.family} has no experts")


def check_titan_keys(config: Config) -> Iterator[str]:
    """Check the keys that are handed to TorchTitan, which would refuse them only on the ranks."""
    for number, target in enumerate(config.override.imports):
        module = target.rpartition(".")[0]
        try:
            found = bool(module) and find_spec(module.partition(".")[0]) is not None
        except (ImportError, ValueError):  # a relative name
            found = False
        if not found:
            yield f'override.imports: expected "module.function" of a module that can be imported, found "{target}"'
        elif target in config.override.imports[:number]:
            yield f'override.imports: expected each override once, found "{target}" twice'
        else:
            yield from probe(target, None, "override.imports")


def check_moments(config: Config) -> Iterator[str]:
    """Check that rounded moments decay."""
    if config.optimizer.moments != "bfloat16":
        return
    for key in ("beta1", "beta2"):
        beta = getattr(config.optimizer, key)
        if beta > BFLOAT16_BETA:
            expected = f'at most {BFLOAT16_BETA:.6g} with optimizer.moments = "bfloat16", where others never decay'
            yield f"optimizer.{key}: expected {expected}, found {beta}"


def algorithm_warnings(config: Config) -> Iterator[str]:
    """Yield settings of training that run, but are probably not intended."""
    a, trainer, generator = config.algorithm, config.training.mixed_precision_param, config.generator.dtype
    if trainer != generator:
        yield (
            f"generator.dtype is {generator}, training.mixed_precision_param is {trainer}: expect the log-probs of "
            "trainer and generator to differ by about 4e-3 on average, compared with 3e-7 if both are float32"
        )
    if config.debug.deterministic and config.model.head_dtype == "float32" and generator == "bfloat16":
        yield (
            'model.head_dtype is "float32" with debug.deterministic: on a GPU vLLM\'s batch-invariant kernels do not '
            'cover a float32 head, so the log-probs of a sample depend on its batch; "model" is covered'
        )
    ratios = a.kind == "rl" and not a.online_pairs
    if ratios and a.correction == "none" and (quantization := config.generator.quantization) != "none":
        where = "nothing corrects for" if a.proximal == "trainer" else "the clip also acts on"
        yield (
            f'algorithm.correction is "none" with generator.quantization = "{quantization}": {where} the rounding of '
            'the weights; the default is algorithm.proximal = "trainer" with algorithm.correction = "token_tis"'
        )
    if a.kl_coef and a.kl == "k1" and a.kl_in == "loss":
        yield (
            'algorithm.kl is "k1" in the loss: its gradient is zero on average and does not hold the policy near the '
            'reference; use "k2" or "k3", or algorithm.kl_in = "reward"'
        )
    if a.kind != "rl" or a.proximal != "trainer" or a.updates > 1 or a.clip in ("clip_cov", "none"):
        return
    preset = algorithm_of({"name": a.name}, config)
    usual = preset if preset.proximal == "trainer" else AlgorithmSection()
    keys = [key for key in CLIPS if getattr(a, key) != getattr(usual, key)]
    if keys:  # the file sets a clip, or changes the ratio of a preset that has one
        found = ", ".join(f"algorithm.{key} = {as_toml(getattr(a, key))}" for key in keys)
        remedy = "algorithm.minibatches or algorithm.epochs above 1"
        if config.rollout.steps_ahead:
            remedy = f'algorithm.proximal = "generator" with algorithm.correction = "none", or {remedy}'
        yield (
            f'{found}: no clip can act, because with algorithm.proximal = "trainer" and one update per step the ratio '
            f"is 1 on every token; set {remedy}"
        )
