"""The rules that a run's folder is audited by. Each is a function: its docstring is the claim, and it yields what
contradicts that in the history (run_history.py).

Other code than the ledger's writes rollouts.jsonl, metrics.jsonl and the checkpoints. The result is a list of findings,
also of malformed files.
"""

import json
import os
import zlib
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import pairwise
from math import fsum
from pathlib import Path
from typing import Any

from titan_rl.batch.seats import tokens_digest
from titan_rl.record.checkpoints import Checkpoints
from titan_rl.record.ledger import digest, read_checksum
from titan_rl.record.lines import is_number, superseded
from titan_rl.record.metric_docs import EVAL_SCORE
from titan_rl.record.run_names import ANSWERS, EVALUATIONS, LEDGER, METRICS, ROLLOUTS, SUMMARY
from titan_rl.record.summary import summary_scores
from titan_rl.tools.inspect.line_checks import fields, invalid, is_text, valid_objects
from titan_rl.tools.inspect.run_files import EVALUATION
from titan_rl.tools.inspect.run_history import METRIC, LedgerHistory, PromptHistory
from titan_rl.wire.checkpoint_sums import FOLDER, export_damage

ROLLOUT = fields(
    "step prompt_id sample",
    "tokens mask versions",
    kind=lambda value: value == "rl",
    reward=lambda value: value is None or type(value) in (int, float),
)
TURN = fields("turn branch read sampled")
HELD_OUT = "heldout"
EXPORTED = ("hf", "start")
STORED = fields("step left_out", kind=is_text, set=is_text, problems=lambda value: isinstance(value, list))


def audit(folder: Path, *, active: bool = False, all_bytes: bool = False) -> tuple[list[str], str]:
    """Return all problems of a run, and one line that counts the checked prompts and steps. A copy of an `active` run's
    files has no superseded lines, checkpoints, exported models and evaluations. The bytes of the newest checkpoint are
    read, or of all of them."""
    try:
        history = LedgerHistory.of(folder)
    except OSError as error:
        return [f"{LEDGER}: {error.strerror or error}"], ""
    history.all_bytes = all_bytes
    problems = list[str]()
    for rule in RULES:
        if active and rule in NOT_OF_A_COPY:
            continue
        try:
            problems += rule(history)
        except OSError as error:
            problems.append(f"{Path(error.filename or folder).name}: {error.strerror or error}")
    prompts = history.prompts.values()
    return problems, (
        f"{len(prompts)} prompts: {sum(p.trained is not None for p in prompts)} trained on in {len(history.steps)} "
        f"steps, {sum(bool(p.dropped) for p in prompts)} dropped, "
        f"{sum(not p.undone and not p.final for p in prompts)} unfinished, "
        f"{sum(p.admissions - 1 for p in prompts)} admitted again by {len(history.starts) - 1} restarts"
        + ("" if active else _unread(history))
    )


def events_follow(history: LedgerHistory) -> Iterator[str]:
    """Each event of the ledger is whole, valid and possible after those before it. The first is a start."""
    yield from history.problems
    if not history.starts:
        yield f"{LEDGER}: expected the start of a run, found {'nothing' if not history.prompts else 'none'}"


def config_valid(history: LedgerHistory) -> Iterator[str]:
    """config.toml is one that a run can have."""
    if history.unread:
        yield f"config.toml: {history.unread}"


def nothing_lost(history: LedgerHistory) -> Iterator[str]:
    """Once the run is finished, all prompts that the source gave are trained on or dropped."""
    if not history.finished or any(start.own_loop for start in history.starts):
        return
    for id, prompt in history.prompts.items():
        if not prompt.final and not prompt.undone:
            yield f"prompt {id} was neither trained on nor dropped, and the run is finished"


def steps_whole(history: LedgerHistory) -> Iterator[str]:
    """Steps have all their prompts, and no more of them are done than training.steps."""
    for step, trained in history.steps.items():
        bounds = trained.start.bounds
        if not bounds:
            continue
        expected = bounds["rollout.groups_per_step"]
        if len(trained.prompts) != expected and not trained.start.own_loop:
            yield f"step {step} trained on {len(trained.prompts)} prompts, expected {expected}"
        if step > bounds["training.steps"]:
            yield f"step {step} was trained, though training.steps is {bounds['training.steps']}"


def steps_in_order(history: LedgerHistory) -> Iterator[str]:
    """Without rollout.overtake_steps, prompts are trained on in the source's order."""
    for start in history.starts:
        order = [id for trained in history.steps.values() if trained.start is start for id in trained.prompts]
        late = [b for a, b in pairwise(order) if b < a]
        if late and start.bounds["rollout.overtake_steps"] == 0 and not start.own_loop:
            yield f"prompt {late[0]} was trained on after a later one, though rollout.overtake_steps is 0"


def nothing_stale(history: LedgerHistory) -> Iterator[str]:
    """No prompt was admitted earlier, sampled by an older version or trained on later than its bounds allow."""
    for id, prompt in history.prompts.items():
        if prompt.undone or not (bounds := prompt.start.bounds):
            continue
        oldest, overtake, size = (
            bounds[f"rollout.{key}"] for key in ("max_staleness_steps", "overtake_steps", "group_size")
        )
        if prompt.turn - 1 - prompt.admitted > oldest - overtake and not prompt.start.own_loop:
            ahead = f"rollout.max_staleness_steps - overtake_steps is {oldest - overtake}"
            yield f"prompt {id} was admitted after step {prompt.admitted} for step {prompt.turn}, {ahead}"
        if prompt.trained is None:
            continue
        ordered = not prompt.start.own_loop
        if ordered and len(prompt.tokens or ()) != size:
            yield f"prompt {id} has {len(prompt.tokens or ())} samples, expected {size}"
        if ordered and prompt.trained > prompt.turn + overtake:
            yield f"prompt {id} was trained on at step {prompt.trained}, its turn was step {prompt.turn}"
        if prompt.versions and (age := prompt.trained - 1 - prompt.versions[0]) > oldest:
            yield f"prompt {id} was {age} steps old at step {prompt.trained}, the bound is {oldest}"


def rollouts_agree(history: LedgerHistory) -> Iterator[str]:
    """rollouts.jsonl has each sample that was trained on once, with the ledger's tokens, versions, turns and reward."""
    seen, checksums = defaultdict[tuple[int, int], list[int]](list), defaultdict[int, int](int)
    unknown: set[tuple[int, int]] = set()
    for at, line, rollout in history.files.objects(ROLLOUTS, ROLLOUT):
        if isinstance(rollout, str):
            yield rollout
            continue
        key, sample = (rollout["step"], rollout["prompt_id"]), rollout["sample"]
        step, id = key
        checksums[step] = zlib.crc32(line, checksums[step])
        prompt = history.prompts.get(id)
        if prompt is None or step not in prompt.steps:
            if key not in unknown:
                unknown.add(key)
                yield f"{ROLLOUTS} has prompt {id} at step {step}, the ledger does not"
            continue
        if sample in seen[key]:
            yield f"{at}: sample {sample} of prompt {id} at step {step} is there twice"
        seen[key].append(sample)
        for wrong in _sample_problems(rollout, prompt):
            yield f"{at}: prompt {id}, sample {sample} at step {step}: {wrong}"
    for id, prompt in history.prompts.items():
        for step in filter(history.written, prompt.steps):
            samples, expected = seen.get((step, id), []), len(prompt.tokens or ())
            if not samples:
                yield f"the ledger has prompt {id} at step {step}, {ROLLOUTS} does not"
            elif set(samples) != set(range(expected)):
                has = f"prompt {id} at step {step} has the samples {sorted(samples)}"
                yield f"{ROLLOUTS}: {has}, expected 0 to {expected - 1}"
    yield from _checksum_problems(history, ROLLOUTS, 1, checksums)


def _sample_problems(rollout: Mapping[str, Any], prompt: PromptHistory) -> Iterator[str]:
    sampled = [token for token, own in zip(rollout["tokens"], rollout["mask"], strict=False) if own]
    sample, rewards = rollout["sample"], prompt.rewards or ()
    if sample >= len(prompt.digests):
        yield f"the ledger has {len(prompt.digests)} samples"
    elif digest(sampled, rollout["versions"]) != prompt.digests[sample]:
        yield "its tokens or versions do not have the digest in the ledger"
    if prompt.turns_of(sample) or "turns" in rollout:
        yield from _turn_problems(rollout, prompt)
    rewarded = sample < len(rewards) and rollout["step"] == prompt.trained  # in an earlier step, by other rewards
    if rewarded and rollout["reward"] != rewards[sample]:
        yield f"reward {rollout['reward']}, {rewards[sample]} in the ledger"


def _turn_problems(rollout: Mapping[str, Any], prompt: PromptHistory) -> Iterator[str]:
    """Compare each turn with the engine's answer in the ledger: the mask has exactly the sampled tokens, the
    engine read the tokens before them, and no turn is missing or there twice."""
    tokens, mask, versions = rollout["tokens"], rollout["mask"], rollout["versions"]
    recorded = prompt.turns_of(rollout["sample"])
    read = mask.index(1) if 1 in mask else 0
    single = {"turn": min(recorded, default=0), "branch": 0, "read": read, "sampled": sum(mask)}
    single["images"] = rollout.get("images", [])
    turns = rollout.get("turns", [single])
    if not isinstance(turns, list) or any(not isinstance(turn, dict) or invalid(turn, TURN) for turn in turns):
        yield f"expected valid turns, found {str(turns)[:80]}"
        return
    if sorted(turn["turn"] for turn in turns) != sorted(recorded):
        yield f"it has the turns {sorted(turn['turn'] for turn in turns)}, the ledger {sorted(recorded)}"
        return
    at = sampled_before = begin = 0
    for before, turn in zip([None, *turns], turns, strict=False):
        if before is None or turn["branch"] != before["branch"]:
            begin = at
        answered, middle, end = recorded[turn["turn"]], at + turn["read"], at + turn["read"] + turn["sampled"]
        if any(mask[at:middle]) or not all(mask[middle:end]):
            yield f"the mask of turn {turn['turn']} is not on exactly the sampled tokens"
        if [middle - begin, read_checksum(tokens[begin:middle])] != list(answered.read):
            yield f"the engine read other tokens before turn {turn['turn']}"
        of = versions[sampled_before : sampled_before + turn["sampled"]]
        if (turn["sampled"], digest(tokens[middle:end], of)) != (answered.tokens, answered.digest):
            yield f"the engine sampled other tokens or versions in turn {turn['turn']}"
        if turn.get("images", []) != [*answered.images]:
            yield f"turn {turn['turn']} came with other images than in the ledger"
        if turn.get("seat", "") != answered.seat:
            player = turn.get("seat") or "none"
            yield f"turn {turn['turn']} is of player {player}, in the ledger of {answered.seat or 'none'}"
        elif rollout.get("opponents", {}).get(answered.seat, "") != answered.opponent:
            player = rollout.get("opponents", {}).get(answered.seat, "the policy")
            yield f"turn {turn['turn']} was played by {player}, in the ledger by {answered.opponent or 'the policy'}"
        at, sampled_before = end, sampled_before + turn["sampled"]
    if at != len(tokens):
        yield f"its turns have {at} of {len(tokens)} tokens"
    elif "seats" in rollout:
        yield from _player_problems(rollout, turns)


def _player_problems(rollout: Mapping[str, Any], turns: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """Compare the digests of the tokens that were trained on with the sampled tokens of the players that have a
    reward."""
    seats, logprobs, trained = rollout["seats"], rollout.get("logprobs"), rollout.get("trained")
    opponents = rollout.get("opponents", {})
    rewards = [*seats.values()] if isinstance(seats, dict) else [...]
    rewarded = all(reward is None or is_number(reward) for reward in rewards)
    if not (rewarded and isinstance(logprobs, list) and isinstance(trained, dict)):
        yield f"expected a reward and a digest of each player, found {str(seats)[:80]}, {str(trained)[:80]}"
        return
    own, at = defaultdict[str, list[int]](list), 0
    for turn in turns:
        at += turn["read"] + turn["sampled"]
        sampled = range(at - turn["sampled"], at)
        own[turn.get("seat", "")] += [rollout["tokens"][i] for i in sampled if is_number(logprobs[i])]
    nothing = tokens_digest(())
    for seat, digest_of_seat in trained.items():
        if seat in opponents and digest_of_seat != nothing:
            yield f"it was trained on tokens of {seat}, whom {opponents[seat]} plays"
        elif seats.get(seat) is None and digest_of_seat != nothing:
            yield f"it was trained on tokens of {seat}, which has no reward"
        elif digest_of_seat not in (nothing, tokens_digest([own[seat]])):
            yield f"it was trained on tokens that {seat} did not sample"


def metrics_agree(history: LedgerHistory) -> Iterator[str]:
    """metrics.jsonl has each step once, as the run wrote it."""
    last, checksums = 0, dict[int, int]()
    for at, line, metrics in history.files.objects(METRICS, METRIC):
        if isinstance(metrics, str):
            yield metrics
        elif metrics["kind"] == "rl":
            step = metrics["step"]
            if step != last + 1:
                yield f"{at}: step {step} follows step {last}"
            if step not in history.steps:
                yield f"{at}: step {step}, which the ledger has not trained"
            last, checksums[step] = step, zlib.crc32(line)
    for step in history.steps:
        if step not in checksums and history.written(step):
            yield f"{METRICS}: step {step} is missing, which the ledger has"
    yield from _checksum_problems(history, METRICS, 0, checksums)


def _checksum_problems(history: LedgerHistory, name: str, which: int, checksums: Mapping[int, int]) -> Iterator[str]:
    for step, trained in history.steps.items():
        if trained.logged is not None and step in checksums and checksums[step] != trained.logged[which]:
            yield f"{name}: the lines of step {step} are not as the run wrote them: their checksum differs"


def checkpoints_saved(history: LedgerHistory) -> Iterator[str]:
    """The ledger has saved each checkpoint that is whole, none is damaged, and the newest is there. Old ones may be
    gone."""
    if history.config is None:
        return
    checkpoints = Checkpoints.of(history.files.folder, history.config)
    whole = checkpoints.whole_steps()
    unsaved = [step for step in whole if step not in history.saved]
    yield from (f"{FOLDER}/step-{step} is whole, but the ledger never saved step {step}" for step in unsaved)
    for found, step, read in _whole_checkpoints(history):
        if (found is checkpoints and step in unsaved) or not (damaged := found.damage(step, read=read)):
            continue
        yield damaged.removeprefix(f"{history.files.folder}/")
    newest = max((step for step, trained in history.steps.items() if trained.saved), default=0)
    # Else a kill may have come before the checkpoint was whole.
    ended = history.last > newest or (history.finished and history.files.summary().get("steps") == newest)
    if newest and ended and newest not in whole:
        yield f"the ledger saved step {newest}, of which {FOLDER} has no whole checkpoint"


def _whole_checkpoints(history: LedgerHistory) -> list[tuple[Checkpoints, int, bool]]:
    """Return the whole steps of each phase, oldest first, and which of them are read to the last byte."""
    if history.config is None:
        return []
    phases = [Checkpoints.of(history.files.folder, history.config, phase) for phase in ("cold_start", "rl")]
    found = [(checkpoints, step) for checkpoints in phases for step in checkpoints.whole_steps()]
    return [(*each, history.all_bytes or each == found[-1]) for each in found]


def _unread(history: LedgerHistory) -> str:
    """Return which checkpoints were compared by their sizes only."""
    unread = [
        str((checkpoints.folders[0] / f"step-{step}").relative_to(history.files.folder))
        for checkpoints, step, read in _whole_checkpoints(history)
        if not read
    ]
    return f". Only the sizes of {', '.join(unread)} were compared: --all-bytes reads them" if unread else ""


def exports_whole(history: LedgerHistory) -> Iterator[str]:
    """The models in hf and start have the bytes that the run wrote."""
    for path in (history.files / name for name in EXPORTED):
        if os.path.lexists(path) and (why := export_damage(path, read=True)):
            yield f"{path.name}: {why}"


def answers_agree(history: LedgerHistory) -> Iterator[str]:
    """The stored answers have the rewards of evaluations.jsonl, and are as they were written."""
    if not all((history.files / name).exists() for name in (EVALUATIONS, ANSWERS)):  # an earlier version's run
        return
    rewards = defaultdict[Any, list[Any]](list)  # a step that is made again after a rollback is evaluated again
    for line in history.files.evaluations():
        rewards[line["kind"], line["step"], line["set"]].append((line["rewards"], line.get("answers")))
    for at, raw, line in history.files.objects(ANSWERS, STORED):
        if isinstance(line, str):
            yield line
            continue
        known = rewards.get((line["kind"], line["step"], line["set"]), [(None, None)])
        own = zlib.crc32(raw)
        found, sum = next((each for each in known if each[1] == own), known[-1])
        if found is None:
            if history.written(line["step"]):
                yield f"{at}: answers of step {line['step']}, of which {EVALUATIONS} has no evaluation"
            continue
        try:
            stored = {
                (str(p["problem"]), a["sample"]): (a["reward"], found[str(p["problem"])][a["sample"]])
                for p in line["problems"]
                for a in p["answers"]
            }
        except (KeyError, IndexError, TypeError) as error:
            yield f"{at}: {type(error).__name__}: {error}"
            continue
        if sum is not None and own != sum:
            yield f"{at}: the answers are not as the run wrote them: {EVALUATIONS} has another checksum"
        for (problem, sample), (reward, expected) in stored.items():
            if reward != expected:
                yield f"{at}: problem {problem}, sample {sample} has the reward {reward}, {expected} in {EVALUATIONS}"


def scores_agree(history: LedgerHistory) -> Iterator[str]:
    """evaluations.jsonl and summary.json have the scores of metrics.jsonl."""
    metrics = list(valid_objects(history.files / METRICS, METRIC))
    scored = [line for line in metrics if EVAL_SCORE in line]
    scores = {_evaluated(line): line[EVAL_SCORE] for line in scored if is_number(line[EVAL_SCORE])}
    measured, lines = dict[tuple[bool, int], float](), set[bytes]()
    if os.path.lexists(history.files / EVALUATIONS):
        for at, raw, line in history.files.objects(EVALUATIONS, EVALUATION):
            if isinstance(line, str):
                yield line
                continue
            if raw in lines:
                yield f"{at}: an evaluation that is there twice"
            lines.add(raw)
            cold, step = evaluated = _evaluated(line)
            if not cold and step > history.last:
                yield f"{at}: an evaluation of step {step}, which the ledger has not trained"
            if line["set"] == HELD_OUT:
                rewards = [reward or 0.0 for answers in line["rewards"].values() for reward in answers]
                measured[evaluated] = fsum(rewards) / max(1, len(rewards))
                if line["kind"] == "eval" and evaluated not in scores and history.written(step):
                    yield f"{at}: an evaluation of step {step}, which {METRICS} does not have"
    for (cold, step), score in scores.items():
        if not cold and step > 0 and not history.written(step):
            continue
        what = f"step {step}" + " of the cold start" * cold
        if (cold, step) not in measured:
            yield f"{EVALUATIONS} has no evaluation of {what}, whose score is {score:g} in {METRICS}"
        elif abs(measured[cold, step] - score) > 1e-6:
            yield f"{EVALUATIONS}: {what} has the score {measured[cold, step]:g}, {score:g} in {METRICS}"
    if history.finished and os.path.lexists(history.files / SUMMARY):
        yield from _summary_problems(history, metrics)


def _evaluated(line: Mapping[str, Any]) -> tuple[bool, int]:
    """Return whether a line is of the cold start, and its step. Steps are counted from 0 in both."""
    return line["kind"] == "cold_start", line["step"]


def _summary_problems(history: LedgerHistory, metrics: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    if not (history.files / SUMMARY).is_file():
        yield f"{SUMMARY}: expected a file, found something else"
        return
    try:
        summary = json.loads((history.files / SUMMARY).read_bytes())
        steps, seed = summary["steps"], summary.get("seed")
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        yield f"{SUMMARY}: {type(error).__name__}: {error}"
        return
    if steps != history.last and steps in (start.step for start in history.starts[1:]):
        return  # an earlier process wrote it, and the one that made the last step was killed before it wrote its own
    if steps != history.last:
        yield f"{SUMMARY}: {steps} steps, the ledger has {history.last}"
    if history.config is not None and seed not in (None, history.config.debug.seed):
        yield f"{SUMMARY}: the seed is {seed}, {history.config.debug.seed} in config.toml"
    for key, score in summary_scores(metrics).items():
        if key in summary and summary[key] != score:
            yield f"{SUMMARY}: {key} is {summary[key]}, {score} in {METRICS}"


def logs_complete(history: LedgerHistory) -> Iterator[str]:
    """Lines left metrics.jsonl and rollouts.jsonl only by a restart, which moved them to *.superseded.jsonl."""
    kinds, seen, twice = set[str](), set[int](), ""
    for at, raw, line in history.files.objects(METRICS, METRIC):
        if isinstance(line, dict):
            kinds.add(line["kind"])
        hashed = hash(raw)
        if hashed in seen:
            twice = twice or f"{at}: a line that is there twice"
        seen.add(hashed)
    if twice:
        yield twice
    if history.starts and "startup" not in kinds:
        yield f"{METRICS} has no line of a start, the ledger has {len(history.starts)}"
    earliest = min([start.step for start in history.starts[1:]] + [history.cut])
    for name in (METRICS, ROLLOUTS):
        moved = _rl_steps(superseded(history.files / name))
        invented = sorted(step for step in moved if step <= earliest)
        if invented:
            where = superseded(history.files / name).name
            yield f"{where} has step {invented[0]}, to before which the run never returned"
        cut = [step for step in history.steps if step > history.cut and step not in moved and history.uncut(step)]
        present = _rl_steps(history.files / name) if cut else ()
        for step in cut:
            if step not in present:
                yield f"{name}: step {step} is missing, and no restart has moved it aside"


def _rl_steps(path: Path) -> set[int]:
    """Return the RL steps of which a file has lines."""
    if not os.path.lexists(path):
        return set()
    return {line["step"] for line in valid_objects(path, METRIC) if line["kind"] == "rl"}


Rule = Callable[[LedgerHistory], Iterator[str]]
BOUND_RULES: tuple[Rule, ...] = (nothing_lost, steps_whole, steps_in_order, nothing_stale)
NOT_OF_A_COPY: tuple[Rule, ...] = (logs_complete, checkpoints_saved, exports_whole, scores_agree, answers_agree)
RULES = (events_follow, config_valid, *BOUND_RULES, rollouts_agree, metrics_agree, *NOT_OF_A_COPY)
