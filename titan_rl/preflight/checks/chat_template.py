"""Checks of the chat template: its keys in [task], and what it makes of sample conversations."""

import os
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from titan_rl.config.data_sources import DataSource, data_sources, source_of, source_problems
from titan_rl.config.sections import Config
from titan_rl.config.toml import as_toml
from titan_rl.preflight.checks.assets import policy_tokenizer
from titan_rl.tasks.task import template_text, with_chat
from titan_rl.text.inspection import DATE, END, LATER, SAMPLE, Finding, difference, inspect_template
from titan_rl.text.template import is_inline
from titan_rl.text.tokenizer import TextTokenizer
from titan_rl.wire.model_shape import ModelShape

RESERVED = ("messages", "tools", "documents", "add_generation_prompt")


def check_template_keys(config: Config) -> Iterator[str]:
    """Check the keys of [task], and those of its sources that differ."""
    task = config.task
    own = source_of(task, task.path, "task.path")
    yield from _template_keys(own, task.template)
    for source in styled_sources(config):
        yield from _template_keys(source, task.template)
        turns = config.rollout_code or source.demonstration_key
        if turns and _style(source) != _style(own):
            why = f"because the later turns of {turns!r} are rendered by that of [task]"
            yield f"{source.section}.chat_template: expected none of its own, {why}, found one, or its own kwargs"


def styled_sources(config: Config) -> list[DataSource]:
    """Return the sources of sound tables that render chats in another way than [task]."""
    task = config.task
    if not task.sources or any(source_problems(task)):
        return []
    own = source_of(task, task.path, "task.path")
    return [
        source
        for source in data_sources(task)
        if (*_style(source), source.system_prompt) != (*_style(own), own.system_prompt)
    ]


def _style(source: DataSource) -> tuple[str, dict[str, Any]]:
    return source.chat_template, source.chat_template_kwargs


def _template_keys(source: DataSource, template: str) -> Iterator[str]:
    section = source.section
    if template == "plain":
        keys = (("chat_template", ""), ("chat_template_kwargs", {}), *([("system_prompt", "")] if source.name else []))
        for key, default in keys:
            if (found := getattr(source, key)) != default:
                expected = f'expected {as_toml(default)} with task.template = "plain"'
                yield f"{section}.{key}: {expected}, found {as_toml(found)}"
    for name in RESERVED:
        if name in source.chat_template_kwargs:
            expected = "expected variables of the template other than those that every rendering sets"
            yield f"{section}.chat_template_kwargs: {expected}, found {name!r}"
    found = as_toml(source.chat_template)
    if source.chat_template and not is_inline(source.chat_template):
        try:
            readable = os.path.isfile(source.chat_template) and bool(template_text(source.chat_template))
        except (OSError, ValueError) as error:
            found, readable = f"{found}: {error}", False
        if not readable:
            yield f"{section}.chat_template: expected a Jinja template or the path of a file with one, found {found}"


def check_chat(config: Config) -> Iterator[str]:
    """Render sample conversations, if the run renders chats with a tokenizer that can be loaded."""
    if config.task.template == "plain":
        return
    with policy_tokenizer(config) as tokenizer:
        if tokenizer is None:
            return
        key = "task.chat_template" if config.task.chat_template else f"the chat template of {tokenizer.folder}"
        for finding in _inspected(config, tokenizer):
            if finding.refuses:
                yield f"{key}: {finding.check}: {finding.detail}"
        for source in styled_sources(config):
            given = template_text(source.chat_template)
            own = replace(tokenizer.chat_settings, template=given, kwargs=source.chat_template_kwargs)
            for finding in _inspected(config, with_chat(tokenizer, own)):
                if finding.refuses:
                    yield f"{source.section}.chat_template: {finding.check}: {finding.detail}"


def chat_warnings(config: Config) -> list[str]:
    """Return what is likely not intended: prompts that change from day to day, and turns that sampling does not end."""
    if config.task.template == "plain":
        return []
    with policy_tokenizer(config) as tokenizer:
        found = inspect_template(tokenizer) if tokenizer else []
    keys = {DATE: "task.chat_template_kwargs", END: "rollout.stop_token_ids"}
    return [f"{keys[finding.check]}: {finding.detail}" for finding in found if finding.check in keys and finding.detail]


def findings_of(config: Config, shape: ModelShape, tokenizer: TextTokenizer) -> Iterator[Finding]:
    """Yield everything that can be said about messages and tokens in a run of this config."""
    size, rows = tokenizer.size, shape.vocab_size
    large = f"expected an embedding of at least {size} rows, one per token, found {rows} in config.json"
    yield Finding("vocabulary", large if size > rows else "", refuses=size > rows)
    if config.task.template == "plain":
        yield Finding("chat template", 'is not used: task.template = "plain"')
        return
    if config.task.chat_template:
        yield from _compared_with_own(tokenizer)
    yield from _inspected(config, tokenizer)


def _inspected(config: Config, tokenizer: TextTokenizer) -> Iterator[Finding]:
    """Yield what an inspection finds. An environment needs more than one question to be read."""
    for finding in inspect_template(tokenizer):
        needed = finding.check == LATER and bool(config.rollout_code)
        yield replace(finding, refuses=True) if finding.detail and needed else finding


def _compared_with_own(tokenizer: TextTokenizer) -> Iterator[Finding]:
    """Compare a given template with the folder's own, which the model was trained with."""
    own = TextTokenizer.load(tokenizer.folder, replace(tokenizer.chat_settings, template=""))
    try:
        expected, found = (each.chat.prompt(SAMPLE) for each in (own, tokenizer))
    except Exception:  # a template may raise whatever it likes; inspect_template says so
        return
    changed = difference(tokenizer, expected, found)
    yield Finding("task.chat_template", f"differs from the one of {tokenizer.folder}: {changed}" if changed else "")
