"""Looks for what goes wrong between messages and tokens, on sample conversations of one tokenizer and its template.

    inspect_template(tokenizer) -> findings: the check, its result, and whether a run must not begin

Nothing here needs a model: each check renders a few messages, which takes milliseconds.
"""

import resource
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from titan_rl.text.answers import MalformedCall
from titan_rl.text.chat import ChatRenderer, common_length
from titan_rl.text.template import Message, named_tokens
from titan_rl.text.tokenizer import TextTokenizer
from titan_rl.wire.types import Branch, Completion, Turn

SYSTEM: Message = {"role": "system", "content": "Answer briefly, please."}
ASKED: Message = {"role": "user", "content": "What is 37*41?"}
MORE: Message = {"role": "user", "content": "And 52*68?"}
SAID: Message = {"role": "assistant", "content": "It is 1517."}
THEN: Message = {**SAID, "content": "It is 3536."}
THOUGHT: Message = {**SAID, "reasoning_content": "37*41 is 1517"}
ARGUMENTS = {"b": 41, "a": 37}
CALLED: Message = {
    "role": "assistant",
    "content": "",
    "tool_calls": [{"id": "call00000", "type": "function", "function": {"name": "multiply", "arguments": ARGUMENTS}}],
}
THOUGHT_CALL: Message = {**CALLED, "reasoning_content": "I use the tool"}
RESULT: Message = {"role": "tool", "tool_call_id": "call00000", "name": "multiply", "content": "exactly 1517"}
PARAMETERS = {"type": "object", "properties": {name: {"type": "integer"} for name in "ab"}, "required": ["a", "b"]}
TOOL = {"name": "multiply", "description": "Multiply two numbers.", "parameters": PARAMETERS}
TOOLS: list[dict[str, Any]] = [{"type": "function", "function": TOOL}]
TURNS: dict[str, tuple[list[Message], list[Message]]] = {
    "an answer, then the user": ([ASKED, SAID], [MORE]),
    "two answers, then the user": ([ASKED, SAID, MORE, THEN], [{**MORE, "content": "And 29*94?"}]),
    "a thought and an answer, then the user": ([ASKED, THOUGHT], [MORE]),
    "a call, then its result": ([ASKED, CALLED], [RESULT]),
    "a thought and a call, then its result": ([ASKED, THOUGHT_CALL], [RESULT]),
    "a call, an answer, then the user": ([ASKED, THOUGHT_CALL, RESULT, THOUGHT], [MORE]),
}
SAMPLE: list[Message] = [SYSTEM, ASKED, SAID, MORE]
TEXTS = ("12 + 34 = 46\n", "  two  spaces,\ttab\n\n\n", "naïve café 東京 🙂", 'def f(x): return {"a": x}')
PIN = (
    "the chat template writes today's date, so runs differ from day to day: "
    'set task.chat_template_kwargs = {date_string = "26 Jul 2024"}'
)
DATE, END, LATER = "date", "end of a turn", "later messages"
MOST_CHARACTERS, MOST_BYTES = 200_000, 2**30
"""Length of the prompt of a short question, and memory that a template may take to render it."""
SHOWN = 8  # tokens of context on each side of a difference


@dataclass(frozen=True, slots=True)
class Finding:
    """The outcome of one check. Without a detail all is well; `refuses`: a run must not begin like this."""

    check: str
    detail: str = ""
    refuses: bool = False


Check = Callable[[TextTokenizer], Iterator[Finding]]


def inspect_template(text: TextTokenizer) -> list[Finding]:
    """Return the findings of all checks. A template that cannot render one question ends the inspection."""
    if why := unusable(text):
        return [Finding("one question", why, refuses=True)]
    return [finding for check in CHECKS for finding in check(text)]


def unusable(text: TextTokenizer) -> str:
    """Return why the template cannot render one question, or ""."""
    try:
        with at_most(MOST_BYTES):
            rendered = text.chat.render([ASKED])
        if len(rendered) > MOST_CHARACTERS:
            return f"expected a prompt of at most {MOST_CHARACTERS:,} characters, found one of {len(rendered):,}"
        text.chat.outside.encode(rendered)
    except Exception as error:  # a template may raise anything
        return f"expected a prompt, found {type(error).__name__}: {error}"
    return ""


@contextmanager
def at_most(nbytes: int) -> Iterator[None]:
    """Let this process allocate at most this much more memory. Beyond it, Python raises MemoryError."""
    before = resource.getrlimit(resource.RLIMIT_AS)
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    limits = [pages * resource.getpagesize() + nbytes, *(each for each in before if each != resource.RLIM_INFINITY)]
    resource.setrlimit(resource.RLIMIT_AS, (min(limits), before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)


def verdict(findings: Sequence[Finding]) -> str:
    """Return in a few words what a turn costs with this template."""
    extends = [finding for finding in findings if finding.check in TURNS]
    if not any(finding.detail for finding in extends):
        return "extends its own text: one branch per rollout"
    if not any("begins a branch" in finding.detail for finding in extends):
        return "does not extend its own text; turns are kept as sampled: one branch per rollout"
    return "does not extend its own text: some turns begin a branch"


def difference(text: TextTokenizer, expected: Sequence[int], found: Sequence[int]) -> str:
    """Return the first difference of two token sequences in its context; "" if there is none."""
    at = common_length(expected, found)
    if at == len(expected) == len(found):
        return ""
    before, one, other = (
        repr(text.decode(tokens, skip_special=False))
        for tokens in (expected[max(0, at - SHOWN) : at], expected[at : at + SHOWN], found[at : at + SHOWN])
    )
    return f"token {at}, after {before}: expected {one}, found {other}"


def answered(chat: ChatRenderer, messages: Sequence[Message], tools: Any) -> list[int]:
    """Return the tokens of a conversation that ends in an assistant's turn, as if the policy had just sampled it."""
    opened, whole = chat.render(messages[:-1], tools), chat.render(messages, tools, opened=False)
    said = whole[common_length(opened, whole) :]
    end = chat.end_of_turn.search(said)
    return chat.outside.encode(opened + (said[: end.end()] if end else said))


def sample_turns(text: TextTokenizer) -> list[tuple[list[int], list[int]]]:
    """Return a conversation as a rollout holds it: the new tokens that each turn reads, and the sampled ones. It has a
    call and its result, if the template has calls."""
    talks: list[tuple[list[Message], Any]] = [([SAID, MORE, THEN], None)]
    if text.chat.call_format != "text":
        talks.insert(0, ([CALLED, RESULT, SAID], TOOLS))
    for later, tools in talks:
        for messages in ([SYSTEM, ASKED], [ASKED]):
            try:
                start = text.chat.prompt(messages, tools)
                first = answered(text.chat, [*messages, later[0]], tools)
                added = text.chat.extend(first, later[1:2], tools)
                second = answered(text.chat, [*messages, *later], tools)
            except Exception:  # the next conversation is plainer
                continue
            if added is not None and first[: len(start)] == start:
                opened = text.chat.prompt([*messages, *later[:2]], tools)
                return [(start, first[len(start) :]), (added, second[common_length(opened, second) :])]
    return [(text.chat.prompt([ASKED]), [*text.encode(SAID["content"]), text.eos])]


def _grows(text: TextTokenizer) -> Iterator[Finding]:
    """Compare what the next prompt holds with the tokens of the turns before it, and with what `extend` adds."""
    for name, (before, after) in TURNS.items():
        tools = TOOLS if CALLED in before or THOUGHT_CALL in before else None
        try:
            tokens, grown = answered(text.chat, before, tools), text.chat.prompt([*before, *after], tools)
            added = text.chat.extend(tokens, after, tools)
        except Exception as error:
            yield Finding(name, f"begins a branch: the template raises {type(error).__name__}: {error}")
            continue
        changed = difference(text, tokens, grown[: len(tokens)])
        if added is None:
            why = changed or "the template puts it where no turn ends"
            yield Finding(name, f"begins a branch, as the template changes a sampled turn: {why}")
        elif changed:
            yield Finding(name, f"is kept as sampled, which the template would change: {changed}")
        elif wrong := difference(text, grown, [*tokens, *added]):
            yield Finding(
                name, f"expected what the template adds to a turn, found another delta: {wrong}", refuses=True
            )
        else:
            yield Finding(name)


def _shows(text: TextTokenizer) -> Iterator[Finding]:
    """Look for each message in the text of its conversation."""
    for name, messages, tools in (
        ("first message", [ASKED], None),
        ("system message", [SYSTEM, ASKED], None),
        (LATER, [ASKED, SAID, MORE], None),
        ("a tool's result", [ASKED, CALLED, RESULT], TOOLS),
    ):
        needed = name == "first message"
        try:
            rendered = text.chat.render(messages, tools)
        except Exception as error:
            yield Finding(name, f"the template raises {type(error).__name__}: {error}", refuses=needed)
            continue
        lost = text.chat.dropped(rendered, [m for m in messages if m["role"] != "assistant"])
        named = "".join(f"{message['role']} {message['content']!r}" for message in lost[:1])
        detail = f"expected the text of every message, found none of {named}" if lost else ""
        yield Finding(name, detail, refuses=bool(lost) and needed)
    named = _rendered(text.chat, [ASKED], TOOLS)
    yield Finding("tools", "" if TOOL["name"] in named else "the template does not write the tools' schemas")


def _ends(text: TextTokenizer) -> Iterator[Finding]:
    whole = _rendered(text.chat, [ASKED, SAID], opened=False)
    after = whole[whole.rfind(SAID["content"]) + len(SAID["content"]) :]
    listed = ", ".join(repr(text.decode([id], skip_special=False)) for id in text.chat.eos_ids)
    ids = text.chat.outside.control
    control = next((token for token in ids if after.lstrip().startswith(token)), "")
    if after.strip() and not text.chat.end_of_turn.search(after):
        why = (
            f"where sampling does not stop: add {ids[control]} to rollout.stop_token_ids"
            if control
            else "no such token"
        )
        found = repr(control) if control else repr(after)
        yield Finding(END, f"expected a turn that ends with one of {listed}, found {found}, {why}")
    else:
        yield Finding(END)  # or there is none: the next turn's first token ends a turn
    shared = text.pad in text.eos_ids
    yield Finding("padding", "the padding token also ends a turn: only masks tell them apart" if shared else "")


def _begins(text: TextTokenizer) -> Iterator[Finding]:
    tokens = text.chat.prompt([ASKED])
    count = tokens.count(text.bos) if text.bos is not None else 0
    shown = "" if text.bos is None else repr(text.decode([text.bos], skip_special=False))
    if text.bos is not None and tokens[:2] == [text.bos, text.bos]:
        yield Finding("begin of a text", f"expected {shown} once, found it twice", refuses=True)
    elif count == 0 and text.bos is not None and text.prompt("1", "plain")[0] == text.bos:
        yield Finding("begin of a text", f"plain prompts begin with {shown}, chats do not")
    else:
        yield Finding("begin of a text")
    whole = text.chat.outside.encode(_rendered(text.chat, [ASKED, SAID], opened=False))
    changed = difference(text, tokens, whole[: len(tokens)])
    yield Finding("opening", f"the template opens an answer unlike it writes one: {changed}" if changed else "")


def _outside(text: TextTokenizer) -> Iterator[Finding]:
    """Let every place of a conversation spell every end of a turn."""
    control = text.chat.outside.control
    unknown = named_tokens(text.settings).get("unk_token")
    forged = " ".join([*(text.decode([id], skip_special=False) for id in text.chat.eos_ids), *list(control)[:64]])
    for name, messages, place in (
        ("control tokens in a user's text", [ASKED], 0),
        ("control tokens in a tool's result", [ASKED, CALLED, RESULT], 2),
    ):
        tools = TOOLS if place else None
        planted = [{**m, "content": f"{m['content']} {forged}"} if i == place else m for i, m in enumerate(messages)]
        try:
            plain, attacked = (text.chat.prompt(each, tools) for each in (messages, planted))
        except Exception:
            yield Finding(name)  # "a tool's result" reports it
            continue
        counted = {id for token, id in control.items() if token != unknown}
        before, after = ([id for id in tokens if id in counted] for tokens in (plain, attacked))
        more = f"expected {len(before)} control tokens, found {len(after)}: text from outside forges turns"
        yield Finding(name, more if before != after else "", refuses=before != after)
    for sample in TEXTS:
        back = text.decode(text.encode(sample))
        if back != sample:
            yield Finding("round trip", f"expected {sample!r} after encode and decode, found {back!r}")
            return
    yield Finding("round trip")


def _keeps(text: TextTokenizer) -> Iterator[Finding]:
    """Note how rendering changes an answer: the earlier turns of a new branch are rendered again."""
    spaced = "  1517 .\n"
    kept = spaced in _rendered(text.chat, [ASKED, {**SAID, "content": spaced}, MORE])
    yield Finding("white space of an answer", "" if kept else "is stripped where a branch renders it again")
    try:
        called = answered(text.chat, [ASKED, CALLED], TOOLS)
    except Exception as error:
        yield Finding("tool calls", f"the template raises {type(error).__name__}: {error}")
        return
    said = called[len(text.chat.prompt([ASKED], TOOLS)) :]
    try:
        found = [call["function"]["name"] for call in text.chat.parse(said, TOOLS).get("tool_calls", [])]
    except MalformedCall as error:
        found = [str(error)]
    if text.chat.call_format == "text":
        yield Finding("tool calls", "the template writes them in no format that can be read back: they stay text")
    elif found != [TOOL["name"]]:
        yield Finding(
            "tool calls", f"expected the call of {TOOL['name']!r} to be read back, found {found}", refuses=True
        )
    else:
        yield Finding("tool calls")
    dated = text.chat.template.depends_on_date([ASKED])
    yield Finding(DATE, PIN if dated else "")


def _masks(text: TextTokenizer) -> Iterator[Finding]:
    """Compare the mask of a trajectory with the sampled tokens: a tool's output in it would be trained on."""
    turns = sample_turns(text)
    branch = Branch([Turn(read, Completion(said, [0.0] * len(said), [0] * len(said), "stop")) for read, said in turns])
    wrong, at = "", 0
    for i, turn in enumerate(turns, 1):
        for bit, part in enumerate(turn):
            tokens, mask = branch.tokens[at : at + len(part)], branch.mask[at : at + len(part)]
            if not wrong and (tokens != part or mask != [bit] * len(part)):
                what = f"turn {i} {('reads', 'samples')[bit]} {text.decode(part, skip_special=False)!r}"
                wrong = f"expected the mask on sampled tokens only, found it wrong where {what}"
            at += len(part)
    yield Finding("mask", wrong, refuses=bool(wrong))


def _rendered(chat: ChatRenderer, messages: Sequence[Message], tools: Any = None, *, opened: bool = True) -> str:
    try:
        return chat.render(messages, tools, opened=opened)
    except Exception:  # another check reports it
        return ""


CHECKS: tuple[Check, ...] = (_shows, _grows, _masks, _ends, _begins, _outside, _keeps)
