"""What a teacher reads that is the policy with another prompt: self-distillation (algorithm.teacher_context).

    the policy     prompt                          | sampled, observation, sampled, ...
    the teacher    prompt by teacher.template      | the same tokens: sampled, observation, sampled, ...

Only tokens before the first sampled one differ, so a teacher's log-prob of a sampled token is that token's by
construction. Each branch of a rollout has its own context, and in each the prompt is exchanged.
"""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import lru_cache, partial

import numpy as np

from titan_rl.config.sections import Config
from titan_rl.text.chat import common_length
from titan_rl.text.template import Message
from titan_rl.text.tokenizer import TextTokenizer
from titan_rl.wire.side_columns import side_column
from titan_rl.wire.types import Group, Prompt, Rollout, Sample
from titan_rl.wire.user_functions import keywords_of, load

KEY = "teacher.template"
CONTEXTS = ("sibling", "feedback", "demonstration", "answer")
OTHER_TEXT = "\ue007"  # no prompt begins or ends with it

Template = Callable[[Sequence[Message], str], list[Message]]
"""Returns the messages of a prompt, with a privileged context in them."""


def template_of(template: str) -> Template:
    """Return a template's function. Raise ValueError if it is neither a text with {prompt} and {context} nor the name
    of a function."""
    if not ("{prompt}" in template and "{context}" in template):
        if "{" in template or ":" not in template:
            expected = 'a text with {prompt} and {context}, or "package.module:function"'
            raise ValueError(f'{KEY}: expected {expected}, found "{template}"')
        function = load(template, KEY)
        return lambda messages, context: function(
            **keywords_of(function, {"messages": list(messages), "context": context}, KEY)
        )

    def filled(messages: Sequence[Message], context: str) -> list[Message]:
        last = last_user(messages)
        values = {"{prompt}": text_of(messages[last]), "{context}": context}
        return with_text(messages, re.sub(r"\{prompt\}|\{context\}", lambda found: values[found[0]], template))

    return filled


class PrivilegedPrompts:
    """Makes the teacher's samples of a run."""

    def __init__(self, config: Config, tokenizer: TextTokenizer) -> None:
        self._kinds, self._correct_at = config.algorithm.teacher_context, config.curriculum.correct_at
        self._template, self._tokenizer = template_of(config.teacher.template), tokenizer

    def samples(self, groups: Sequence[Group], samples: Sequence[Sample]) -> list[Sample | None]:
        """Return the teacher's sample for each of the policy's (batch/experience.py made one of every branch of every
        valid rollout, in order). None: there is no privileged context for it."""
        policy, teachers = iter(samples), list[Sample | None]()
        for group in groups:
            exchange = lru_cache(partial(self._exchange, group.prompt))  # siblings mostly share a context
            for k, rollout in enumerate(group.rollouts):
                context = self.context(group, k) if rollout.valid else ""
                for _ in rollout.branches if rollout.valid else ():
                    sample = next(policy)
                    teachers.append(exchanged(sample, *exchange(context)) if context else None)
        return teachers

    def supervised(self, prompt: Prompt, sample: Sample) -> Sample | None:
        """Return a sample of the cold start after the teacher's prompt, if the row has a context for it."""
        context = self.context(Group(prompt, []), 0)
        return exchanged(sample, *self._exchange(prompt, context)) if context else None

    def context(self, group: Group, k: int) -> str:
        """Return the privileged context of rollout k of a group, "" if it has none."""
        texts: Mapping[str, Iterator[str]] = {
            "sibling": (
                self._transcript(other)
                for i, other in enumerate(group.rollouts)
                if i != k and other.valid and other.reward >= self._correct_at
            ),
            "feedback": (rollout.feedback for rollout in group.rollouts[k : k + 1]),
            "demonstration": iter([demonstration_of(group.prompt)]),
            "answer": iter([group.prompt.answer]),
        }
        return next((text for kind in self._kinds for text in texts[kind] if text.strip()), "")

    def _transcript(self, rollout: Rollout) -> str:
        """Return all that a rollout sampled, and read between its turns, as text."""
        parts = [branch.tokens[len(branch.turns[0].context) :] for branch in rollout.branches]
        return "\n".join(self._tokenizer.decode(part) for part in parts)

    def _exchange(self, prompt: Prompt, context: str) -> tuple[list[int], list[int]]:
        """Return the tokens of the prompt to replace, and their replacement. Of a chat it is the message that differs,
        with a token of the template on either side: an environment's tools and observations may surround it."""
        if not prompt.messages:
            asked = self._template([{"role": "user", "content": prompt.text}], context)
            return prompt.tokens, self._tokenizer.prompt(text_of(asked[last_user(asked)]), "plain")
        messages, chat = list(prompt.messages), self._tokenizer.chat
        asked, third = self._template(messages, context), with_text(messages, OTHER_TEXT)
        own, other, third = (chat.prompt(each) for each in (messages, asked, third))
        begin = min(common_length(own, third), common_length(other, third))
        end = min(common_length(each[begin:][::-1], third[::-1]) for each in (own, other))
        begin, end = max(begin - 1, 0), max(end - 1, 0)
        return own[begin : len(own) - end], other[begin : len(other) - end]


def exchanged(sample: Sample, old: list[int], new: list[int]) -> Sample | None:
    """Return the sample with `new` in place of `old` in its first context; None if that lacks it, as an agent's own
    prompt does. All tokens from the first sampled one on stay."""
    context, length = [*sample.tokens[: sample.prompt]], len(old)
    at = next((i for i in range(len(context) - length + 1) if context[i : i + length] == old), None)
    if at is None:
        return None
    read, later = [*context[:at], *new, *context[at + length :]], slice(sample.prompt, None)
    extras = {n: side_column(n).after_context(v, sample.prompt, len(read)) for n, v in sample.extras.items()}
    extras = {name: value for name, value in extras.items() if value is not None}
    tokens = np.concatenate([np.asarray(read, np.int64), np.asarray(sample.tokens)[later]])
    mask = np.concatenate([np.zeros(len(read), np.int64), np.asarray(sample.mask)[later]])
    return Sample(tokens, mask, prompt=len(read), sequence=sample.sequence, extras=extras)


def aligned(scores: np.ndarray, sample: Sample, teacher: Sample) -> np.ndarray:
    """Return a teacher's log-probs at the places of the sample's tokens, 0 in its first context."""
    assert np.array_equal(teacher.tokens[teacher.prompt :], sample.tokens[sample.prompt :])
    return np.concatenate([np.zeros(sample.prompt), scores[teacher.prompt :]])


def demonstration_of(prompt: Prompt) -> str:
    """Return the row's demonstration as text, with the messages between its turns."""
    parts = list[str]()
    for text, read in prompt.demonstration:
        parts += [text, *([read] if isinstance(read, str) else map(text_of, read))]
    return "\n".join(part for part in parts if part)


def last_user(messages: Sequence[Message]) -> int:
    """Return the index of the last user's message, or of the last one if there is none."""
    return next((i for i in reversed(range(len(messages))) if messages[i]["role"] == "user"), len(messages) - 1)


def text_of(message: Message) -> str:
    content = message.get("content") or ""
    return content if isinstance(content, str) else "".join(part.get("text", "") for part in content)


def with_text(messages: Sequence[Message], text: str) -> list[Message]:
    """Return the messages with another text in the last user's."""
    last = last_user(messages)
    return [{**message, "content": text} if i == last else message for i, message in enumerate(messages)]
