"""Checks of evaluations: [eval]."""

from collections.abc import Iterator, Sequence
from dataclasses import replace

from titan_rl.config.eval_sets import EvalSet, eval_sets, problems_of
from titan_rl.config.sections import Config
from titan_rl.config.toml import as_toml, did_you_mean
from titan_rl.preflight.checks.model import policy_tokenizer
from titan_rl.preflight.checks.task import check_callable, unnumbered
from titan_rl.preflight.probe import untokenized
from titan_rl.preflight.refusal import problem
from titan_rl.preflight.unfit_rows import first_unfit, other_unfit, unfit_rows
from titan_rl.record.metric_docs import EVAL_SCORE
from titan_rl.record.scores import ks_of
from titan_rl.tasks.examples import GYM, BadRows, Example
from titan_rl.tasks.games import GAMES
from titan_rl.tasks.judging import evaluation_rubric
from titan_rl.tasks.rewards import BUILT_IN
from titan_rl.tasks.row_files import EXPECTED
from titan_rl.tasks.task import Task, set_rows
from titan_rl.tasks.verifiers import AT_ONCE


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
