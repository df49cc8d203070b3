"""Checks within [algorithm], and of [algorithm] against [rollout]."""

from collections.abc import Iterator

from titan_rl.config.presets import algorithm_of
from titan_rl.config.sections import AlgorithmSection, Config
from titan_rl.config.toml import as_toml

CLIPS = ("clip", "clip_low", "clip_high", "dual_clip")


def check_algorithm(config: Config) -> Iterator[str]:
    a, rollout, curriculum = config.algorithm, config.rollout, config.curriculum
    if curriculum.on and a.kind != "rl":
        key = "solved_visits" if curriculum.solved_visits else "hopeless_wait"
        why = f'because algorithm.name = "{a.name}" samples no answers'
        yield f"curriculum.{key}: expected 0, {why}, found {getattr(curriculum, key)}"
    if curriculum.hopeless_rate >= curriculum.solved_rate:
        least = f"a value below curriculum.solved_rate = {curriculum.solved_rate:g}"
        yield f"curriculum.hopeless_rate: expected {least}, found {curriculum.hopeless_rate:g}"
    if a.kind != "rl":
        if a.kind == "reward" and config.cold_start.steps:
            why = "because a reward model generates no answers"
            yield f"cold_start.steps: expected 0, {why}, found {config.cold_start.steps}"
        return
    if a.advantage in ("group", "leave_one_out") and rollout.group_size < 2:
        why = f'because algorithm.advantage = "{a.advantage}" compares the samples of a group'
        yield f"rollout.group_size: expected at least 2, {why}, found {rollout.group_size}"
    if a.normalize == "group" and a.advantage != "group":
        why = f'because algorithm.advantage = "{a.advantage}" is not relative to the group'
        yield f'algorithm.normalize: expected "none" or "batch", {why}, found "group"'
    if a.dynamic_sampling and rollout.group_size < 2:
        why = f"because all rewards of a group are equal with rollout.group_size = {rollout.group_size}"
        yield f"algorithm.dynamic_sampling: expected false, {why}, found true"
    if 0 < a.dual_clip <= 1 + a.clip_high:
        least = f"above 1 + clip_high = {1 + a.clip_high:g}"
        yield f"algorithm.dual_clip: expected a value {least}, or 0 for off, found {a.dual_clip:g}"
    if a.dual_clip and a.clip != "ppo":
        yield f'algorithm.dual_clip: expected 0, because algorithm.clip is "{a.clip}", found {a.dual_clip:g}'
    for key in ("correction", "rejection"):
        low, high = getattr(a, f"{key}_low"), getattr(a, f"{key}_high")
        if low >= high:
            yield f"algorithm.{key}_low: expected a value below algorithm.{key}_high = {high:g}, found {low:g}"
    if a.correction != "none" and a.proximal == "generator":
        why = f'because with algorithm.correction = "{a.correction}" the ratio would correct the same difference twice'
        yield f'algorithm.proximal: expected "trainer", {why}, found "generator"'
    if rollout.groups_per_step % a.minibatches:
        groups = f"rollout.groups_per_step = {rollout.groups_per_step}"
        yield f"algorithm.minibatches: expected a divisor of {groups}, found {a.minibatches}"
    if a.advantage == "teacher":
        why = 'because algorithm.advantage = "teacher" uses no rewards'
        if a.credit == "turn":
            yield f'algorithm.credit: expected "outcome", {why}, found "turn"'
        if a.kl_coef and a.kl_in == "reward":
            yield f'algorithm.kl_in: expected "loss", {why}, found "reward"'
        if a.overlong_buffer and a.overlong_penalty:
            yield f"algorithm.overlong_buffer: expected 0, {why}, found {a.overlong_buffer}"
    if a.overlong_buffer > rollout.max_new_tokens:
        most = f"rollout.max_new_tokens = {rollout.max_new_tokens}"
        yield f"algorithm.overlong_buffer: expected at most {most}, found {a.overlong_buffer}"


def clip_warning(config: Config) -> Iterator[str]:
    """Yield that no clip can act, if the file sets one, or changes the ratio of a preset that has one."""
    a = config.algorithm
    if a.kind != "rl" or a.proximal != "trainer" or a.updates > 1 or a.clip == "none":
        return
    preset = algorithm_of({"name": a.name}, config)
    usual = preset if preset.proximal == "trainer" else AlgorithmSection()
    keys = [key for key in CLIPS if getattr(a, key) != getattr(usual, key)]
    if keys:
        found = ", ".join(f"algorithm.{key} = {as_toml(getattr(a, key))}" for key in keys)
        remedy = "algorithm.minibatches or algorithm.epochs above 1"
        if config.rollout.lag:
            remedy = f'algorithm.proximal = "generator" with algorithm.correction = "none", or {remedy}'
        yield (
            f'{found}: no clip can act, because with algorithm.proximal = "trainer" and one update per step the ratio '
            f"is 1 on every token; set {remedy}"
        )
