"""Checks of a teacher's keys."""

from collections.abc import Iterator, Sequence
from functools import partial

from titan_rl.config.sections import Config
from titan_rl.ext.teachers.privileged import CONTEXTS, KEY, last_user, template_of, text_of
from titan_rl.preflight.refusal import problem


def problems(config: Config) -> Iterator[str]:
    """Check the keys of distillation."""
    wrong, a = partial(problem, config), config.algorithm
    if config.cold_start.teacher_prompts and not {"demonstration", "answer"} & {*a.teacher_context}:
        why = 'because algorithm.teacher_context has no "demonstration" or "answer", which examples have'
        yield wrong("cold_start.teacher_prompts", f"false, {why}")
    if unknown := [kind for kind in a.teacher_context if kind not in CONTEXTS]:
        names = ", ".join(f'"{kind}"' for kind in CONTEXTS)
        yield f'algorithm.teacher_context: expected some of {names}, found "{unknown[0]}"'
    if not a.needs_teacher:
        why = 'because there is no teacher: set algorithm.advantage = "teacher", or algorithm.teacher_coef above 0'
        if a.teacher_weights != "folder":
            yield wrong("algorithm.teacher_weights", f'"folder", {why}')
        if a.teacher_context:
            yield wrong("algorithm.teacher_context", f"[], {why}")
        return
    if a.advantage == "teacher" and a.teacher_coef:
        yield wrong("algorithm.teacher_coef", '0, because algorithm.advantage = "teacher" uses nothing else')
    if a.advantage == "teacher" and a.normalize == "batch" and a.teacher_context:
        why = "because whitening would give a signal to answers without a context (algorithm.teacher_context)"
        yield wrong("algorithm.normalize", f'"none", {why}')
    if a.teacher_weights != "folder" and config.teacher.hf_assets_path:
        yield wrong("teacher.hf_assets_path", f'"", because algorithm.teacher_weights = "{a.teacher_weights}"')
    if a.teacher_weights == "policy" and not a.teacher_context:
        why = 'because algorithm.teacher_weights = "policy" knows nothing else'
        yield wrong("algorithm.teacher_context", f'"sibling", "feedback", "demonstration" or "answer", {why}')
    if a.teacher_context == ["sibling"] and config.rollout.group_size < 2:
        yield wrong("rollout.group_size", 'at least 2, because algorithm.teacher_context is "sibling"')
    if a.teacher_context:
        yield from _check_template(config)


def _check_template(config: Config) -> Iterator[str]:
    try:
        messages = template_of(config.teacher.template)([{"role": "user", "content": "?"}], "!")
        text_of(messages[last_user(messages)])
    except Exception as error:  # a user's function may raise any error
        named = str(error).startswith(KEY)
        yield str(error) if named else f"{KEY}: expected a function that returns messages, found {error!r}"


def warnings(config: Config) -> Sequence[str]:
    return ()
