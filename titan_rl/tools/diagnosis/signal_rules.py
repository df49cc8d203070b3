"""Rules about the rewards and the answers: is there anything to learn from?"""

import json
import math
from contextlib import suppress
from pathlib import Path

from titan_rl.config.sections import Config
from titan_rl.tools.diagnosis.findings import Change, RunFinding, number, percent
from titan_rl.tools.diagnosis.history import GAIN_SIGMAS, RECENT, SIGMAS, SOLVED, MetricsHistory
from titan_rl.wire.program import command_of

CUT = 0.3
"""Share of answers cut off from which it matters: healthy runs have a few percent, and a third of the answers judged
before they end teaches to be short rather than right."""
CUT_STEPS = 10  # a run with signal may be cut off for this long: pretrained models get brief
BRIEFER = 0.1  # fall of that share, as a share of the first, of a policy that learns to end in time
ALL_CUT = 0.85  # hardly an answer ends
NOISE_ENTROPY = 0.5  # times ln(vocabulary): a language model that follows its prompt stays far below
NOISE_NATS = 3.0  # the same where the config does not know the vocabulary
HOT = 1.2  # temperature above which it is a suspect: common recipes use 0.6 to 1.2
GREEDY_GAP = 0.2
"""Lead of the greedy score over the sampled reward: temperature 1 costs less in a policy that can be trained."""
SAME = 1e-9  # difference of rewards that are the same
DEAD = 0.95  # share of groups without signal: less than one group in twenty teaches
SPARSE = 0.8  # the same, above which most of the sampling is wasted: half is usual
DEAD_STEPS = 2  # steps in a row after which a rule speaks
HOPELESS = 0.02  # level of the mean reward, from 0, the worst, to 1, below which a task counts as too hard
ALWAYS = 3  # visits of a prompt after which "never" and "always" mean something
FEWEST = 64  # answers after which a component that was always 0 is named
MISSED = 0.05  # share of answers that hold the reference and earn nothing
LOST, BROKEN = 0.05, 0.2
"""Shares of rollouts: lost ones are missing from the training data, and which ones is no accident; broken calls are
part of learning until they are a fifth."""


def noise_sampling(run: MetricsHistory) -> RunFinding | None:
    """Answers that are noise: a temperature that is too high, or weights that were never trained."""
    if not len(run["entropy"]):
        return None
    r, m, entropy = run.config.rollout, run.config.model, min(run["entropy"].values[:2])
    limit = NOISE_NATS if m.hf_assets_path else NOISE_ENTROPY * math.log(m.vocab_size)
    first, reward = run["entropy"].steps[0], run.reward.recent()
    greedy = run.scores[-1].value if run.same_reward_held_out and run.scores else math.nan
    low, high = run.reward_range
    worse = greedy - reward > max(GREEDY_GAP * (high - low), SIGMAS * run.reward_noise / math.sqrt(RECENT))
    if r.temperature > HOT and (worse or (entropy > limit and not run.rises)):
        scores = f", where greedy answers to held-out problems earn {number(greedy)}" if worse else ""
        return RunFinding(
            "noise_sampling",
            f"rollout.temperature = {r.temperature:g}: sampled answers earn {number(reward)}{scores}; the entropy "
            f"began at {number(entropy)} nats",
            first,
            run.last,
            (Change.of(run.config, "rollout.temperature", 1.0),),
            "The temperature drowns what the policy knows: it learns to be surer instead of righter. Trainers use it "
            "too, so no other key changes.",
            explains=_FOLLOW_NOISE,
        )
    if first <= 2 and entropy > limit and run.reward_level <= HOPELESS and not run.rises:
        cold = run.config.cold_start.steps
        changes = (Change.of(run.config, "cold_start.steps", max(200, 4 * cold)),)
        most = f" of at most {number(math.log(m.vocab_size))}"
        if m.hf_assets_path:
            changes = _pretrained_changes(run.config)
            most = ""  # a folder's vocabulary is not in the config
        cut = run["completions/clipped_ratio"].recent()
        return RunFinding(
            "noise_sampling",
            f"the answers are noise: entropy {number(entropy)} nats{most}"
            f" at step {first}, reward {number(reward)}, {percent(cut)} cut off",
            first,
            run.last,
            changes,
            "RL strengthens right answers that it samples; this policy samples none. Supervised steps come first.",
            explains=_FOLLOW_NOISE,
        )
    return None


def _pretrained_changes(config: Config) -> tuple[Change, ...]:
    """Return the suspects of a pretrained model whose answers are noise."""
    folder = config.model.hf_assets_path
    if not _knows_chat(folder):
        return (Change("model.hf_assets_path", "another checkpoint, one that follows instructions", folder),)
    stronger = Change("model.hf_assets_path", "another checkpoint, one that solves some of these problems", folder)
    if config.task.template == "chat":
        return (stronger,)
    return Change.of(config, "task.template", "chat"), stronger


def _knows_chat(folder: str) -> bool:
    """Return True if a model's name or its folder shows that it was trained on conversations."""
    path = Path(folder)
    if "instruct" in path.name.lower():
        return True
    with suppress(OSError, ValueError):
        if (path / "chat_template.jinja").is_file():
            return True
        settings = json.loads((path / "tokenizer_config.json").read_text())
        return isinstance(settings, dict) and bool(settings.get("chat_template"))
    return False


_FOLLOW_NOISE = frozenset(
    (
        "truncation",
        "no_signal",
        "too_hard",
        "format",
        "flat",
        "collapse",
        "rate_too_small",
        "prompts",
        "gap",
        "failures",
    )
)


def truncation(run: MetricsHistory) -> RunFinding | None:
    """Answers that a limit of tokens cuts off."""
    cut = run["completions/clipped_ratio"]
    share = cut.recent()
    if not len(cut) or share < CUT:
        return None
    since = cut.since(lambda value: value >= CUT / 2)
    change, limit = _limit(run)
    longest = run["completions/max_length"].recent(1)
    facts, bad = run.answers, ""
    if facts and facts.whole.rewarded and facts.cut.rewarded:
        bad = f"; cut answers earn {number(facts.cut.mean)}, whole ones {number(facts.whole.mean)}"
    dead = run["frac_reward_zero_std"].recent() >= DEAD and not run.teacher_only
    early = len(cut) < CUT_STEPS and not dead  # a pretrained model often learns to be brief in its first steps
    briefer = cut.gain < -max(GAIN_SIGMAS * cut.gain_noise, BRIEFER * cut.values[0])
    harmless = (
        run.rises
        or early
        or briefer
        or run.teacher_only
        or (bool(bad) and facts is not None and facts.cut.mean >= facts.whole.mean > 0)
    )
    return RunFinding(
        "truncation",
        f"{percent(share)} of the answers are cut off {limit}, from step {since} on{bad}",
        since,
        run.last,
        (change,),
        f"An answer that does not end is judged as it stands; the longest has {longest:.0f} tokens. "
        "algorithm.overlong_filter leaves such answers out, and training.seq_len must hold prompt and answer.",
        facts.cut.examples if facts else (),
        problem=not harmless,
        level=1 if share >= ALL_CUT else 0,
        explains=frozenset(
            ("no_signal", "too_hard", "format", "flat", "rate_too_small", "prompts", "overfit", "constant_reward")
            + (("collapse",) if share >= ALL_CUT else ())
        ),
    )


def _limit(run: MetricsHistory) -> tuple[Change, str]:
    """Return the key to change, and the limit that cuts answers off."""
    config = run.config
    by = {name: run[f"stop/{name}"].recent() for name in ("max_tokens", "context_overflow")}
    if by["context_overflow"] > CUT / 2:
        return Change.of(config, "training.seq_len", 2 * config.training.seq_len), "because their context is full"
    if by["max_tokens"] > CUT / 2 and config.environment.max_tokens:
        limit = config.environment.max_tokens
        return Change.of(config, "environment.max_tokens", 4 * limit), f"at environment.max_tokens = {limit}"
    limit = config.rollout.max_new_tokens
    return Change.of(config, "rollout.max_new_tokens", 4 * limit), f"at rollout.max_new_tokens = {limit}"


def constant_reward(run: MetricsHistory) -> RunFinding | None:
    """A reward that gives every answer the same value."""
    value = _constant(run)
    if value is None or (value <= 0 and not _held_out_differs(run)):
        return None  # always 0 or -1: too hard, or the reward; too_hard tells which as far as files show it
    if SOLVED <= value <= 1 and not _held_out_differs(run):
        return None  # solved
    return _reward_finding(run, value)


def _constant(run: MetricsHistory) -> float | None:
    """Return the reward of all answers of all steps, if it is one value."""
    values = run.reward.values
    if len(values) < DEAD_STEPS or max(run["reward/std"].values, default=1.0) > SAME:
        return None
    return values[-1] if max(values) - min(values) <= SAME else None


def _held_out_differs(run: MetricsHistory) -> bool:
    """Return True if the held-out problems, judged by the same or another reward, tell answers apart."""
    low, high = run.score_range
    return any(HOPELESS < (score.value - low) / (high - low) < SOLVED for score in run.scores)


def _reward_finding(run: MetricsHistory, value: float) -> RunFinding:
    facts, task = run.answers, run.config.task
    count = (
        facts.count if facts else run.config.rollout.groups_per_step * run.config.rollout.group_size * len(run.lines)
    )
    texts = f" with {len(facts.texts)} different texts" if facts and len(facts.texts) > 1 else ""
    scores = f", and the held-out score is {number(run.scores[-1].value)}" if _held_out_differs(run) else ""
    key = "task.rewards" if task.rewards else "task.reward"
    missed, bucket = "", facts and facts.whole
    if facts and facts.missed.count > MISSED * facts.count:
        missed = f"; {facts.missed.count} of them contain the reference"
        bucket = facts.missed
    return RunFinding(
        "constant_reward",
        f"the reward is {number(value)} for all of {count} answers{texts}{missed}{scores}",
        run.reward.steps[0],
        run.last,
        (Change(key, "a reward that tells these answers apart", _reward_name(run)),),
        "`titan_rl.run --dry-run` calls a reward once, and cannot see that it never changes: call it on the answers "
        "that are named here.",
        bucket.examples if bucket else (),
        explains=frozenset(
            ("no_signal", "too_hard", "flat", "prompts", "rate_too_small", "solved", "format", "collapse")
        ),
    )


def _reward_name(run: MetricsHistory) -> str:
    task = run.config.task
    return ", ".join(task.rewards) if task.rewards else task.reward


def format_part(run: MetricsHistory) -> RunFinding | None:
    """A component of the reward that no answer ever earned: a format or pattern that is never found."""
    dead = []
    per_step = run.config.rollout.groups_per_step * run.config.rollout.group_size
    for key in run.keys("reward_part/"):
        part = run[key]
        name = key.partition("/")[2]
        if (
            len(part) >= DEAD_STEPS
            and len(part) * per_step >= FEWEST
            and max(part.values) <= SAME <= 1 > min(part.values)
        ):
            dead.append(name)
    if not dead:
        return None
    name, others = dead[0], [key.partition("/")[2] for key in run.keys("reward_part/")]
    if len(dead) == len(others) and len(others) > 1:
        return None  # none is earned: the task is too hard
    facts = run.answers
    bucket = facts.parts.get(name) if facts else None
    grader = name == "grader"
    what = "the grader" if grader else f"the component {' and '.join(map(repr, dead))} of the reward"
    key = "task.grader" if grader else "task.rewards" if run.config.task.rewards else "task.reward"
    return RunFinding(
        "format",
        f"{what} was 0 for every answer of {len(run[f'reward_part/{name}'])} steps",
        run[f"reward_part/{name}"].steps[0],
        run.last,
        (Change(key, "check what this component looks for, and ask for it in the prompt", _reward_name(run)),),
        "A component that is never earned teaches nothing: no answer is ahead of its siblings by it. Name the format "
        "in task.system_prompt, show it in a cold start (task.demonstration_key), or reward a part of it.",
        bucket.examples if bucket else (),
        explains=frozenset(("flat",)),
    )


def too_hard(run: MetricsHistory) -> RunFinding | None:
    """Groups in which no answer earns anything."""
    dead = run["frac_reward_zero_std"]
    if len(dead) < DEAD_STEPS or dead.recent() < DEAD or not run.reward_level <= HOPELESS:
        return None
    facts, config = run.answers, run.config
    if facts and facts.missed.count > MISSED * facts.count:  # right answers that earn nothing
        return _reward_finding(run, run.reward.recent())
    since = dead.since(lambda value: value >= DEAD)
    own = ":" in _reward_name(run)
    custom = f", or the reward is always {run.reward_range[0]:g}" if own else ""
    changes = [Change("task.path", "easier problems, or some that the policy solves at times", config.task.path)]
    loss = run.cold_start_loss
    cold = f"; the cold start ended with loss {number(loss)}" if math.isfinite(loss) else ""
    if config.cold_start.steps or not config.model.hf_assets_path:
        changes.insert(0, Change.of(config, "cold_start.steps", max(200, 2 * config.cold_start.steps)))
    if own:
        changes.append(Change("task.reward", "call it on the answers named here", _reward_name(run)))
    scores = f", held-out score {number(run.scores[-1].value)}" if run.scores else ""
    return RunFinding(
        "too_hard",
        f"no answer is right since step {since} (mean reward {number(run.reward.recent())}{scores}): "
        f"{percent(dead.recent())} of the groups have equal rewards{cold}",
        since,
        run.last,
        tuple(changes),
        f"The task is too hard for this policy{custom}. RL strengthens answers that are right at times: an easier mix, "
        "supervised steps, a partial reward or a larger rollout.group_size makes some answers right.",
        facts.whole.examples if facts else (),
        explains=frozenset(("no_signal", "flat", "prompts", "rate_too_small", "format", "collapse")),
    )  # fmt: skip


def solved(run: MetricsHistory) -> RunFinding | None:
    """Groups in which every answer has the best reward."""
    dead = run["frac_reward_zero_std"]
    if len(dead) < DEAD_STEPS or dead.recent() < DEAD or not run.reward_level >= SOLVED:
        return None
    since = dead.since(lambda value: value >= DEAD)
    scores = f", held-out score {number(run.scores[-1].value)}" if run.scores else ""
    return RunFinding(
        "solved",
        f"the task is solved: {percent(dead.recent())} of the groups are right throughout since step {since}, mean "
        f"reward {number(run.reward.recent())}{scores}",
        since,
        run.last,
        (Change("task.path", "harder problems", run.config.task.path),),
        "curriculum.solved_visits drops prompts that are always solved.",
        problem=False,
        explains=frozenset(("no_signal", "flat", "prompts", "rate_too_small")),
    )


def no_signal(run: MetricsHistory) -> RunFinding | None:
    """Most groups have equal rewards, and the score does not rise."""
    dead = run["frac_reward_zero_std"]
    if len(dead) < DEAD_STEPS or dead.recent() < SPARSE or run.rises or run.reward_level >= SOLVED:
        return None
    since = dead.since(lambda value: value >= SPARSE)
    config, facts = run.config, run.answers
    changes = [Change.of(config, "rollout.group_size", 2 * config.rollout.group_size)]
    if not config.algorithm.dynamic_sampling:
        changes.insert(0, Change.of(config, "algorithm.dynamic_sampling", True))
    return RunFinding(
        "no_signal",
        f"{percent(dead.recent())} of the groups have equal rewards since step {since} (mean reward "
        f"{number(run.reward.recent())}), and teach nothing",
        since,
        run.last,
        tuple(changes),
        "Each prompt is solved always or never: dynamic_sampling replaces such groups, [curriculum] sorts them out, "
        "and larger groups find rare right answers.",
        facts.whole.examples if facts else (),
        explains=frozenset(("flat", "prompts")),
    )


def prompts(run: MetricsHistory) -> RunFinding | None:
    """Prompts that were always or never solved, over all of their visits."""
    facts = run.answers
    if facts is None or run.config.curriculum.on or run.config.algorithm.dynamic_sampling:
        return None
    often = [visits for visits in facts.prompts.values() if visits.count >= ALWAYS]
    if len(often) < 8:  # too few prompts to speak of a share
        return None
    always = sum(visits.solved == visits.count for visits in often)
    never = sum(visits.failed == visits.count for visits in often)
    if (always + never) < SPARSE * len(often):
        return None
    key, value = ("curriculum.solved_visits", 2) if always >= never else ("curriculum.hopeless_wait", 3)
    return RunFinding(
        "prompts",
        f"of {len(often)} prompts with at least {ALWAYS} visits {always} were solved by every answer each time and "
        f"{never} by none ever",
        facts.last,
        facts.last,
        (Change.of(run.config, key, value), Change.of(run.config, "algorithm.dynamic_sampling", True)),
        "Such prompts teach nothing and cost as much as others.",
        problem=not run.rises,
    )


def failures(run: MetricsHistory) -> RunFinding | None:
    """Rollouts that are lost, time out or raise, tool calls that fail, answers that no reward could judge."""
    shares = {name: run[f"stop/{name}"].recent() for name in ("error", "lost", "timeout", "tool_error", "parse_error")}
    shares = {name: share for name, share in shares.items() if math.isfinite(share)}
    bad = {n: s for n, s in shares.items() if s >= (BROKEN if n in ("tool_error", "parse_error") else LOST)}
    facts = run.answers
    per_step = run.config.rollout.groups_per_step * run.config.rollout.group_size
    unjudged = run["rollouts/failed"].recent() / per_step - sum(
        shares.get(n, 0.0) for n in ("error", "lost", "timeout")
    )
    if math.isfinite(unjudged) and unjudged >= LOST:
        bad["reward"] = unjudged
    if not bad:
        return None
    name, share = max(bad.items(), key=lambda item: item[1])
    bucket = facts and (facts.unrewarded if name == "reward" else facts.statuses.get(name))
    error = next((each.error for each in bucket.examples if each.error), "") if bucket else ""
    key = "rollouts/failed" if name == "reward" else f"stop/{name}"
    floor = LOST / 2 * (per_step if name == "reward" else 1)
    since = run[key].since(lambda value: value >= floor)
    what = "had no reward, because their judge failed" if name == "reward" else f"ended as {name!r}"
    others = "".join(f", {percent(s)} as {n!r}" for n, s in bad.items() if n != name)
    return RunFinding(
        "failures",
        f"{percent(share)} of the rollouts {what}{others}, from step {since} on{': ' if error else ''}{error[:160]}",
        since,
        run.last,
        (_remedy(run, name),),
        "Rollouts that ended as error, lost or timeout, or without a reward, are not trained on.",
        bucket.examples if bucket else (),
        level=int(4 * share),
        explains=frozenset(("no_signal", "flat", "too_hard", "slow")) if share >= 0.5 else frozenset(),
    )


def _remedy(run: MetricsHistory, name: str) -> Change:
    config = run.config
    match name:
        case "timeout":
            return Change.of(config, "environment.rollout_seconds", 2 * config.environment.rollout_seconds)
        case "reward":
            return Change("task.reward", "make it answer for these samples", _reward_name(run))
        case "tool_error" | "parse_error":
            return Change("task.system_prompt", "show the format of a call, or demonstrate it in a cold start")
        case _:
            key = "task.agent" if config.task.agent else "environment.name"
            return Change(key, f"fix what raises: {command_of('check_env')}", config.rollout_code)
