"""Warns of keys that were set and that the run does not read, so that no wish is lost in silence."""

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence

from titan_rl.config.algorithm_sections import TASKS
from titan_rl.config.methods import ADVANTAGES, CLIPS, PAIR_LOSSES, advantage_of
from titan_rl.config.presets import algorithm_of
from titan_rl.config.sections import Config
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
"""Keys of [algorithm] that are not read while another one has certain values: (the other key, its values, the keys)."""
UNCHANGED = Config()
OF_CLIPS = {key for clip in CLIPS.values() for key in clip.reads}
OF_ADVANTAGES = {key for advantage in ADVANTAGES.values() for key in advantage.reads}
OF_PAIRS = {key for keys in PAIR_LOSSES.values() for key in keys}
OF_SAMPLING = ("groups_per_step", "group_size", "max_staleness_steps", "top_p", "top_k", "min_p")
OF_FILES = ("path", "sources", "eval_path", "prompt_key", "answer_key", "demonstration_key", "images_key")
IDLE: tuple[tuple[str, tuple[str, ...], Callable[[Config], bool], str], ...] = (
    ("task", OF_FILES, lambda c: c.task.name in TASKS and c.task.name != "jsonl", "task.name has its own problems"),
    ("lora", ("alpha", "base_dtype"), lambda c: not c.lora.on, "lora.rank is 0"),
    ("rollout", OF_SAMPLING, lambda c: c.algorithm.kind != "rl", "the algorithm samples no answers"),
    ("environment", (), lambda c: not c.rollout_code, "environment.name and task.agent are empty"),
    ("reference", (), lambda c: not c.algorithm.needs_reference, "the algorithm needs no reference"),
    ("critic", (), lambda c: not c.algorithm.needs_critic, "the algorithm needs no critic"),
    ("reward_model", (), lambda c: "reward_model" not in c.roles, 'task.reward is not "model"'),
    ("teacher", (), lambda c: not (c.algorithm.needs_teacher or c.cold_start.teacher_prompts), "there is no teacher"),
    (
        "training",
        ("global_batch_size",),
        lambda c: c.algorithm.kind == "rl",
        "a step has rollout.groups_per_step x group_size samples",
    ),
    ("lr_scheduler", ("decay_type", "min_lr_factor"), lambda c: not c.lr_scheduler.decay_ratio, "decay_ratio is 0"),
    ("placement", ("sleep",), lambda c: c.placement.kind != "colocated", 'placement.kind is not "colocated"'),
)
"""Keys of other sections, the runs that do not read them, and why: (section, its keys or () for all, test of a run,
reason)."""


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


def unread_keys(config: Config, scaled: Sequence[str] = ()) -> Iterator[str]:
    """Yield a warning of the keys without an effect, for each reason. `config`: as read, before "auto" is resolved.
    `scaled`: lines of --scale, whose keys no user has set."""
    a, usual = config.algorithm, algorithm_of({"name": config.algorithm.name}, config)
    settled = {line.partition(":")[0] for line in scaled}
    by_reason, found = defaultdict[str, list[str]](list), unread(config)

    def note(section: str, key: str, value: object, reason: str) -> None:
        if f"{section}.{key}" not in settled:
            by_reason[reason].append(f"{section}.{key} = {as_toml(value)}")

    for key in schema()["algorithm"]:
        if key in found and (value := getattr(a, key)) != getattr(usual, key):
            note("algorithm", key, value, f"algorithm.{found[key]} is {as_toml(getattr(a, found[key]))}")
    for name, keys, idle, reason in IDLE:
        section, default = getattr(config, name), getattr(UNCHANGED, name)
        for key in (keys or schema()[name]) if idle(config) else ():
            if (value := getattr(section, key)) != getattr(default, key):
                note(name, key, value, reason)
    for reason, settings in by_reason.items():
        yield f"{', '.join(settings)}: no effect, because {reason}"
