"""Warns of keys that were set and that the chosen algorithm does not read, so that no wish is lost in silence."""

from collections import defaultdict
from collections.abc import Iterator

from titan_rl.config.methods import ADVANTAGES, CLIPS, PAIR_LOSSES, advantage_of
from titan_rl.config.presets import algorithm_of
from titan_rl.config.sections import Config, RolloutSection
from titan_rl.config.toml import as_toml, schema

UNREAD: tuple[tuple[str, tuple[bool | float | str, ...], tuple[str, ...]], ...] = (
    ("aggregation", ("token_mean", "sequence_mean"), ("length_constant",)),
    ("correction", ("none", "token_tis", "sequence_tis"), ("correction_low",)),
    ("correction", ("none",), ("correction_high",)),
    ("dynamic_sampling", (False,), ("max_refills",)),
    ("entropy_target", (0,), ("entropy_coef_delta", "entropy_coef_min", "entropy_coef_max")),
    ("kl_coef", (0,), ("kl", "kl_in")),
    ("length_reward", ("none",), ("length_weight",)),
    ("pair_loss", ("dpo", "ipo"), ("normalize",)),
    ("rejection", ("none", "second_moment"), ("rejection_low", "rejection_high")),
    ("rejection", ("none", "token", "geometric"), ("rejection_moment",)),
    ("teacher_weights", ("folder", "reference", "policy"), ("teacher_decay",)),
)
"""Keys of [algorithm] that are not read while another key has one of some values: (the other key, its values, they)."""
OF_CLIPS = {key for clip in CLIPS.values() for key in clip.reads}
OF_ADVANTAGES = {key for advantage in ADVANTAGES.values() for key in advantage.reads}
OF_PAIRS = {key for keys in PAIR_LOSSES.values() for key in keys}
OF_SAMPLING = ("groups_per_step", "group_size", "max_staleness_steps", "top_p", "top_k", "min_p")


def unread(config: Config) -> dict[str, str]:
    """Return the keys of [algorithm] that a run does not read, each with the key that decides this. Keys whose other
    values are refused may be missing."""
    a, found = config.algorithm, dict[str, str]()
    if a.kind != "rl":
        read = {"name", "pair_loss", *PAIR_LOSSES.get(a.name, ())}
        return {key: "name" for key in schema()["algorithm"] if key not in read}
    for other, values, keys in UNREAD:
        found |= {key: other for key in keys if getattr(a, other) in values}
    found |= dict.fromkeys(OF_PAIRS.difference(PAIR_LOSSES.get(a.pair_loss, ())), "pair_loss")
    clip, read_by_clip = ("loss", ()) if a.loss else ("clip", CLIPS[a.clip].reads)
    found |= dict.fromkeys(OF_CLIPS.difference(read_by_clip), clip)
    discounts = ("gamma",) if a.credit == "turn" else ()
    found |= dict.fromkeys(OF_ADVANTAGES.difference(advantage_of(a.advantage).reads, discounts), "advantage")
    elsewhere = {
        "max_refills": bool(config.task.filter),
        "length_weight": a.advantage == "per_reward" and a.overlong_buffer > 0,
    }
    return {key: other for key, other in found.items() if not elsewhere.get(key)}


def unread_keys(config: Config) -> Iterator[str]:
    """Yield a warning of the keys without an effect, for each reason."""
    a, usual = config.algorithm, algorithm_of({"name": config.algorithm.name}, config)
    by_reason = defaultdict[str, list[str]](list)
    for key, other in unread(config).items():
        if (value := getattr(a, key)) != getattr(usual, key):
            by_reason[other].append(f"algorithm.{key} = {as_toml(value)}")
    if a.kind != "rl":
        rollout, default = config.rollout, RolloutSection()
        changed = [key for key in OF_SAMPLING if getattr(rollout, key) != getattr(default, key)]
        by_reason["name"] += [f"rollout.{key} = {as_toml(getattr(rollout, key))}" for key in changed]
    for other, keys in by_reason.items():
        if keys:
            yield f"{', '.join(keys)}: no effect, because algorithm.{other} is {as_toml(getattr(a, other))}"
