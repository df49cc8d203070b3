"""Checks of what samples, plays and judges rollouts: [environment], agents and [eval]."""

import asyncio
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial

from titan_rl.agents.games import GAMES
from titan_rl.agents.openenv import sessions_open
from titan_rl.config.eval_sets import EvalSet, eval_sets, problems_of
from titan_rl.config.sections import Config
from titan_rl.config.toml import as_toml, did_you_mean
from titan_rl.preflight.checks.model import policy_tokenizer
from titan_rl.preflight.checks.task import check_callable, unnumbered
from titan_rl.preflight.memory import in_flight
from titan_rl.preflight.openings import first_prompt, openings
from titan_rl.preflight.probe import probe, untokenized
from titan_rl.preflight.refusal import problem
from titan_rl.preflight.row_lengths import first_unfit, other_unfit, unfit_rows
from titan_rl.record.metric_docs import EVAL_SCORE
from titan_rl.record.scores import ks_of
from titan_rl.tasks.examples import GYM, BadRows, Example
from titan_rl.tasks.judging import evaluation_rubric
from titan_rl.tasks.rewards import BUILT_IN
from titan_rl.tasks.row_files import EXPECTED
from titan_rl.tasks.task import Task, load_task, set_rows
from titan_rl.tasks.verifiers import AT_ONCE
from titan_rl.wire.seeds import derive


def check_environment(config: Config) -> Iterator[str]:
    """Check that what drives rollouts can be imported, and fits the task and the run."""
    wrong, e, task = partial(problem, config), config.environment, config.task
    if task.agent:
        yield from _check_agent(config)
    if not config.rollout_code:
        if task.name in GAMES:
            yield wrong("environment.name", f'"{task.name}" for task.name = "{task.name}"')
        return
    if not config.samples_rollouts:
        yield wrong("environment.name" if e.name else "task.agent", '"", because nothing is sampled')
    if e.name in GAMES:
        if task.name != e.name:
            yield wrong("task.name", f'"{e.name}" for environment.name = "{e.name}"')
    elif e.name:
        unusable = list(probe(e.name, first_prompt(config), key="environment.name", environment=e))
        yield from unusable or _check_openings(config)
        yield from _check_server(config, usable=not unusable)
    if e.turn_seconds > e.rollout_seconds:
        yield wrong("environment.turn_seconds", f"at most environment.rollout_seconds = {e.rollout_seconds:g}")
    if e.lockstep and config.rollout.steps_ahead:
        why = "because the rollouts of several steps are in flight with rollout.max_staleness_steps > 0"
        yield wrong("environment.lockstep", f"false, {why}")
    if e.max_tokens > config.training.seq_len:
        yield wrong("environment.max_tokens", f"at most training.seq_len = {config.training.seq_len}")
    if task.name in GAMES and config.cold_start.steps:
        least = GAMES[task.name].longest + 16
        if config.training.seq_len < least:
            longest = f"the longest demonstration of {task.name} with its prompt"
            yield wrong("training.seq_len", f"at least {least}, {longest}")


def _check_openings(config: Config) -> Iterator[str]:
    """Check that demonstrations can be read as rollouts are, of rows that can be read with a tokenizer that can be."""
    with suppress(BadRows, OSError, ValueError):
        task = load_task(config.task, seed=derive(config.debug.seed, "task"), eval_size=config.eval.size)
        if (tokenizer := policy_tokenizer(config)) and (found := openings(config, task, tokenizer).problem):
            yield found


def _check_server(config: Config, *, usable: bool) -> Iterator[str]:
    """Check that the server of an OpenEnv environment is reached and takes enough sessions."""
    prefix, _, url = config.environment.name.partition(":")
    if prefix != "openenv":
        return
    if config.hosts.isolation != "off":
        why = "because the run's own network does not reach the server of environment.name"
        yield problem(config, "hosts.isolation", f'"off", {why}')
    elif usable and (takes := asyncio.run(sessions_open(url, wanted := in_flight(config)))) < wanted:
        most = f"environment.processes x environment.concurrency: expected at most {takes}"
        yield f"{most}, the sessions that {url} takes (its max_concurrent_envs), found {wanted} rollouts in flight"


def _check_agent(config: Config) -> Iterator[str]:
    e, agent = config.environment, config.task.agent
    if e.name:
        yield problem(config, "task.agent", f'"", because environment.name = {as_toml(e.name)} drives the rollouts')
        return
    if e.lockstep:
        why = "because an agent may ask for several turns at the same time"
        yield problem(config, "environment.lockstep", f"false with task.agent, {why}")
    yield from probe(agent, None, key="task.agent", environment=e)


def check_evaluation(config: Config) -> Iterator[str]:
    """Check what concerns [eval.sets] and eval.keep_best."""
    if found := list(problems_of(config.eval.sets)):
        yield from found
        return
    sets = eval_sets(config.eval.sets)
    if sets and config.algorithm.kind == "reward":
        yield f"eval.sets: expected none, because a reward model is evaluated on pairs, found {len(sets)}"
        return
    for chosen in sets:
        yield from _check_set(config, chosen)
    names = best_metrics(config, sets)
    if (metric := config.eval.keep_best) and metric not in names:
        expected = f"one of {', '.join(names)}" if names else '"", because nothing is evaluated (eval.size, eval.sets)'
        yield problem(config, "eval.keep_best", expected) + did_you_mean(metric, names)


def best_metrics(config: Config, sets: Sequence[EvalSet]) -> list[str]:
    """Return the metrics whose best weights can be kept."""
    own = [EVAL_SCORE] if config.eval.size else []
    passes = {each.name: [f"pass@{k}" for k in ks_of(each.samples)] for each in sets}
    return own + [f"eval/{s.name}/{score}" for s in sets for score in (f"avg@{s.samples}", *passes[s.name])]


def _check_set(config: Config, chosen: EvalSet) -> Iterator[str]:
    label = f"eval.sets.{chosen.name}"
    if not chosen.path and not config.eval.size:
        yield f"{label}.path: {EXPECTED}, because eval.size = 0 leaves no held-out problems, found none"
        return
    if chosen.path and config.task.name in (*GAMES, GYM):
        yield f'{label}.path: expected none with task.name = "{config.task.name}", found {as_toml(chosen.path)}'
        return
    examples: Sequence[Example] = ()
    try:
        examples = set_rows(config, chosen).examples if chosen.path else ()
    except BadRows as error:
        yield from error.problems
    except (OSError, ValueError) as error:
        yield str(error)
    yield from _check_reward(config, chosen, label, examples)
    if examples:
        yield from _check_rows(config, label, examples)


def _check_reward(config: Config, chosen: EvalSet, label: str, examples: Sequence[Example]) -> Iterator[str]:
    names = [chosen.reward] if chosen.reward else [name for name, _ in evaluation_rubric(config.task).parts]
    rule = next((name for name in names if name in ("model", "last_number", "number", *AT_ONCE)), names[0])
    if rule in ("model", *AT_ONCE):
        why = "because a reward model cannot measure a policy trained against it"
        why = "because it compares the answers of a group" if rule in AT_ONCE else why
        yield f'{label}.reward: expected a reward other than "{rule}", {why}, found "{rule}"'
    elif rule in ("last_number", "number"):
        bad = next(((e, answer) for e in examples if (answer := unnumbered(e))), None)
        if bad is not None:
            yield f"{label}.reward: expected a number in the answer of {bad[0].where}, found {bad[1]}"
    elif chosen.reward and rule not in BUILT_IN:
        first = next(iter(examples), None)
        prompt = first and untokenized(first, config.task)
        yield from check_callable(f"{label}.reward", rule, prompt, config.task)


def _check_rows(config: Config, label: str, examples: Sequence[Example]) -> Iterator[str]:
    """Check that the prompts fit, with a tokenizer that can be loaded."""
    if config.task.template == "plain" and (chat := next((e for e in examples if not isinstance(e.prompt, str)), None)):
        yield problem(config, "task.template", f'"chat" for the messages in {chat.where}')
    elif tokenizer := policy_tokenizer(config):
        task = Task((), examples, config.task.template, config.task.system_prompt)
        try:
            unfit = unfit_rows(replace(config, task=replace(config.task, name="jsonl")), task, tokenizer)[1]
        except BadRows as error:
            yield from error.problems
            return
        if unfit and (config.task.bad_rows == "refuse" or len(unfit) == len(examples)):
            yield f"{label}: {first_unfit(examples, unfit)}{other_unfit(examples, unfit)}"
