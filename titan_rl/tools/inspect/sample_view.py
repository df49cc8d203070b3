"""Shows samples to a person: a header with reward and length, then the conversation turn by turn.

All functions yield lines of text, which are wrapped at `width` characters; 0 keeps the lines of the texts as they are.
"""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from statistics import fmean
from typing import Any

from rich.console import Console
from rich.text import Text

from titan_rl.record.terminal import visible
from titan_rl.text.tokenizer import TextTokenizer
from titan_rl.tools.inspect.samples import RunSample, first_turn
from titan_rl.tools.inspect.token_view import conversation_tokens, printed
from titan_rl.wire.types import IMAGES

ROLES = {"system": "magenta", "developer": "magenta", "user": "cyan", "prompt": "cyan", "assistant": "green"}
OTHERS = {"tool": "yellow", "ipython": "yellow", "function": "yellow", "model": "green"}
ROLE = re.compile(rf"({'|'.join([*ROLES, *OTHERS])})\s*(?:\n|$)")
FOLDED_LINES, FOLDED_CHARACTERS = 4, 400  # a system prompt is cut there
TABLE_WIDTH = 120
ENDS = {
    "stop": "stopped",
    "length": "cut off at max_new_tokens",
    "abort": "stopped before it answered",
    "max_turns": "stopped at environment.max_turns",
    "max_tokens": "cut off at environment.max_tokens",
    "context_overflow": "cut off: no room for another turn in training.seq_len",
    "parse_error": "its answer could not be read",
}
PLAIN = Console(width=TABLE_WIDTH)  # Text.wrap asks one for the width of a tab


def number(value: float | None) -> str:
    """Return a number with two decimals; a small one has two digits. Zero has no sign."""
    if value is None:
        return "none"
    text = f"{value:.2f}" if abs(value) >= 0.01 or not value else f"{value:.2g}"
    return text.removeprefix("-") if not float(text) else text


def ending(sample: RunSample) -> str:
    """Return why a sample ended."""
    end = sample.finish if sample.status == "completed" else sample.status
    return ENDS.get(end, f"ended as {end}")


def good_and_bad(samples: Sequence[RunSample]) -> list[RunSample]:
    """Return the best and the worst sample of the group whose rewards differ most; of equal rewards, one sample."""
    groups: dict[int, list[RunSample]] = {}
    for sample in samples:
        if sample.reward is not None:
            groups.setdefault(sample.group, []).append(sample)
    if not groups:
        return list(samples[:1])
    group = max(groups.values(), key=spread)
    if not spread(group):
        group = [each for group in groups.values() for each in group]
    best, worst = max(group, key=_reward), min(group, key=_reward)
    return [best, worst] if _reward(best) > _reward(worst) else [best]


def spread(group: Sequence[RunSample]) -> float:
    rewards = [_reward(sample) for sample in group if sample.reward is not None]
    return max(rewards) - min(rewards) if rewards else 0.0


def _reward(sample: RunSample) -> float:
    """Return the reward by which samples are compared: of several players the first one's that is trained, because
    their mean is 0 where one wins what the other loses."""
    own = {seat: reward for seat, reward in sample.seats.items() if seat not in sample.opponents}
    trained = [reward for reward in own.values() if reward is not None]
    return (trained[0] if trained else sample.reward) or 0.0


# -- a conversation ----------------------------------------------------------------------------------------------------


def with_opening(sample: RunSample, tokenizer: TextTokenizer) -> RunSample:
    """Return the sample with the messages that its policy read before its first turn, with tools and without control
    tokens. Without a chat template, its prompt is its text."""
    if sample.opening or not sample.mask:
        return sample
    first = sample.mask.index(1) if 1 in sample.mask else len(sample.mask)
    opening = messages_in(sample.tokens[:first], tokenizer)
    return replace(sample, opening=opening) if opening else sample


def messages_in(tokens: Sequence[int], tokenizer: TextTokenizer) -> list[dict[str, str]]:
    """Split the tokens of a chat at its control tokens, by the role that each names or that follows it. Return no
    message for a text without control tokens, except one that begins it."""
    control = tokenizer.control_ids
    text = tokens[1:] if tokens and tokens[0] == tokenizer.bos else tokens
    if control.isdisjoint(text):
        return []
    messages, role, new, begun = list[dict[str, str]](), "prompt", True, list[int]()

    def add() -> None:
        nonlocal role, new
        part = tokenizer.decode(begun, skip_special=False)
        if new and (named := ROLE.match(part)):
            role, part = named[1], part[named.end() :]
        if part.strip():
            if new or not messages or messages[-1]["role"] != role:
                messages.append({"role": role, "content": part.strip("\n")})
            else:
                messages[-1]["content"] += part
        begun.clear()

    for token in text:
        if token not in control:
            begun.append(token)
            continue
        add()
        word = re.sub(r"[^a-z]", "", tokenizer.decode([token], skip_special=False).lower())
        role, new = (word if word in ROLES or word in OTHERS else role), True
    add()
    return messages


def conversation(sample: RunSample) -> list[Mapping[str, Any]]:
    """Return a sample's messages in order. The role "assistant" is its policy's."""
    opening: list[Mapping[str, Any]] = [*sample.opening] or [{"role": "prompt", "content": sample.prompt}]
    if sample.messages:
        chat = bool(sample.opening)
        return [*opening, *sample.messages[first_turn(opening, sample.messages) if chat else 0 :]]
    begun = opening.pop()["content"] if len(opening) > 1 and opening[-1]["role"] == "assistant" else ""
    return [*opening, {"role": "assistant", "content": begun + sample.text}]


def text_of(message: Mapping[str, Any]) -> str:
    """Return a message's text, with its thinking and its tool calls."""
    parts = [f"[thinking] {thinking}" for key in ("reasoning_content", "reasoning") if (thinking := message.get(key))]
    content = message.get("content")
    if isinstance(content, list):  # parts, as clients of OpenAI's API send them
        content = "".join(map(part_text, content))
    parts += [str(content)] if content else []
    calls = message.get("tool_calls")
    for call in calls if isinstance(calls, list) else ():
        function = call.get("function", call) if isinstance(call, Mapping) else None
        if not isinstance(function, Mapping):
            parts.append(f"-> {call}")
            continue
        arguments = function.get("arguments", "")
        shown = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
        parts.append(f"-> {function.get('name', '?')}({shown})")
    return "\n".join(parts)


def part_text(part: Any) -> str:
    """Return the text of a message's part, or the name of its image."""
    found = part if isinstance(part, Mapping) else {}
    if found.get("type") == "image" and isinstance(found.get("image"), str):
        return f"[image {IMAGES}/{found['image']}]"
    text = found.get("text")
    return text if isinstance(text, str) else "[no text]"


def searched(sample: RunSample, pattern: re.Pattern[str]) -> bool:
    """Return True if the pattern is in the prompt or in a turn."""
    return any(map(pattern.search, (sample.prompt, sample.text, *map(text_of, [*sample.opening, *sample.messages]))))


# -- lines -------------------------------------------------------------------------------------------------------------


def sample_lines(
    sample: RunSample, *, width: int, full: bool = False, found: re.Pattern[str] | None = None
) -> Iterator[Text]:
    """Yield a sample whole. A system prompt is folded unless `full`; matches of `found` are marked."""
    yield from header(sample, width)
    for message in conversation(sample):
        role = str(message.get("role"))
        named = message.get("name") and (role in OTHERS or sample.seats)
        opponent = sample.opponents.get(message.get("name", ""))
        name = f" {message['name']}{f' ({opponent})' if opponent else ''}" if named else ""
        text = text_of(message)
        yield Text(printed(role + name), {**ROLES, **OTHERS}.get(role, "cyan") + " bold")
        folded = 0
        if role in ("system", "developer") and not full:
            start = "\n".join(text[:FOLDED_CHARACTERS].split("\n")[:FOLDED_LINES])
            text, folded = start, len(text) - len(start)
        body = Text(printed(text) or "(empty)", "" if text else "dim")
        if found is not None:
            body.highlight_regex(found, "reverse")
        yield from indented(body, width)
        if folded:
            yield Text(f"  ... {folded} more characters: --full", "dim")


def token_lines(sample: RunSample, tokenizer: TextTokenizer, width: int) -> Iterator[Text]:
    """Yield a sample token by token."""
    yield from header(sample, width)
    yield from indented(conversation_tokens(tokenizer, sample.tokens, sample.mask, sample.logprobs), width)


def header(sample: RunSample, width: int) -> Iterator[Text]:
    title = f"── {sample.name} "
    yield Text(title, "bold").append("─" * max(0, (width or 80) - len(title)), "dim")
    yield from wrapped(_judged(sample), width)
    facts = [f"{sample.sampled} tokens", ending(sample)]
    facts += [f"{len(sample.turns)} turns"] if len(sample.turns) > 1 else []
    branches = len({str(turn.get("branch")) for turn in sample.turns})
    players = len({str(turn.get("seat", "")) for turn in sample.turns})
    facts += [f"{players} players"] if players > 1 else []
    facts += [f"{branches} branches: the text before a turn was changed"] if branches > max(players, 1) else []
    facts += [f"attempt {sample.attempts}"] if sample.attempts > 1 else []
    if not sample.set:
        facts.append(f"policy age {sample.age}")
    facts += [f"row {sample.where}"] if sample.where else []
    line = Text(printed(" · ".join(facts)))
    if sample.truncated:
        line.highlight_words([ending(sample)], "yellow")
    yield from wrapped(line, width)
    for name in sample.images:
        yield from wrapped(Text(f"image {IMAGES}/{printed(str(name))}"), width)
    if sample.answer:
        yield from wrapped(Text(f"expected {visible(sample.answer, 400)}"), width)
    if sample.error:
        yield from wrapped(Text(f"failed: {visible(sample.error, 2000)}", "red"), width)


def _judged(sample: RunSample) -> Text:
    style = "bold" if sample.reward is None else "bold green" if sample.reward > 0 else "bold red"
    line = Text.assemble(("no reward" if sample.reward is None else f"reward {number(sample.reward)}", style))
    if sample.rewards:
        line.append(printed(f" ({', '.join(f'{name} {number(value)}' for name, value in sample.rewards.items())})"))
    if sample.seats:
        shown = (f"{name} {'frozen' if r is None else number(r)}" for name, r in sample.players.items())
        line.append(printed(f" · {', '.join(shown)}"))
    if sample.penalty:
        line.append(f" · penalty {number(sample.penalty)}")
    if sample.advantage is not None:
        line.append(f" · advantage {number(sample.advantage)}")
    return line


def group_lines(group: Sequence[RunSample], width: int) -> Iterator[Text]:
    """Yield a table with a row per sample of a group: its reward, advantage, components, length and start."""
    first = group[0]
    rewards = [sample.reward for sample in group if sample.reward is not None]
    title = f"{first.name.rpartition(',')[0]}: {len(group)} samples"
    mean = f", mean reward {number(fmean(rewards))}" if rewards else ", without a reward"
    yield Text(f"── {title}{mean} ", "bold").append("─" * max(0, (width or 80) - len(title + mean) - 4), "dim")
    if first.answer:
        yield from wrapped(Text(f"expected {visible(first.answer, 400)}"), width)
    names = list(dict.fromkeys(name for sample in group for name in sample.rewards))
    heads = ["", "reward", "advantage", *(visible(printed(name), 12) for name in names), "tokens", "age", ""]
    rows = [heads] + [
        [
            str(sample.sample),
            number(sample.reward),
            number(sample.advantage) if sample.advantage is not None else "",
            *(number(sample.rewards.get(name)) for name in names),
            str(sample.sampled),
            "" if sample.set else str(sample.age),
            "cut off" if sample.truncated else "failed" if sample.error else "",
        ]
        for sample in group
    ]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    room = max(20, (width or TABLE_WIDTH) - sum(widths) - 2 * len(widths))
    for row, sample in zip(rows, [None, *group], strict=True):
        line = Text(
            "  ".join(f"{cell:>{size}}" for cell, size in zip(row, widths, strict=True)), "" if sample else "dim"
        )
        if sample is not None:
            said = [text_of(m) for m in conversation(sample) if m.get("role") == "assistant"]
            line.append("  " + visible(" ".join(" | ".join(said).split()), room))
        else:
            line.append("  text")
        yield line


def brief_lines(sample: RunSample, width: int, limit: int) -> list[Text]:
    """Return the header and the end of a conversation in at most `limit` lines."""
    lines = list(sample_lines(sample, width=width))
    size = len(list(header(sample, width)))
    if len(lines) <= limit:
        return lines
    tail = limit - size - 1
    return [*lines[:size], Text(f"  ... {len(lines) - size - tail} lines", "dim"), *lines[-tail:]]


def indented(text: Text, width: int) -> Iterator[Text]:
    for line in text.split("\n", allow_blank=True):
        for part in wrapped(line, max(20, width - 2) if width else 0):
            yield Text("  ").append_text(part) if part else part


def wrapped(line: Text, width: int) -> Iterator[Text]:
    yield from line.wrap(PLAIN, width, overflow="fold") if width and line.cell_len > width else [line]


def as_data(sample: RunSample, *, tokens: bool = False) -> dict[str, Any]:
    """Return a sample as `python -m titan_rl look --json` prints it; docs/operations.md has the keys."""
    found = {
        "step": sample.step if sample.step >= 0 else None,
        "set": sample.set or None,
        "prompt_id": sample.prompt_id,
        "sample": sample.sample,
        "row": sample.where or None,
        "reward": sample.reward,
        "rewards": sample.rewards,
        **({"seats": sample.seats} if sample.seats else {}),
        **({"opponents": sample.opponents} if sample.opponents else {}),
        "penalty": sample.penalty,
        "advantage": sample.advantage,
        "tokens": sample.sampled,
        "ended": sample.status if sample.status != "completed" else sample.finish,
        "cut_off": sample.truncated,
        "error": sample.error or None,
        "policy_age": None if sample.set else sample.age,
        "answer": sample.answer,
        "messages": conversation(sample),
    }
    if tokens:
        found |= {key: getattr(sample, key) for key in ("logprobs", "mask", "versions")} | {"token_ids": sample.tokens}
    return found
