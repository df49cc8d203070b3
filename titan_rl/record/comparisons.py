"""Compares what a run's files say about the same steps with its ledger: rollouts.jsonl, metrics.jsonl, config.toml,
summary.json and the checkpoints. Each is written by other code than the ledger's."""

import json
import math
import statistics
import zlib
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from titan_rl.config.sections import Config
from titan_rl.record.checkpoints import Checkpoints
from titan_rl.record.ledger import bounds_of, digest, read_checksum
from titan_rl.record.lines import whole_lines
from titan_rl.record.replay import History, Life

METRICS, ROLLOUTS, SUMMARY = "metrics.jsonl", "rollouts.jsonl", "summary.json"


def rollout_problems(folder: Path, history: History) -> Iterator[str]:
    """Compare every sample that was trained on: whose it is, its tokens, versions and reward."""
    seen: defaultdict[tuple[int, int], list[int]] = defaultdict(list)
    checksums: defaultdict[int, int] = defaultdict(int)
    unknown: set[tuple[int, int]] = set()
    prompts: dict[tuple[int, int], tuple[Any, ...]] = {}  # what the samples of a prompt have in common
    step = 0
    for at, line, found in _objects(folder / ROLLOUTS, ROLLOUT_KEYS):
        if isinstance(found, str):
            yield found
            continue
        key = found["step"], found["prompt_id"]
        checksums[key[0]] = zlib.crc32(line, checksums[key[0]])
        if key[0] < step:
            yield f"{at}: step {key[0]} follows step {step}"
        step = key[0]
        life = history.lives.get(key[1])
        trained = history.steps.get(key[0])
        if life is None or life.trained != key[0] or trained is None:
            if key not in unknown:
                unknown.add(key)
                yield f"{ROLLOUTS} has prompt {key[1]} at step {key[0]}, the ledger does not"
            continue
        sample = found["sample"]
        if sample in seen[key]:
            yield f"{at}: sample {sample} of prompt {key[1]} at step {key[0]} is there twice"
        seen[key].append(sample)
        common = _common(found)
        if common != prompts.setdefault(key, common):
            yield f"{at}: sample {sample} of prompt {key[1]} has another prompt than the samples before it"
        for wrong in _sample_problems(found, life, trained.prompts):
            yield f"{at}: prompt {key[1]}, sample {sample} at step {key[0]}: {wrong}"
    for id, life in history.lives.items():
        if life.trained is None or not _written(history, life.trained):
            continue
        samples = seen.get((life.trained, id), [])
        if not samples:
            yield f"the ledger has prompt {id} at step {life.trained}, {ROLLOUTS} does not"
        elif set(samples) != set(range(len(life.tokens))):
            yield (
                f"{ROLLOUTS}: prompt {id} at step {life.trained} has the samples {sorted(samples)}, "
                f"expected 0 to {len(life.tokens) - 1}"
            )
    yield from _checksum_problems(history, ROLLOUTS, 1, checksums)


def _common(found: Mapping[str, Any]) -> tuple[Any, ...]:
    """Return the prompt of a rollout: the tokens before the first sampled one, and the texts. An environment may let
    each rollout of a prompt begin with other tokens."""
    if "turns" in found:
        return found.get("prompt"), found.get("answer"), found["group"]
    context = found["mask"].index(1) if 1 in found["mask"] else len(found["mask"])
    return found.get("prompt"), found.get("answer"), tuple(found["tokens"][:context]), found["group"]


def _sample_problems(found: Mapping[str, Any], life: Life, prompts: Sequence[int]) -> Iterator[str]:
    tokens, mask, versions, sample = found["tokens"], found["mask"], found["versions"], found["sample"]
    if not len(tokens) == len(mask) == len(found["logprobs"]):
        yield f"{len(tokens)} tokens, {len(mask)} entries in its mask, {len(found['logprobs'])} log-probs"
    own = [token for token, sampled in zip(tokens, mask, strict=False) if sampled]
    if len(versions) != len(own):
        yield f"{len(own)} sampled tokens have {len(versions)} versions"
    if "turns" not in found and versions != sorted(versions):
        yield f"its versions fall: {versions[:8]}"
    if prompts[found["group"] : found["group"] + 1] != [found["prompt_id"]]:
        yield f"it is in group {found['group']}, the step's prompts are {prompts}"
    if sample >= len(life.tokens):
        yield f"the ledger has {len(life.tokens)} samples"
        return
    if len(own) != life.tokens[sample]:
        yield f"{len(own)} sampled tokens, {life.tokens[sample]} in the ledger"
    outside = [
        version for version in versions if not life.versions or not life.versions[0] <= version <= life.versions[-1]
    ]
    if outside:
        yield f"sampled from version {outside[0]}, from {list(life.versions)} in the ledger"
    elif life.digests is not None and digest(own, versions) != life.digests[sample]:
        yield "its tokens or versions are not those that the ledger has the digest of"
    yield from _turn_problems(found, life)
    if life.statuses and found.get("status", "completed") != life.statuses[sample]:
        yield f"it ended as {found.get('status', 'completed')}, as {life.statuses[sample]} in the ledger"
    if sample < len(life.rewards) and found["reward"] != life.rewards[sample]:
        yield f"reward {found['reward']}, {life.rewards[sample]} in the ledger"


def _turn_problems(found: Mapping[str, Any], life: Life) -> Iterator[str]:
    """Compare each turn with the engine's answer in the ledger: the mask has exactly the sampled tokens, what was read
    before them is what the engine read, and no turn is missing or there twice."""
    tokens, mask, versions, recorded = found["tokens"], found["mask"], found["versions"], life.turns_of(found["sample"])
    if not recorded and "turns" not in found:
        return
    one = {
        "turn": min(recorded, default=0),
        "branch": 0,
        "read": mask.index(1) if 1 in mask else 0,
        "sampled": sum(mask),
    }
    turns = found.get("turns", [one])
    if not _are_turns(turns):
        yield f"expected valid turns, found {str(turns)[:80]}"
        return
    if len({turn["turn"] for turn in turns}) < len(turns) or {turn["turn"] for turn in turns} != recorded.keys():
        yield f"it has the turns {sorted(turn['turn'] for turn in turns)}, the ledger {sorted(recorded)}"
        return
    at = own = begin = 0
    for before, turn in zip([None, *turns], turns, strict=False):
        if before is None or turn["branch"] != before["branch"]:
            begin = at
        answered, middle, end = recorded[turn["turn"]], at + turn["read"], at + turn["read"] + turn["sampled"]
        what = f"turn {turn['turn']}"
        if any(mask[at:middle]) or not all(mask[middle:end]):
            yield f"the mask of {what} is not on exactly the sampled tokens"
        if [middle - begin, read_checksum(tokens[begin:middle])] != list(answered.read):
            yield f"what was read before {what} is not what the engine read"
        sampled, of = tokens[middle:end], versions[own : own + turn["sampled"]]
        if (turn["sampled"], digest(sampled, of)) != (answered.tokens, answered.digest):
            yield f"the tokens or versions of {what} are not those that the engine sampled"
        if of != sorted(of):
            yield f"the versions of {what} fall: {of[:8]}"
        at, own = end, own + turn["sampled"]
    if at != len(tokens):
        yield f"its turns have {at} of {len(tokens)} tokens"


def metric_problems(folder: Path, history: History) -> Iterator[str]:
    """Compare every step's line with what the ledger says about its prompts."""
    step, checksums = 0, dict[int, int]()
    for at, line, found in _objects(folder / METRICS, METRIC_KEYS):
        if isinstance(found, str):
            yield found
        elif found["kind"] == "rl":
            if found["step"] != step + 1:
                yield f"{at}: step {found['step']} follows step {step}"
            step = found["step"]
            checksums[step] = zlib.crc32(line)
            if step not in history.steps:
                yield f"{at}: step {step}, which the ledger has not trained"
            else:
                for key, expected in _expected_metrics(history, step).items():
                    value = found.get(key, expected)
                    if type(value) not in (int, float) or not math.isclose(value, expected, rel_tol=1e-6, abs_tol=1e-9):
                        yield f"{at}: {key} of step {step} is {value}, {expected:g} by the ledger"
    for step in history.steps:
        if step not in checksums and _written(history, step):
            yield f"{METRICS}: step {step} is missing, which the ledger has"
    yield from _checksum_problems(history, METRICS, 0, checksums)


def _expected_metrics(history: History, step: int) -> dict[str, float]:
    trained = history.steps[step]
    lives = [history.lives[id] for id in trained.prompts if id in history.lives]
    dropped = [history.lives[id] for id in trained.dropped]
    rewards = [reward for life in lives for reward in life.rewards if reward is not None]
    tokens = [count for life in lives for count in life.tokens]
    failed = sum(life.dropped.startswith("failed") for life in dropped)
    wasted = sum(sum(life.tokens) for life in dropped)
    expected: dict[str, float] = {
        "dropped/groups": len(dropped) - failed,
        "dropped/failed": failed,
        "dropped/tokens": wasted,
        "tokens/sampled": sum(tokens) + wasted,
    }
    if any(life.statuses for life in lives):
        turns = [len(life.turns_of(sample)) for life in lives for sample in range(len(life.tokens))]
        statuses = [status for life in lives for status in life.statuses]
        expected |= {f"stop/{status}": statuses.count(status) / len(statuses) for status in statuses}
        expected |= {"turns/mean": statistics.fmean(turns), "turns/max": max(turns)}
    if None in (given := [reward for life in lives for reward in life.rewards]) or any(life.statuses for life in lives):
        expected["rollouts/failed"] = given.count(None)
    if rewards and tokens:
        expected |= {
            "reward/mean": statistics.fmean(rewards),
            "reward/std": statistics.pstdev(rewards),
            "completions/mean_length": statistics.fmean(tokens),
            "completions/max_length": max(tokens),
            "policy_age/max": max([step - 1 - life.versions[0] for life in lives if life.versions], default=0),
        }
    return expected


def unbegun_step(folder: Path, history: History) -> float:
    """Return where a process resumed that has written config.toml and cut the logs there, but is not in the ledger: it
    is starting, or it was killed then. Infinity if there is none."""
    started = [
        found
        for _, _, found in _objects(folder / METRICS, METRIC_KEYS)
        if isinstance(found, dict) and found["kind"] == "startup"
    ]
    time = started[-1].get("time") if started else None
    return started[-1]["step"] if isinstance(time, float) and time > history.start.time else math.inf


def config_problems(folder: Path, history: History, config: Config) -> Iterator[str]:
    """Compare config.toml with what the ledger says is in force."""
    start = history.start
    if start.bounds is None or history.cut < math.inf:
        return
    for key, value in bounds_of(config).items():
        if value != start.bounds[key]:
            yield f"config.toml: {key} is {value}, {start.bounds[key]} was in force by the ledger"
    if start.config is not None and zlib.crc32((folder / "config.toml").read_bytes()) != start.config:
        yield "config.toml: it is not the file that the run wrote: its checksum differs"


def disk_problems(folder: Path, history: History, config: Config) -> Iterator[str]:
    """Compare the checkpoints and summary.json with the steps that the ledger has. Old checkpoints may be gone."""
    for step in Checkpoints.of(folder, config).whole_steps():
        if step not in history.saved:
            yield f"{config.checkpoint.folder}/step-{step} is whole, but the ledger never saved step {step}"
    for step, trained in history.steps.items():
        due = trained.start.bounds or (bounds_of(config) if trained.start is history.start else None)
        interval = due["checkpoint.interval"] if due else 0
        if interval and step % interval == 0 and step < history.last and not trained.saved:
            yield f"step {step} was due to be saved, with checkpoint.interval {interval}, and the ledger has no save"
    if not (folder / SUMMARY).exists():
        return
    try:
        steps = json.loads((folder / SUMMARY).read_bytes())["steps"]
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        yield f"{SUMMARY}: {type(error).__name__}: {error}"
    else:
        if type(steps) is not int or steps > history.reached:
            yield f"{SUMMARY}: {steps} steps, the ledger has {history.reached}"


def _written(history: History, step: int) -> bool:
    """Return True if the ledger proves that the other files have the step: a process can end between the two."""
    trained = history.steps.get(step)
    if trained is None or step > history.cut:
        return False
    return step < history.last or trained.saved or trained.logged is not None


def _checksum_problems(history: History, name: str, which: int, checksums: Mapping[int, int]) -> Iterator[str]:
    for step, trained in history.steps.items():
        if trained.logged is None:
            if trained.start.bounds is not None and _written(history, step) and which == 0:
                yield f"the ledger has no checksums of the lines of step {step}"
        elif step in checksums and checksums[step] != trained.logged[which]:
            yield f"{name}: the lines of step {step} are not those that the run wrote: their checksum differs"


def _objects(
    path: Path, keys: Mapping[str, Callable[[Any], bool]]
) -> Iterator[tuple[str, bytes, dict[str, Any] | str]]:
    """Yield each whole line's place, its bytes, and its object, or what is wrong with it."""
    for number, line in enumerate(whole_lines(path), 1):
        at = f"{path.name}, line {number}"
        try:
            found = json.loads(line)
        except (ValueError, RecursionError):
            found = None
        if not isinstance(found, dict):
            yield at, line, f"{at}: expected a JSON object, found {line[:80].rstrip()!r}"
        elif wrong := [key for key, valid in keys.items() if not valid(found.get(key, ...))]:
            yield at, line, f"{at}: expected a valid {wrong[0]}, found {str(found.get(wrong[0], 'none'))[:80]}"
        else:
            yield at, line, found


def _counts(value: Any) -> bool:
    return type(value) is int and 0 <= value < 1 << 63


def _list_of_ints(value: Any) -> bool:
    return isinstance(value, list) and all(type(item) is int and abs(item) < 1 << 63 for item in value)


def _are_turns(value: Any) -> bool:
    keys = ("turn", "branch", "read", "sampled")
    return isinstance(value, list) and all(
        isinstance(turn, dict) and all(_counts(turn.get(key)) for key in keys) for turn in value
    )


METRIC_KEYS: dict[str, Callable[[Any], bool]] = {"kind": lambda value: isinstance(value, str), "step": _counts}
ROLLOUT_KEYS: dict[str, Callable[[Any], bool]] = {
    "kind": lambda value: value == "rl",
    "step": _counts,
    "prompt_id": _counts,
    "group": _counts,
    "sample": _counts,
    "reward": lambda value: value is None or type(value) in (int, float),
    "tokens": _list_of_ints,
    "mask": _list_of_ints,
    "logprobs": lambda value: isinstance(value, list),
    "versions": _list_of_ints,
}
